"""A frozen decoder: loaded, borrowed, batched, run, asked and trained on."""
