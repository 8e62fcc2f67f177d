"""Who takes part in the run, and who is alive."""
