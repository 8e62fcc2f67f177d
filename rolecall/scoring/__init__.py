"""What a score is, and the client of every reward service. No torch."""
