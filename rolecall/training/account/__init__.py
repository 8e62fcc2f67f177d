"""Accounts of what a step costs: FLOPs, the share of the device's peak, memory."""
