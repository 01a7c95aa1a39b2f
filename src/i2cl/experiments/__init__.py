"""Experiments: many runs, kept on disk, compared and reported."""
