"""Algorithms as pure functions: advantages, shaping and the control of coefficients in numpy or plain Python (the
controller uses them), losses, KL and correction in torch (the trainers do).

Importing this package imports neither; nothing here knows services, the store or an engine.
"""
