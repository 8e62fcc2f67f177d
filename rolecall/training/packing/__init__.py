"""The cut of a step's sequences into microbatches of equal work."""
