"""The trajectories that are written for people: which of a batch, and what is said of each.

Where they go is the trackers' to say (rolecall/trackers).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rolecall.scoring.scores import FINISH_REASONS, Score
from rolecall.store.rows import Rows
from rolecall.v1 import trajectory_pb2
from services.controller.groups.assembly import ScoredGroup

SAMPLES_AT_A_TIME = 64
"""Trajectories that are read at once for people: of 32k tokens each, some 8 MB of text."""


def samples(rows: Rows, step: int, groups: Sequence[ScoredGroup], number: int | None) -> Iterator[dict[str, Any]]:
    """The first `number` trajectories of a batch for people to read, or all: the first of each group, then the second
    of each. Their rows are read as they are taken, SAMPLES_AT_A_TIME.
    """
    largest = max((len(group.rows) for group in groups), default=0)
    chosen = islice(((group, i) for i in range(largest) for group in groups if i < len(group.rows)), number)
    prompts: dict[int, trajectory_pb2.Prompt] = {}
    while some := list(islice(chosen, SAMPLES_AT_A_TIME)):
        for (group, i), meta in zip(some, rows.read_meta([group.rows[i] for group, i in some]), strict=True):
            prompt = prompts.setdefault(group.gid, meta.prompt)  # which its other rows lack
            components = {name: float(values[i]) for name, values in group.components.items()}
            applying = {name: value for name, value in components.items() if not math.isnan(value)}
            score = Score(float(group.totals_G[i]), applying)
            yield sample(step, "train", meta, prompt, score, int(group.num_response_tokens_G[i]))


def sample(
    step: int,
    name: str,
    meta: trajectory_pb2.TrajectoryMeta,
    prompt: trajectory_pb2.Prompt,
    score: Score | None,
    num_response_tokens: int,
) -> dict[str, Any]:
    """A line of samples.jsonl: a trajectory of the set `name`, after `step` steps; `score` None where nobody could
    score it.
    """
    return {
        "step": step,
        "set": name,
        "id": meta.id,
        "prompt": [[said.role, said.content] for said in (*prompt.messages, *meta.episode.messages)],
        "response": meta.response_text,
        "ground_truth": prompt.ground_truth,
        "reward": None if score is None else score.total,
        "components": {} if score is None else dict(score.components),
        "response_tokens": num_response_tokens,
        "finish_reason": meta.episode.ended_by or FINISH_REASONS[meta.finish_reason],
    }
