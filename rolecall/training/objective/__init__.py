"""The losses that a step minimises: the policy, value and router losses put together from `rolecall.algorithms`."""
