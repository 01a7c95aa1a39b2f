"""Where users come in: the command line, scikit-learn, server, vLLM. Nothing imports it."""
