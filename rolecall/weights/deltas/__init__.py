"""Sparse, lossless deltas: of a bucket that both ends hold in an older version only the words that changed travel."""
