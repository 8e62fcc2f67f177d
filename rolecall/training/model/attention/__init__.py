"""Attention over packed sequences, and what attention sinks add to it."""
