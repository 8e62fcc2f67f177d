"""A group of responses until it is ready: admitted, leased, scored, sorted into a batch."""
