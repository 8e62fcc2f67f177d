"""The checks of a run that need several of its sections, by what they look at. run.py calls them, in its order."""
