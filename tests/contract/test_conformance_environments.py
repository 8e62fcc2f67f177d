"""The conformance kit and environments that are slow, end by chance, have one place or hang: the honest ones are not
blamed, and one mistake is one line.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rolecall.commands.conformance import examine_environment
from rolecall.conformance.check import Check, Status, Verdict, run
from rolecall.conformance.environment import describing, leases, lives, runs, turns
from rolecall.conformance.environment.rows import read_file
from rolecall.conformance.environment.session import EnvironmentSession
from rolecall.conformance.peer import Peer
from rolecall.errors import SessionLostError, TurnConflictError
from rolecall.v1 import environment_pb2
from tests.contract.agent_honest import HonestAgent
from tests.contract.environment_honest import NUM_TURNS, Honest, Kept, serving
from tests.contract.environment_peers import Counting
from tests.contract.environment_peers import environment as counting
from tests.contract.kits import ROWS, broken, skipped, written


class Shortening(Honest):
    """It is not deterministic: episodes come to end earlier, up to their first turn. What is over it does not grade."""

    def __init__(self) -> None:
        super().__init__()
        self.spec.deterministic = False
        self.lengths: dict[str, int] = {}

    def most_turns(self, kept: Kept) -> int:
        return self.lengths.setdefault(kept.request.session, self.next_length(len(self.lengths)))

    def next_length(self, num_begun: int) -> int:
        return max(1, NUM_TURNS - num_begun // 8)

    def grade(self, kept: Kept, closed: environment_pb2.CloseResponse) -> None:
        if kept.turn >= self.most_turns(kept):
            raise TurnConflictError("it is over; its last turn was rewarded")
        super().grade(kept, closed)


class Cut(Shortening):
    """Only the episodes of the first two rows have more than a turn."""

    def next_length(self, num_begun: int) -> int:
        return NUM_TURNS if num_begun < 2 else 1


@pytest.mark.parametrize("make", [Shortening, Cut])
async def test_an_environment_whose_episodes_end_by_chance_keeps_every_rule(
    make: Callable[[], Shortening], tmp_path: Path
) -> None:
    async with serving(make()) as address:
        report = await examine_environment(Peer(address), read_file(written(tmp_path, *ROWS)))
    assert broken(report) == [], report.text()
    assert {"failure.status", "failure.final"} <= skipped(report)


class Soothing(Honest):
    """A failure ends the episode, as if it had come to its end."""

    def fail(self, kept: Kept) -> environment_pb2.StepResponse:
        answer = environment_pb2.StepResponse(state=environment_pb2.EPISODE_STATE_TERMINATED)
        answer.reward.CopyFrom(self.reward(kept))
        return answer


@pytest.mark.parametrize(("is_deterministic", "actions"), [(True, ["fail", "a"]), (True, ["fail"]), (False, ["fail"])])
async def test_a_failure_that_is_told_as_an_end_is_found(
    is_deterministic: bool, actions: list[str], tmp_path: Path
) -> None:
    soothing = Soothing()
    soothing.spec.deterministic = is_deterministic
    rows = read_file(written(tmp_path, {}, {"fails": True, "actions": actions}))
    async with serving(soothing) as address:
        assert broken(await examine_environment(Peer(address), rows)) == ["failure.status"]


class PlacesFirst(Honest):
    """It has one place, and asks for that before it asks for the claim."""

    def __init__(self) -> None:
        super().__init__()
        self.spec.max_sessions = 1

    def check_begin(self, request: environment_pb2.ResetRequest) -> None:
        self.check_closed(request)
        self.check_places()
        self.check_fence(request)


async def test_an_environment_of_one_place_keeps_every_rule(tmp_path: Path) -> None:
    async with serving(PlacesFirst()) as address:
        report = await examine_environment(Peer(address), read_file(written(tmp_path, *ROWS)))
    assert broken(report) == [], report.text()


class OneAfterTheOther(Honest):
    """Its Resets, or its turns, wait for each other and outlast its lease, after which it soon closes a session."""

    def __init__(self, *, boot_s: float = 0.0, turn_s: float = 0.0) -> None:
        super().__init__(lease_s=0.5)
        self.spec.max_sessions = 2
        self.boot_s, self.turn_s = boot_s, turn_s
        self.turn = asyncio.Lock()

    async def boot(self, request: environment_pb2.ResetRequest) -> environment_pb2.ResetResponse:
        async with self.turn:
            await asyncio.sleep(self.boot_s)
        return await super().boot(request)

    async def take(self, kept: Kept, request: Any) -> Any:
        async with self.turn:
            await asyncio.sleep(self.turn_s)
        return await super().take(kept, request)

    def is_left(self, kept: Kept) -> bool:
        return kept.num_calls == 0 and time.monotonic() - kept.touched_at > 1.1 * self.spec.lease_s


class SlowToClose(Counting):
    """Its end takes longer than its lease."""

    def close(self) -> None:
        time.sleep(1.8)
        super().close()


class SlowToBegin(Counting):
    """Its beginning takes longer than two leases, for which fences are remembered."""

    def reset(self, task: Any, seed: int) -> str:
        time.sleep(1.2)
        return super().reset(task, seed)


Looks: TypeAlias = Sequence[Check[EnvironmentSession]]


async def looked(address: str, checks: Looks, folder: Path) -> dict[str, Verdict]:
    """What these checks alone find of an environment."""
    session = EnvironmentSession(Peer(address), read_file(written(folder, {"actions": ["a", "b"]})))
    await session.open()
    results = await run(checks, session)
    await session.close()
    return {result.rule.name: result.verdict for result in results}


async def test_calls_that_outlast_a_lease_break_no_rule(tmp_path: Path) -> None:
    """Side by side, as each waits for leases."""
    found: dict[str, Status] = {}

    async def look(served: AbstractAsyncContextManager[Any], of: str, checks: Looks) -> None:
        async with served as known:
            address = known if isinstance(known, str) else known[0]
            verdicts = await looked(address, checks, tmp_path)
        for rule, verdict in verdicts.items():
            found[f"{of}, {rule}"] = verdict.status
            is_told = verdict.status is Status.SKIPPED and "lease" in verdict.seen
            assert verdict.status is Status.PASSED or is_told, (of, rule, verdict)

    boots = serving(OneAfterTheOther(boot_s=0.8))
    steps = serving(OneAfterTheOther(turn_s=0.8))
    closes = counting(SlowToClose, max_sessions=2, lease_s=0.5)
    begins = counting(SlowToBegin, max_sessions=2, lease_s=0.5)
    async with asyncio.TaskGroup() as group:
        group.create_task(look(boots, "boots", [lives.apart, describing.full, leases.reaped]))
        group.create_task(look(steps, "turns", [lives.apart, describing.full, leases.reaped]))
        group.create_task(look(closes, "closes", [describing.sessions, leases.reaped]))
        group.create_task(look(begins, "begins", [lives.apart, lives.fenced]))
    unseen = {"boots, session.apart", "boots, reset.full", "turns, session.apart", "begins, reset.fenced"}
    assert {name for name, status in found.items() if status is Status.SKIPPED} >= unseen


class Fleeting(Honest):
    """Its lease is over before a second call: of its first `num_lost` episodes, it takes no turn."""

    def __init__(self, num_lost: int) -> None:
        super().__init__(lease_s=1e-6)
        self.num_lost = num_lost

    async def reap(self) -> None:
        """Leaves it to its turns."""

    async def Step(self, request: Any, context: Any) -> Any:
        self.lose()
        return await super().Step(request, context)

    def lose(self) -> None:
        self.num_lost -= 1
        if self.num_lost >= 0:
            raise SessionLostError("its lease is over")


class FleetingAgent(Fleeting, HonestAgent):
    """One that runs episodes by an agent of its own."""

    async def RunEpisode(self, request: Any, context: Any) -> Any:
        self.lose()
        return await super().RunEpisode(request, context)


@pytest.mark.parametrize(("make", "check"), [(Fleeting, turns.order), (FleetingAgent, runs.asks)])
async def test_a_lease_that_leaves_no_time_for_an_episode_is_found(
    make: Callable[[int], Fleeting], check: Check[EnvironmentSession], tmp_path: Path
) -> None:
    """A pause of the kit's own explains the first time."""
    for num_lost, status in ((1, Status.PASSED), (2, Status.FAILED)):
        async with serving(make(num_lost)) as address:
            verdicts = await looked(address, [check], tmp_path)
        assert verdicts[check.rule.name].status is status, verdicts
    assert "its lease is 1e-06 s" in verdicts[check.rule.name].seen


