"""The contract of a RewardService, to whose rules the checks of this kit belong."""

from rolecall.conformance.check import Contract
from rolecall.conformance.reward.session import RewardSession

CONTRACT: Contract[RewardSession] = Contract("proto/rolecall/v1/reward.proto")
ANSWERS = ("describe.usable", "results.complete")
"""Rules without which nothing can be said of a score."""
