"""The contract of a score, and the client of every reward service. No torch.

What a scorer's worker process imports of it knows no gRPC either, so that the process starts fast: scores.py,
description.py, results.py, awaited.py and items.py.
"""
