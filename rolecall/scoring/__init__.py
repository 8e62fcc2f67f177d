"""The contract of a score, and the client of every reward service. No torch."""
