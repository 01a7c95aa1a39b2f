"""Where users come in: the command line, scikit-learn, lm-evaluation-harness. Nothing imports it."""
