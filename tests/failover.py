"""A light run over replicated servers, and what a failover in the middle of it costs: what was lost, how soon that was
seen, how soon the run moved.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.store.audit import audit
from rolecall.v1 import controller_pb2 as pb
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import TwinRun, twin_run

RUN_S = 120.0
"""Deadline of one light run, failover included."""


@dataclass
class Failover:
    """What a fault cost."""

    step: int
    """Steps applied when it was seen; when it struck, where nothing was to be seen."""
    lost_steps: int
    """Steps that were applied again from a checkpoint."""
    failures: tuple[str, ...]
    """What the controller said when it started over."""


@asynccontextmanager
async def failing_over(
    store: StoreUnderTest, folder: Path, make_settings: Callable[..., Any], /, **sections: Any
) -> AsyncIterator[TwinRun]:
    """A run of 12 steps with two rollouts that make some steps a second."""
    sections = {"run": {"num_steps": 12, "checkpoint_every_steps": 3}, **sections}
    async with (
        twin_run(store, folder, make_settings, **sections) as run,
        run.rollout("rollout-0", token_s=0.02),
        run.rollout("rollout-1", token_s=0.02),
    ):
        yield run


async def strike(run: TwinRun, at_step: int, fault: Callable[[], None]) -> Failover:
    """Runs to the end, with `fault` after `at_step` steps."""
    async with run.controller() as life, asyncio.timeout(RUN_S):
        stub, running = life.stub, life.running
        await _reaches(stub, running, lambda status: status.step >= at_step)
        before = await _status(stub)
        await asyncio.to_thread(fault)
        highest = lowest = (await _status(stub)).step
        failures: list[str] = []
        while not running.done():
            status = await _status(stub)
            if status.num_recoveries > before.num_recoveries + len(failures):
                lowest = lowest if failures else highest
                failures.append(status.last_failure)
            lowest = min(lowest, status.step)
            if not failures:
                highest = max(highest, status.step)
            await asyncio.sleep(0.02)
        await running
    return Failover(highest, highest - lowest if failures else 0, tuple(failures))


def check(run: TwinRun) -> None:
    """The ledger balances by name, and what the actor's weights hold are all batches, each once."""
    report = audit(run.store.connection, run.store.run, run.settings.run.dir)
    assert report.problems == (), report.problems
    records = run.actor.trainer.applied.records
    assert sorted(records) == list(range(run.settings.run.total_steps))
    assert max(Counter(record.digest for record in records.values()).values()) == 1


async def _status(stub: Any) -> pb.RunStatus:
    found: pb.RunStatus = (await stub.GetRun(pb.GetRunRequest())).status
    return found


async def _reaches(stub: Any, running: "asyncio.Task[None]", holds: Callable[[pb.RunStatus], bool]) -> None:
    while not holds(await _status(stub)):
        assert not running.done(), running.exception()
        await asyncio.sleep(0.02)
