"""What is shown of one fit: refits that have not seen a text, and what counts allow to say."""
