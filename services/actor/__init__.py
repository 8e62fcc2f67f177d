"""The actor: the policy, its optimizer and the root of the weight channel."""
