"""The cost of every advantage estimator for one large batch, beside a plain loop over the same trajectories. See
README.md.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

from benchmarks.algorithms_plain import Rows, plain
from benchmarks.machine import describe
from rolecall.algorithms.advantages import Estimate, ScoredBatch, estimate
from rolecall.algorithms.shaping import place_rewards
from rolecall.settings import (
    AdvantageSection,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    PassAtKAdvantage,
    PlainAdvantage,
    ReinforcePlusPlusAdvantage,
)
from rolecall.wire import Array

SECTIONS: dict[str, AdvantageSection] = {
    "grpo": GrpoAdvantage(),
    "grpo, without std": GrpoAdvantage(normalize_std=False),
    "grpo, process": GrpoAdvantage(supervision="process"),
    "rloo": PlainAdvantage(kind="rloo"),
    "opo": PlainAdvantage(kind="opo"),
    "gpg": PlainAdvantage(kind="gpg"),
    "maxrl": PlainAdvantage(kind="maxrl"),
    "pass_at_k, k 4": PassAtKAdvantage(k=4),
    "gdpo": GdpoAdvantage(),
    "remax": PlainAdvantage(kind="remax"),
    "reinforce_plus_plus": ReinforcePlusPlusAdvantage(gamma=0.99),
    "reinforce_plus_plus, group": ReinforcePlusPlusAdvantage(baseline="group"),
    "gae": GaeAdvantage(gamma=0.99, gae_lambda=0.95, whiten=False),
    "gae, whitened": GaeAdvantage(gamma=0.99, gae_lambda=0.95),
    "optimal_token_baseline": PlainAdvantage(kind="optimal_token_baseline"),
}


def laid(rows: Rows) -> ScoredBatch:
    """End to end, nothing computed yet."""
    weights = dict.fromkeys(rows.components, 1.0)
    return ScoredBatch.of_rows(
        rows.gids, rows.rewards, rows.masks, rows.masks, rows.columns, rows.components, weights, rows.greedy_rewards
    )


def make_rows(num_trajectories: int, num_tokens: int, group_size: int, seed: int = 0) -> Rows:
    """Trajectories of `num_tokens`, of which the first 3% to 12% are the prompt; right or wrong at the end;
    token_rewards has a reward for some steps.
    """
    rng = np.random.default_rng(seed)
    masks, rewards, steps = [], [], []
    right_B = rng.integers(0, 2, num_trajectories).astype(np.float32)
    for right in right_B:
        prompt = int(num_tokens * rng.uniform(0.03, 0.12)) + 1
        mask_T = np.ones(num_tokens, np.uint8)
        mask_T[:prompt] = 0
        masks.append(mask_T)
        rewards.append(place_rewards(float(right), mask_T))
        steps_T = np.zeros(num_tokens, np.float32)
        steps_T[prompt :: max(num_tokens // 16, 1)] = 0.5
        steps.append(steps_T)
    probs = [rng.uniform(0.1, 1, num_tokens).astype(np.float32) for _ in masks]
    columns = {
        "values": [rng.normal(size=num_tokens).astype(np.float32) for _ in masks],
        "bootstrap_value": [np.zeros(1, np.float32) for _ in masks],
        "token_rewards": steps,
        "old_logprobs": [np.log(p) for p in probs],
        "sum_squared_probs": [p**2 for p in probs],
    }
    components = {"right": right_B, "short": rng.random(num_trajectories).astype(np.float32)}
    return Rows(
        [i // group_size for i in range(num_trajectories)],
        rewards,
        masks,
        columns,
        components,
        rng.random(num_trajectories).astype(np.float32),
    )


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median of `rounds` runs."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1e3)
    return median(taken)


def fresh(rows: Rows, section: AdvantageSection, rounds: int) -> float:
    """Median milliseconds of an estimate of a batch on which nothing was computed before."""
    batches = iter([laid(rows) for _ in range(rounds)])
    return milliseconds(lambda: estimate(section, next(batches)), rounds)


def assert_same(result: Estimate, slow: list[Array]) -> None:
    """AssertionError when the loop computes something else."""
    np.testing.assert_allclose(result.advantages_N, np.concatenate(slow), rtol=1e-3, atol=1e-3)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a tiny batch, once: does it still run?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.trajectories, arguments.tokens, arguments.rounds = 16, 64, 1
    for line in describe():
        print(line)
    shape = f"{arguments.trajectories} trajectories of {arguments.tokens} tokens, groups of {arguments.group_size}"
    print(f"numpy {np.__version__}; {shape}; medians of {arguments.rounds}")
    rows = make_rows(arguments.trajectories, arguments.tokens, arguments.group_size)
    bare = replace(rows, columns={}, components={})
    stepped = replace(
        rows,
        rewards=[
            reward_T + step_T for reward_T, step_T in zip(rows.rewards, rows.columns["token_rewards"], strict=True)
        ],
    )
    print(f"\n{'ms':28}{'estimate':>10}{'plain loop':>12}{'ratio':>8}")
    for name, section in SECTIONS.items():
        given = stepped if name == "grpo, process" else rows
        ours = fresh(given, section, arguments.rounds)
        assert_same(estimate(section, laid(given)), plain(section, given))
        theirs = milliseconds(partial(plain, section, given), 1)
        print(f"{name:28}{ours:10.2f}{theirs:12.1f}{theirs / ours:8.1f}")
    whole = laid(rows)
    print(
        "\nbefore it, laying rewards and masks end to end: "
        f"{milliseconds(lambda: laid(bare), arguments.rounds):.2f} ms; each column more: "
        f"{milliseconds(lambda: np.concatenate(rows.columns['values']), arguments.rounds):.2f} ms"
    )
    print(
        f"after it, a view for each row: {milliseconds(lambda: whole.rows(whole.rewards_N), arguments.rounds):.2f} ms"
    )


if __name__ == "__main__":
    main()
