"""The turns of an episode: their tokens as the engine and the policy made them, their calls of tools, and the loop of
those that the rollout steps, with the environment's answers and the budgets.
"""
