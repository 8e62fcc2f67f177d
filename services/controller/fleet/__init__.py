"""The workers that take part in a run, and whether each is alive."""
