"""The kit for a RewardService: `CHECKS`, in the order in which they are made, over a `RewardSession`.

Rules that others build on come first; what may end the service comes last.
"""

from rolecall.conformance.check import Check
from rolecall.conformance.reward import answers, calls, describing, items, limits, pressure, sameness
from rolecall.conformance.reward.session import RewardSession

CHECKS: tuple[Check[RewardSession], ...] = (
    describing.usable,
    answers.complete,
    answers.outcome,
    answers.value,
    answers.components,
    answers.token_rewards,
    answers.error_code,
    answers.expected,
    sameness.repeated,
    sameness.order,
    sameness.batches,
    sameness.concurrent,
    sameness.other_id,
    describing.reads,
    items.empty,
    items.in_unicode,
    items.long,
    items.without_truth,
    items.unknown_metadata,
    items.torn_token_ids,
    limits.empty_request,
    limits.max_items_taken,
    limits.above_max_items,
    limits.large_request,
    calls.token,
    calls.health,
    describing.stable,
    pressure.load,
    pressure.abandoned,
    calls.drain,
)
"""Every check of the contract."""
