"""The places where the time of a run's steps went, read from its metrics.jsonl. Pure; docs/metrics.md says what
the metrics mean.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

Row = Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """Seconds of one step, from the end of one publish to the end of the next."""

    total_s: float
    generation_s: float
    """Seconds until the batch's last group landed at the controller."""
    busy_s: float
    """The part of it in which the engine had work; summed over replicas."""
    scoring_s: float
    """Seconds from there until its last score was in: scoring that generation did not hide."""
    values_s: float
    """The critic's; 0 without one."""
    training_s: float
    actor_s: float
    """The part of it within the actor: reading rows, forward, backward, optimizer."""
    publish_s: float
    transfer_s: float
    """The part of it from the first bucket to the last."""
    prepare_s: float
    """Advantages, seal and columns; the controller's."""
    commit_s: float
    """The step's commit; the controller's."""
    num_tokens: float
    """Sampled tokens of the batch."""
    num_engine_tokens: float
    """Tokens the engine sampled meanwhile."""
    num_bytes: float
    """Bytes of the publish."""

    @property
    def hand_over_s(self) -> float:
        """Generation while the engine had no work: the way from admission to the engine and back to the controller."""
        return self.generation_s - self.busy_s

    @property
    def controller_s(self) -> float:
        """Returns the seconds in which no other role was doing anything."""
        return self.total_s - self.generation_s - self.scoring_s - self.values_s - self.training_s - self.publish_s


def read_steps(metrics: Path, num_warmup: int) -> list[Step]:
    """The steps of a run after its first `num_warmup`, at least one of which is needed."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "time/step_s" in row]
    return [_step(before, row) for before, row in pairwise(steps[max(num_warmup, 1) - 1 :])]


def _step(before: Row, row: Row) -> Step:
    return Step(
        total_s=row["time/step_s"],
        generation_s=row["time/generation_s"],
        busy_s=row["rollout/busy_s"] - before["rollout/busy_s"],
        scoring_s=row["time/scoring_s"],
        values_s=row.get("time/values_s", 0.0),
        training_s=row["time/train_s"],
        actor_s=row["actor/tokens"] / row["actor/tokens_per_s"],
        publish_s=row["time/publish_s"],
        transfer_s=row["publish/transfer_s"],
        prepare_s=row["time/prepare_s"],
        commit_s=row["time/commit_s"],
        num_tokens=row["batch/response_tokens"],
        num_engine_tokens=row["rollout/sampled_tokens"] - before["rollout/sampled_tokens"],
        num_bytes=row["publish/num_bytes"],
    )


def typical(steps: Sequence[Step], value: Callable[[Step], float]) -> float:
    """Median of `value` over the steps."""
    return median(value(step) for step in steps)


def split_table(steps: Sequence[Step]) -> list[str]:
    """Lines: median seconds and median share of each part; parts of a part are indented."""
    parts: list[tuple[str, Callable[[Step], float]]] = [
        ("generation", lambda step: step.generation_s),
        ("  engine busy", lambda step: step.busy_s),
        ("  hand-over (admit, claim, store, commit)", lambda step: step.hand_over_s),
        ("scoring after the last group landed", lambda step: step.scoring_s),
        ("values", lambda step: step.values_s),
        ("training", lambda step: step.training_s),
        ("  within the actor", lambda step: step.actor_s),
        ("publish", lambda step: step.publish_s),
        ("  transfer", lambda step: step.transfer_s),
        ("controller", lambda step: step.controller_s),
        ("  prepare (advantages, seal, columns)", lambda step: step.prepare_s),
        ("  commit", lambda step: step.commit_s),
        ("step", lambda step: step.total_s),
    ]
    lines = [f"{'where a step goes':<44}{'seconds':>10}{'share':>10}"]
    for name, value in parts:
        if name != "values" or any(map(value, steps)):
            lines.append(f"{name:<44}{typical(steps, value):>10.4f}{_share(steps, value):>9.1f}%")
    with_hand_over = _share(steps, lambda step: step.controller_s + step.hand_over_s)
    return [
        *lines,
        "",
        f"controller's share: {_share(steps, lambda step: step.controller_s):.1f}% of a step; "
        f"{with_hand_over:.1f}% with all of the hand-over",
    ]


def _share(steps: Sequence[Step], value: Callable[[Step], float]) -> float:
    return 100 * typical(steps, lambda step: value(step) / step.total_s)
