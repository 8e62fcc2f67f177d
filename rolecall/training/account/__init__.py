"""What a step cost: FLOPs, the peak of the device, memory."""
