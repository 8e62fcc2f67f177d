"""What layouts of actor.backend megatron make of a model on disk. No torch."""
