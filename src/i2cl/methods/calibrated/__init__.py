"""Methods that stand on another one and mend its probabilities; refits that have not seen a text."""
