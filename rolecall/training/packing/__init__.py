"""How the sequences of a step are cut into microbatches of equal work."""
