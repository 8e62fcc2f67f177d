"""One step of the run: the sealed batch, its columns, the trainers, its metrics."""
