"""The engine over Megatron-Core: tensor, sequence, pipeline, context and expert parallel, and a distributed optimizer.

megatron-core alone is used, without Transformer Engine and without any of its training loop. Its process groups are
global to a process, so a process has one engine at a time.
"""
