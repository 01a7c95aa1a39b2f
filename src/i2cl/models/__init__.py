"""A frozen decoder: loading, encoding, batching, edits, label scores and training."""
