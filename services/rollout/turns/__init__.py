"""The turns of an episode as the engine and the policy made them: their tokens, and their calls of tools."""
