"""Work with fitted injections: serve many in one batch, calibrate their scores, transfer to new tasks."""
