"""Held-out sets: what they are, how their responses are scored, and the figures of an evaluation."""
