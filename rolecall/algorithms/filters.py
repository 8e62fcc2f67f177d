"""The filters of scored groups that are not worth training: DAPO's dynamic sampling and its relatives. Numpy.

Pure: one group in, the reason to drop it out. Admission lets another take its place. Shapes: G responses
of one group.
"""

from rolecall.settings import FiltersSection
from rolecall.wire import Array

REASONS = ("without_signal", "too_hard", "too_easy", "all_truncated", "too_long")
"""Reasons under which the ledger counts, in the order in which they are tried."""


def reason_to_drop(
    section: FiltersSection,
    rewards_G: Array,
    truncated_G: Array,
    num_tokens_G: Array,
    *,
    has_signal: bool,
    solved_at: float,
) -> str | None:
    """One of REASONS, or None for a group to keep. `rewards_G` are raw; `has_signal`: whether an estimator could tell
    the responses apart; `solved_at`: least reward of a success.

    A group of rewards 0 and 1 has no signal when none or all of its responses are right: 0 < |right| < G is DAPO's
    condition (arXiv:2503.14476, eq. 11).
    """
    success_rate = float((rewards_G >= solved_at).mean())
    found = (
        section.without_signal and not has_signal,
        success_rate < section.min_success_rate,
        success_rate > section.max_success_rate,
        section.all_truncated and bool(truncated_G.all()),
        section.max_mean_tokens is not None and float(num_tokens_G.mean()) > section.max_mean_tokens,
    )
    return next((reason for reason, applies in zip(REASONS, found, strict=True) if applies), None)
