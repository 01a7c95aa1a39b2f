"""Classify files of any length in chunks, resuming after a kill."""
