"""Log probabilities and entropy of distributions over the vocabulary, of hidden states and an output layer, without
keeping logits.
"""
