"""The trajectories of a step that are written for people: which, what is said of each, how many are held at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rolecall.v1 import trajectory_pb2 as pb
from services.controller import samples as made
from services.controller.groups.assembly import ScoredGroup

WORDS = pb.Prompt(messages=[pb.Message(role="user", content="sort")], ground_truth="abc")


class FewRows:
    """Rows of which the first of a group alone has its prompt, as a rollout writes them, and the sizes of their
    reads.
    """

    def __init__(self) -> None:
        self.reads: list[int] = []

    def read_meta(self, refs: Sequence[pb.RowRef]) -> list[pb.TrajectoryMeta]:
        self.reads.append(len(refs))
        metas = []
        for ref in refs:
            first = ref.id.endswith("/0")
            reason = pb.FINISH_REASON_STOP if first else pb.FINISH_REASON_LENGTH
            said = pb.TrajectoryMeta(id=ref.id, response_text=f"answer {ref.id}", finish_reason=reason)
            if first:
                said.prompt.CopyFrom(WORDS)
            metas.append(said)
        return metas


def scored(gid: int, size: int) -> ScoredGroup:
    return ScoredGroup(
        gid=gid,
        rows=tuple(pb.RowRef(id=f"{gid}/{i}") for i in range(size)),
        min_policy_version=0,
        rewards_G=np.zeros(size, np.float32),
        totals_G=np.arange(size, dtype=np.float32),
        components={"exact": np.arange(size, dtype=np.float32), "tools": np.full(size, np.nan, np.float32)},
        num_response_tokens_G=np.arange(10, 10 + size, dtype=np.int32),
        truncated_G=np.zeros(size, bool),
        generation_s=0.1,
        landed_at_s=0.0,
        scored_at_s=0.0,
    )


def samples(number: int | None, *groups: ScoredGroup) -> list[dict[str, Any]]:
    rows: Any = FewRows()
    return list(made.samples(rows, 3, groups, number))


@pytest.mark.parametrize(
    ("number", "ids"),
    [
        (0, []),
        (2, ["4/0", "5/0"]),
        (4, ["4/0", "5/0", "6/0", "4/1"]),
        (None, ["4/0", "5/0", "6/0", "4/1", "6/1", "6/2"]),
    ],
)
def test_the_first_of_each_group_comes_before_the_second_of_any(number: int | None, ids: list[str]) -> None:
    assert [each["id"] for each in samples(number, scored(4, 2), scored(5, 1), scored(6, 3))] == ids


def test_a_sample_says_what_its_reward_was_made_of_how_long_it_is_and_why_it_ended() -> None:
    assert samples(None, scored(7, 2))[1] == {
        "step": 3,
        "set": "train",
        "id": "7/1",
        "prompt": [["user", "sort"]],
        "response": "answer 7/1",
        "ground_truth": "abc",
        "reward": 1.0,
        "components": {"exact": 1.0},
        "response_tokens": 11,
        "finish_reason": "length",
    }


def test_an_episode_says_what_ended_it() -> None:
    meta = pb.TrajectoryMeta(finish_reason=pb.FINISH_REASON_LENGTH, episode=pb.Episode(ended_by="turns"))
    assert made.sample(0, "train", meta, WORDS, None, 5)["finish_reason"] == "turns"


def test_a_few_are_read_at_a_time_however_many_are_kept() -> None:
    rows: Any = FewRows()
    coming = made.samples(rows, 3, [scored(gid, 16) for gid in range(32)], None)
    next(coming)
    assert rows.reads == [made.SAMPLES_AT_A_TIME]
    assert len(list(coming)) == 511
    assert rows.reads == [made.SAMPLES_AT_A_TIME] * 8
