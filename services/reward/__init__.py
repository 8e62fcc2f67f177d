"""The reward service: scores responses with built-in, user-written and external scorers behind the public RewardService
contract.
"""
