"""Systems that were trained to turn a long prompt into a few vectors."""
