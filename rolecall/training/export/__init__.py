"""Writes a checkpoint as a Hugging Face model directory: `python -m rolecall.training.export`."""
