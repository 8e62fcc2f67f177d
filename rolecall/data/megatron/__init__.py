"""Layouts of actor.backend megatron and the models on disk that they cut. No torch."""
