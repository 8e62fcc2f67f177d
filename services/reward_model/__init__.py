"""The reward model: a discriminative model behind the public contract of a scorer."""
