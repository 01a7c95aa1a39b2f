"""Evaluation of a single fit: held-out rows, significance tests and confidence thresholds."""
