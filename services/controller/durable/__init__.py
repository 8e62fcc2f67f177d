"""The part of a run that survives its controller: checkpoints, and taking the run up again."""
