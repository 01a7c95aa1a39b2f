"""Experiments: run grids of methods, tasks and seeds, store the results, and report them."""
