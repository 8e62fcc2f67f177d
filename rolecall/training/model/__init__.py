"""Models of transformers as trainers use them: packed sequences, attention, log probabilities, adapters, and their
files.
"""
