"""Tables of recorded runs. Reads records, knows nothing of training."""
