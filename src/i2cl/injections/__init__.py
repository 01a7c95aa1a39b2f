"""What is done with finished injections: many in one batch, related ones as a start."""
