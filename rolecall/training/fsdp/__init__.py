"""The engine over FSDP2 (`torch.distributed.fsdp.fully_shard`): any number of ranks, one included, GPUs or CPUs."""
