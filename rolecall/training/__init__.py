"""The training library that actor, critic and reference share: packing, logprobs, engines behind two seams,
checkpoints.
"""