class Counted(Honest):
    """Two sessions of a task share the number of their turns."""

    def is_due(self, kept: Kept, request: Any) -> bool:
        others = [other for other in self.open.values() if other.request.group == kept.request.group]
        return bool(request.turn == 1 + max(other.turn for other in others))


async def test_an_environment_that_takes_no_turn_beside_another_is_found(tmp_path: Path) -> None:
    async with serving(Counted()) as address:
        verdicts = await looked(address, [lives.apart], tmp_path)
    assert verdicts["session.apart"].status is Status.FAILED


class Hanging(Honest):
    """Its turns have no end."""

    async def take(self, kept: Kept, request: Any) -> Any:
        return await asyncio.Event().wait()


async def test_a_call_that_hangs_is_left_after_the_time_that_the_environment_names(tmp_path: Path) -> None:
    hanging = Hanging()
    hanging.spec.step_timeout_s = hanging.spec.close_timeout_s = 0.3
    async with serving(hanging) as address, asyncio.timeout(60):
        report = await examine_environment(Peer(address), read_file(written(tmp_path, *ROWS)))
    assert "step.order" in broken(report)
    assert "DEADLINE_EXCEEDED" in report.text()


class NeverClosed(Honest):
    """The Close of a session that is open, or only its grade, has no end."""

    def __init__(self, is_graded: bool) -> None:
        super().__init__()
        self.spec.close_timeout_s = 4.0
        self.is_graded = is_graded

    async def Close(self, request: environment_pb2.CloseRequest, context: Any) -> environment_pb2.CloseResponse:
        if request.session in self.open and (request.grade or not self.is_graded):
            del self.open[request.session]
            await asyncio.Event().wait()
        return await super().Close(request, context)


@pytest.mark.parametrize(("is_graded", "rule"), [(False, "close.place"), (True, "close.grade")])
async def test_a_close_that_hangs_is_waited_for_once(is_graded: bool, rule: str, tmp_path: Path) -> None:
    async with serving(NeverClosed(is_graded)) as address, asyncio.timeout(60):
        report = await examine_environment(Peer(address), read_file(written(tmp_path, *ROWS)))
    assert broken(report) == [rule]
    assert "close.unknown" in skipped(report)
    assert "within 4 s, and no other is waited for" in " ".join(report.text().split())
