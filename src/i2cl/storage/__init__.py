"""Storage: atomic writes, append-only journals, model cards and the Hugging Face hub."""
