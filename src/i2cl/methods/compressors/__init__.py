"""Trained models that compress a long prompt into a few vectors."""
