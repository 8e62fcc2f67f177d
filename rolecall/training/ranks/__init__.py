"""Processes of one trainer: how rank 0 commands the others, how they notice a dead one, and the devices they run on."""
