"""Fit a task: context vectors, the paper's calibration, anchored calibration, and the resulting injection."""
