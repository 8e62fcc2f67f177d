"""ReMax's greedy response where nothing runs: what a batch is made of, what is counted, what room it takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.columns import row_bytes
from rolecall.errors import BatchMismatchError
from rolecall.settings import RunSettings
from rolecall.store.budget import PromptBytes, StoreBudget, batch_bytes
from rolecall.trajectory import rows_of
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef, TrainBatch
from rolecall.wire import Array
from services.controller.groups.assembly import GreedyResponse, ScoredGroup
from services.controller.step import measures
from services.controller.step.preparation import prepare
from services.rollout.config import configure
from tests.smallest import smallest_tree

REMAX = {"groups_per_batch": 2, "advantage": {"kind": "remax"}}


def run_settings(**sections: Any) -> RunSettings:
    return RunSettings.model_validate(smallest_tree(Path("/nowhere"), **{"algorithm": REMAX, **sections}))


def ref(gid: int, index: int) -> RowRef:
    return RowRef(id=f"{gid}/{index}", token="w.1-1", num_tokens=4)


def group(gid: int, greedy: float, *rewards: float) -> ScoredGroup:
    size = len(rewards)
    rows = tuple(ref(gid, i) for i in range(size))
    raw = np.array(rewards, np.float32)
    scored = ScoredGroup(gid, rows, 0, raw, raw, {}, np.full(size, 2, np.int32), np.zeros(size, bool), 0.1, 0.0, 0.0)
    return replace(scored, greedy=GreedyResponse(ref(gid, size), greedy, greedy))


def row(reward: float, **columns: Array) -> dict[str, Array]:
    mask = np.array([0, 0, 1, 1], np.uint8)
    logprobs = np.array([0, 0, -0.5, -0.25], np.float32)
    return {
        "token_ids": np.arange(4, dtype=np.int32),
        "response_mask": mask,
        "rollout_logprobs": logprobs,
        "reward": np.array([reward], np.float32),
        **columns,
    }


def test_remax_columns_of_a_batch_are_the_hand_worked_ones_and_the_greedy_rows_are_not_among_them() -> None:
    """ReMax, arXiv:2310.10505: the advantage is the reward minus that of the greedy response to the same prompt."""
    groups = [group(5, 0.25, 1.0, 0.0), group(6, 1.0, 1.0)]
    batch, columns = prepare(run_settings(), 3, groups, [row(1), row(0), row(1)], [row(0.25), row(1)])
    assert [ref.id for ref in batch.rows] == ["5/0", "5/1", "6/0"]
    assert [ref.id for ref in batch.greedy_rows] == ["5/2", "6/1"]
    advantages = [column["advantages"].tolist() for column in columns]
    assert advantages == [[0, 0, 0.75, 0.75], [0, 0, -0.25, -0.25], [0, 0, 0, 0]]


def test_a_batch_that_was_sealed_for_another_estimator_has_another_digest_under_remax() -> None:
    groups = [replace(group(5, 0.25, 1.0), greedy=None), group(6, 1.0, 1.0)]
    with pytest.raises(BatchMismatchError, match="sampled for another estimator, without a greedy response"):
        prepare(run_settings(), 3, groups, [row(1), row(1)], [row(1)])


def test_a_greedy_responses_token_rewards_are_part_of_what_it_earned() -> None:
    with_tokens = row(0.5, token_rewards=np.array([9, 9, 0.25, 0.125], np.float32))
    _, columns = prepare(run_settings(), 0, [group(5, 0.5, 1.0)], [row(1)], [with_tokens])
    assert columns[0]["advantages"].tolist() == [0, 0, 0.125, 0.125]


def test_a_group_whose_rewards_differ_has_signal_though_its_totals_do_not() -> None:
    """Where an estimator reads rewards token by token their places differ."""
    scored = replace(group(0, 1.0, 1.0, 0.0), greedy=None)
    assert replace(scored, totals_G=np.ones(2, np.float32)).has_signal
    assert not replace(scored, rewards_G=np.ones(2, np.float32), totals_G=np.ones(2, np.float32)).has_signal


@pytest.mark.parametrize(
    ("greedy", "rewards", "expected"),
    [(1.0, [1.0], False), (0.0, [1.0], True), (0.0, [1.0, 1.0], True), (0.5, [0.5, 0.0], True)],
)
def test_a_group_has_signal_when_a_reward_differs_from_the_greedy_one(
    greedy: float, rewards: list[float], expected: bool
) -> None:
    assert group(0, greedy, *rewards).has_signal == expected


def test_the_rows_of_a_group_are_all_of_them_when_it_is_dropped() -> None:
    assert [ref.id for ref in group(7, 0.0, 1.0, 0.0).all_rows] == ["7/0", "7/1", "7/2"]
    assert rows_of(CommittedGroup(gid=7, rows=[ref(7, 0)], greedy_row=ref(7, 1))) == [ref(7, 0), ref(7, 1)]
    assert rows_of(CommittedGroup(gid=7, rows=[ref(7, 0)])) == [ref(7, 0)]
    assert rows_of(TrainBatch(rows=[ref(7, 0)], greedy_rows=[ref(7, 1)])) == [ref(7, 0), ref(7, 1)]


def test_what_is_reported_of_a_batch_counts_sampled_responses_and_says_the_greedy_reward_by_itself() -> None:
    values = measures.of_batch(run_settings(), 0, [group(5, 0.25, 1.0, 0.0)], [row(1), row(0)], {0: 0}).values()
    assert (
        values["reward/mean"],
        values["reward/greedy"],
        values["batch/trajectories"],
        values["batch/response_tokens"],
    ) == (0.5, 0.25, 2, 4)


def test_the_store_has_room_for_greedy_rows() -> None:
    settings = run_settings(
        sampling={"num_responses": 3, "max_tokens": 100}, data={"train": "train.jsonl", "max_prompt_tokens": 28}
    )
    one = row_bytes(128, settings.columns, {})
    assert StoreBudget.of(settings, PromptBytes(0)).group_bytes == 4 * one
    batch = TrainBatch(rows=[RowRef(num_tokens=128)] * 3, greedy_rows=[RowRef(num_tokens=128)])
    assert batch_bytes(settings, batch, PromptBytes(0)) == 4 * one


def test_groups_in_hand_leave_room_for_their_greedy_responses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128, "eos_token_id": 7}')
    sections = {"model": {"path": str(tmp_path)}, "rollout": {"max_num_seqs": 64}, "sampling": {"num_responses": 7}}
    assert configure(run_settings(**sections), "rollout-0", range(2)).max_groups == 8
    assert configure(run_settings(**sections, algorithm={"groups_per_batch": 2}), "rollout-0", range(2)).max_groups == 9


def test_remax_trains_on_one_response_a_prompt() -> None:
    assert run_settings(sampling={"num_responses": 1}).responses_per_group == 2
