"""Methods that calibrate another method's probabilities, and k-fold cross-validation."""
