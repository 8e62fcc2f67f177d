"""Sizes of a run that follow from its model and its lengths: memory of a pass, and what a file may leave out."""
