"""Fit a task: context vectors, calibration of the paper, anchored calibration, and the resulting injection."""
