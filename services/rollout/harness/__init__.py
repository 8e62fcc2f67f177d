"""An endpoint for agents that run an episode by themselves, in the APIs that they know, with exact tokens."""
