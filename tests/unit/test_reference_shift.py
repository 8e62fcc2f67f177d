"""The calls to references that score a batch in their shift."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolecall.errors import BudgetSpentError, UnavailableError
from rolecall.v1 import training_pb2
from rolecall.v1.trajectory_pb2 import RowRef
from services.controller.board import RunBoard
from services.controller.step.reference_shift import BUDGETS_A_CALL, ReferenceShift
from tests.conftest import MakeSettings


class FakeReference:
    """Computes for a while, and says who is on the devices."""

    def __init__(self, name: str, there: set[str], seconds: float = 0.0) -> None:
        self.name, self._there, self._seconds = name, there, seconds
        self.calls: list[list[str]] = []
        self.beside: set[str] = set()
        self.failures: list[Exception] = []

    async def ComputeLogprobs(self, request: training_pb2.ComputeColumnRequest, timeout: float) -> None:
        self.beside |= self._there - {self.name}
        self._there.add(self.name)
        await asyncio.sleep(self._seconds)
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append([ref.id for ref in request.rows])

    async def Offload(self, request: training_pb2.OffloadRequest, timeout: float) -> None:
        self._there.discard(self.name)


def shift(make_settings: MakeSettings, references: dict[str, FakeReference], **sections: Any) -> ReferenceShift:
    read_by = {"kl": {"reference": min(references), "kl_coef": 0.1}, "distillation": {"teacher": max(references)}}
    settings = make_settings(
        actor={"devices": [0]},
        rollout={"devices": [[0]], "enforce_eager": True},
        references={name: {"devices": [0], "offload": True} for name in references},
        algorithm={"groups_per_batch": 2, **read_by},
        **sections,
    )
    return ReferenceShift(settings, cast(Any, references), ctl=1, board=RunBoard())


def group(rows: list[RowRef], *asked: tuple[str, str]) -> Any:
    return SimpleNamespace(rows=rows, references=asked)


async def test_references_on_one_gpu_take_turns_and_each_leaves_for_the_next(make_settings: MakeSettings) -> None:
    there: set[str] = set()
    both = {name: FakeReference(name, there, 0.02) for name in ("one", "other")}
    rows = [RowRef(id=f"{i}/0", num_tokens=10) for i in range(3)]
    await shift(make_settings, both).score([group([row], ("one", ""), ("other", "")) for row in rows])
    for reference in both.values():
        assert reference.calls == [["0/0", "1/0", "2/0"]]
        assert not reference.beside


async def test_a_batch_is_cut_into_calls_and_the_rows_keep_their_order(make_settings: MakeSettings) -> None:
    reference = FakeReference("ref", set())
    scores = shift(make_settings, {"ref": reference})
    most = BUDGETS_A_CALL * scores.settings.references["ref"].token_budget
    sizes = [most + 5, most // 2, most // 2, 1, most]
    await scores.score([group([RowRef(id=str(i), num_tokens=size) for i, size in enumerate(sizes)], ("ref", ""))])
    assert reference.calls == [["0"], ["1", "2"], ["3"], ["4"]]


async def test_a_reference_that_fails_after_a_long_pass_is_asked_again_and_one_that_stays_away_is_not(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    reference = FakeReference("ref", set(), seconds=1.0)
    scores = shift(make_settings, {"ref": reference}, controller={"stall_timeout_s": 0.9})
    reference.failures = [UnavailableError("it was killed")]
    assert await scores.score([group([RowRef(id="0", num_tokens=1)], ("ref", ""))])
    assert reference.calls == [["0"]]
    caplog.clear()
    reference.failures = [UnavailableError("it is gone")] * 100
    with pytest.raises(BudgetSpentError, match=r"reference ref was away for controller.stall_timeout_s.* it is gone"):
        await scores.score([group([RowRef(id="1", num_tokens=1)], ("ref", ""))])
    assert len(caplog.records) == 1, caplog.text


async def test_a_paused_run_waits_for_its_reference_without_end_and_one_that_is_to_stop_not_at_all(
    make_settings: MakeSettings,
) -> None:
    reference = FakeReference("ref", set())
    scores = shift(make_settings, {"ref": reference}, controller={"stall_timeout_s": 0.9})
    reference.failures = [UnavailableError("people mend it")] * 1000
    scores.board.pause()
    waiting = asyncio.create_task(scores.score([group([RowRef(id="0", num_tokens=1)], ("ref", ""))]))
    assert not (await asyncio.wait([waiting], timeout=2.5))[0]
    scores.board.stop(checkpoint=False, failure="")
    async with asyncio.timeout(10.0):
        assert not await waiting
