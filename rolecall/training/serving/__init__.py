"""The half of a trainer that runs in the event loop: calls, their order, the device thread. No torch."""
