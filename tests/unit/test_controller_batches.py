"""Assembly, checkpoints, publish verification and the board: what the controller decides between store calls."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.settings import RunSettings
from rolecall.v1 import controller_pb2, trajectory_pb2
from rolecall.wire import Array
from services.controller.board import RunBoard
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.groups.admission import AdmissionPolicy
from services.controller.groups.assembly import Assembly, ScoredGroup
from services.controller.step.preparation import columns_computed, columns_read, prepare
from tests.smallest import smallest_tree


def run_settings(**sections: Any) -> RunSettings:
    run = {"name": "test", "dir": "runs/test", "num_steps": 4}
    reward = {"address": "127.0.0.1:1"}
    return RunSettings.model_validate(smallest_tree(Path("/nowhere"), **{"run": run, "reward": reward, **sections}))


def group(gid: int, *rewards: float) -> ScoredGroup:
    size = len(rewards)
    rows = tuple(trajectory_pb2.RowRef(id=f"{gid}/{i}", token="w.1-1", num_tokens=4) for i in range(size))
    raw = np.array(rewards, np.float32)
    return ScoredGroup(gid, rows, 0, raw, raw, {}, np.full(size, 2, np.int32), np.zeros(size, bool), 0.1, 0.0, 0.0)


def row(reward: float) -> dict[str, Array]:
    return {
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "response_mask": np.array([0, 0, 1, 1], np.uint8),
        "rollout_logprobs": np.array([0, 0, -0.5, -0.25], np.float32),
        "reward": np.array([reward], np.float32),
    }


def point_of(step: int) -> RunPoint:
    return RunPoint("test", 0, step, step, 1, 10 * step, 8 * step, {"scorer_error": step}, "[0, 1, 0]", [])


def test_grpo_columns_of_a_batch_are_the_hand_worked_ones() -> None:
    settings = run_settings()
    batch, columns = prepare(settings, 3, [group(5, 1.0, 0.0), group(6, 1.0, 1.0)], [row(1), row(0), row(1), row(1)])
    assert (batch.step, list(batch.gids), [ref.id for ref in batch.rows]) == (3, [5, 6], ["5/0", "5/1", "6/0", "6/1"])
    # rewards 1 and 0: mean 0.5, sample standard deviation sqrt(0.5): advantages +-0.7071; equal rewards: 0.
    expected = [[0, 0, 0.7071, 0.7071], [0, 0, -0.7071, -0.7071], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(np.stack([column["advantages"] for column in columns]), np.array(expected), atol=1e-4)
    assert all(column["loss_mask"].tolist() == [0, 0, 1, 1] for column in columns)


def test_the_digest_depends_on_order_attempt_and_contents() -> None:
    settings = run_settings()
    groups, rows = [group(5, 1.0, 0.0), group(6, 1.0, 1.0)], [row(1), row(0), row(1), row(1)]
    digest = prepare(settings, 0, groups, rows)[0].digest
    assert digest == prepare(settings, 0, groups, rows)[0].digest
    assert digest != prepare(settings, 0, groups[::-1], rows[2:] + rows[:2])[0].digest
    changed = [{**rows[0], "token_ids": np.array([1, 2, 3, 5], np.int32)}, *rows[1:]]
    assert digest != prepare(settings, 0, groups, changed)[0].digest
    others = run_settings(algorithm={"groups_per_batch": 2, "advantage": {"kind": "rloo"}})
    assert digest != prepare(others, 0, groups, rows)[0].digest, "what the controller computed is in it, too"


@pytest.mark.parametrize(
    ("correction", "compared", "asked"),
    [
        ({}, "old_logprobs", ("old_logprobs",)),
        (None, "old_logprobs", ("old_logprobs",)),
        ({"proximal": "bypass"}, "rollout_logprobs", ()),
    ],
    ids=["trainer", "uncorrected", "bypass"],
)
def test_kl_in_the_reward_lowers_the_reward_of_tokens_that_the_reference_finds_unlikely(
    correction: dict[str, str] | None, compared: str, asked: tuple[str, ...]
) -> None:
    kl = {"reference": "ref", "kl_coef": 0.5, "estimator": "k1", "placement": "reward"}
    algorithm = {"groups_per_batch": 1, "kl": kl, "advantage": {"kind": "rloo"}, "correction": correction}
    settings = run_settings(algorithm=algorithm, references={"ref": {}})
    assert columns_computed(settings.algorithm) == asked
    assert {"ref/logprobs", compared} <= set(columns_read(settings))
    rows = [{**row(1), "ref/logprobs": np.array([0, 0, reference, -0.25], np.float32)} for reference in (-0.5, -1.5)]
    if asked:  # the sampler's kernels see other numbers on the same tokens
        seen = [
            {"old_logprobs": each["rollout_logprobs"], "rollout_logprobs": each["rollout_logprobs"] - i}
            for i, each in enumerate(rows)
        ]
        rows = [{**each, **other} for each, other in zip(rows, seen, strict=True)]
    _, columns = prepare(settings, 0, [group(1, 1.0, 1.0)], rows)
    # The second row loses 0.5 * (-0.5 + 1.5) = 0.5; RLOO compares 1.0 with 0.5.
    np.testing.assert_allclose([column["advantages"][2] for column in columns], [0.5, -0.5], atol=1e-6)


def test_an_actors_pass_before_the_seal_is_asked_for_only_where_something_compares_what_it_says() -> None:
    kl = {"reference": "ref", "kl_coef": 0.5}
    taught = {"distillation": {"teacher": "ref"}}
    for algorithm, asked in (
        ({}, ()),
        ({"kl": kl}, ()),
        (taught, ("old_logprobs",)),
        ({"distillation": {"teacher": "ref", "placement": "loss"}}, ()),
        ({**taught, "correction": {"proximal": "bypass"}}, ()),
        (
            {"kl": {**kl, "placement": "reward"}, "advantage": {"kind": "optimal_token_baseline"}},
            ("old_logprobs", "sum_squared_probs"),
        ),
    ):
        settings = run_settings(
            algorithm={"groups_per_batch": 1, **algorithm}, references={"ref": {}} if algorithm else {}
        )
        assert columns_computed(settings.algorithm) == asked, algorithm
        assert set(asked) <= set(columns_read(settings))


async def test_a_batch_waits_for_groups_and_a_drop_wakes_it() -> None:
    assembly = Assembly(AdmissionPolicy(2, 0, 10, 10**9, 1))
    for gid in range(2):
        assembly.admitted(gid, 0)
    waiting = asyncio.create_task(assembly.next_batch(0))
    assembly.scored(group(1, 1.0))
    await asyncio.sleep(0)
    assembly.dropped(0)
    assembly.admitted(2, 0)
    assembly.scored(group(2, 1.0))
    assert [chosen.gid for chosen in await waiting] == [1, 2]
    assembly.trained([1, 2])
    assert (assembly.num_live, assembly.num_ready) == (0, 0)


class CountedPolicy(AdmissionPolicy):
    """Counts how often it looked at all groups."""

    num_looks: ClassVar[int] = 0

    def choose(
        self, batch: int, ready: Collection[int], live: Mapping[int, int], begun: Collection[int] = ()
    ) -> Sequence[int] | None:
        type(self).num_looks += 1
        return super().choose(batch, ready, live, begun)


async def test_groups_that_land_while_an_older_one_is_awaited_are_not_all_looked_at_each_time() -> None:
    assembly = Assembly(CountedPolicy(10, 1, 10, 10**9, 1))
    for gid in range(20):
        assembly.admitted(gid, -1 if gid < 10 else 0)
    assembly.dropped(0)
    waiting = asyncio.create_task(assembly.next_batch(0))
    for gid in range(2, 20):
        assembly.scored(group(gid, 1.0))
        await asyncio.sleep(0)
    assert CountedPolicy.num_looks == 0
    assembly.scored(group(1, 1.0))
    assert [chosen.gid for chosen in await waiting] == list(range(1, 11))
    assert CountedPolicy.num_looks == 1
    assembly.trained(range(1, 20))
    assert (dict(assembly._num_live), dict(assembly._num_ready)) == ({}, {})  # else they would grow with every step


def test_the_controllers_share_of_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(open_storage(str(tmp_path)), num_kept=2)
    assert checkpoints.latest() is None
    for step in (1, 2):
        checkpoints.commit(checkpoints.begin(step), [], point_of(step))
    checkpoints.begin(3).storage.write("half", lambda file: file.write(b"of an attempt that was cut short"))
    committed, point = checkpoints.latest() or pytest.fail("there is none")
    assert (committed.step, point) == (2, point_of(2))


async def test_watchers_see_the_end_and_everyone_who_asks_for_a_checkpoint_waits_by_himself() -> None:
    board = RunBoard()
    states = []

    async def watch() -> None:
        async for _ in board.changes():
            states.append(board.state)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    assert len({board.request_checkpoint(), board.request_checkpoint()}) == len(board.checkpoint_requests) == 2
    board.move(controller_pb2.RUN_STATE_DONE)
    await asyncio.wait_for(watching, 30)
    assert states == [controller_pb2.RUN_STATE_STARTING, controller_pb2.RUN_STATE_DONE]
