"""What fitting and predicting cost on a model: seconds as ratios of paired runs, and peak memory."""
