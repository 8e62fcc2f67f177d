"""An OpenAI-compatible endpoint for agents that run an episode by themselves, with exact tokens."""
