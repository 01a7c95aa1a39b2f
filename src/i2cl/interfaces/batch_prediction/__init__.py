"""Texts in, predictions out, at any length, and again after a kill."""
