"""Algorithms as pure functions: advantages and shaping in numpy (the controller uses them), losses, KL and correction in torch (the trainers do).

Importing this package imports neither; nothing here knows services, the store or an engine.
"""
