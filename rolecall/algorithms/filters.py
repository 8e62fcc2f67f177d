"""The filters of scored groups that are not worth training: DAPO's dynamic sampling and its relatives. Numpy.

Pure: one group in, the reason to drop it out. Admission lets another take its place. Shapes: G responses
of one group.
"""

from collections.abc import Mapping

import numpy as np

from rolecall.settings import FiltersSection
from rolecall.wire import Array

REASONS = {
    "without_signal": (
        "the responses to a prompt earn the same, all right or all wrong: change the prompts or the reward, raise "
        "sampling.num_responses, or set algorithm.filters.without_signal false"
    ),
    "too_hard": (
        "too few responses to a prompt reach reward.solved_at: give easier prompts, or lower "
        "algorithm.filters.min_success_rate"
    ),
    "too_easy": (
        "too many responses to a prompt reach reward.solved_at: give harder prompts, or raise "
        "algorithm.filters.max_success_rate"
    ),
    "all_truncated": (
        "no response to a prompt comes to its own end: raise sampling.max_tokens (or what bounds the environment's "
        "episodes), or set algorithm.filters.all_truncated false"
    ),
    "too_long": ("responses are longer in the mean than algorithm.filters.max_mean_tokens: raise it, or set it null"),
}
"""Reasons under which the ledger counts, in the order in which they are tried: what each says of the groups, and which
settings change it.
"""


def judged_by(section: FiltersSection, rewards_G: Array, components: Mapping[str, Array]) -> Array:
    """Returns the values that success and signal go by: the component of the filters where it applies to any response,
    of those alone, else the whole rewards. Arguments as `reason_to_drop`'s.
    """
    if section.component is None:
        return rewards_G
    values_G = components[section.component]
    applies_G = ~np.isnan(values_G)
    return values_G[applies_G] if applies_G.any() else rewards_G


def reason_to_drop(
    section: FiltersSection,
    rewards_G: Array,
    components: Mapping[str, Array],
    truncated_G: Array,
    num_tokens_G: Array,
    *,
    has_signal: bool,
    solved_at: float,
) -> str | None:
    """One of REASONS, or None for a group to keep. `rewards_G` are raw, and so are the [G] of `components`, NaN where
    one does not apply; `has_signal`: whether an estimator could tell the responses apart by the whole reward;
    `solved_at`: least reward of a success.

    A group of rewards 0 and 1 has no signal when none or all of its responses are right: 0 < |right| < G is DAPO's
    condition (arXiv:2503.14476, eq. 11).
    """
    judged = judged_by(section, rewards_G, components)
    if judged is not rewards_G:
        has_signal = bool(np.ptp(judged) > 0)
    success_rate = float((judged >= solved_at).mean())
    found = (
        section.without_signal and not has_signal,
        success_rate < section.min_success_rate,
        success_rate > section.max_success_rate,
        section.all_truncated and bool(truncated_G.all()),
        section.max_mean_tokens is not None and float(num_tokens_G.mean()) > section.max_mean_tokens,
    )
    return next((reason for reason, applies in zip(REASONS, found, strict=True) if applies), None)
