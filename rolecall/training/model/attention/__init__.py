"""Attention over packed sequences, and what attention sinks and soft caps add to it."""
