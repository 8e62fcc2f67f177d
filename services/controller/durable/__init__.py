"""What survives the controller: checkpoints of the run and taking it up again."""
