"""Silence and stillness by the controller's clock: who is given up, when, and what becomes of an incarnation that
was.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from rolecall.contract import contract_version
from rolecall.errors import ConfigError, UnknownWorkerError, WorkerLostError
from rolecall.settings import ControllerSection, RunSettings
from rolecall.v1 import controller_pb2
from services.controller.fleet.liveness import Worker
from services.controller.fleet.members import LOOKS_PER_HEARTBEAT, Fleet
from services.controller.threads import StoreThreads
from tests.fixtures_store import StoreUnderTest
from tests.waiting import until

CONTROLLER = ControllerSection()
LOOK_S = CONTROLLER.heartbeat_s / 4
HANG_S = 15.0


def joined(now: float = 0.0) -> Worker:
    """A worker that joined at `now`."""
    return Worker(
        join=controller_pb2.JoinRequest(worker="rollout-0", incarnation="a"), hang_s=HANG_S, last_seen=now, moved_at=now
    )


def beat(progress: int, *, busy: bool) -> controller_pb2.HeartbeatRequest:
    """What it says."""
    return controller_pb2.HeartbeatRequest(progress=progress, busy=busy, phase="generating")


def first_loss_s(worker: Worker, start: float) -> float:
    """When the looks that follow `start` give it up."""
    now = start
    while worker.loss(now, CONTROLLER, LOOK_S) is None:
        now += LOOK_S
    return now


def test_a_death_is_found_within_the_lease() -> None:
    worker = joined()
    assert 0.8 * CONTROLLER.lease_s < first_loss_s(worker, 0.0) <= CONTROLLER.lease_s
    loss = worker.loss(CONTROLLER.lease_s, CONTROLLER, LOOK_S)
    assert loss is not None
    assert loss.reason.startswith(f"silent for {CONTROLLER.lease_s} s")
    assert not loss.is_final


def test_a_hang_is_found_within_hang_s_of_the_last_move_however_late_that_was_heard() -> None:
    worker = joined()
    worker.heard(beat(1, busy=True), 1.0)  # it moved just after the beat before, and never again
    now = 1.0
    while (loss := worker.loss(now, CONTROLLER, LOOK_S)) is None:
        now += LOOK_S
        worker.heard(beat(1, busy=True), now)
    assert HANG_S - 3.0 < now <= HANG_S
    assert loss.is_final
    assert "no progress" in loss.reason


@pytest.mark.parametrize(
    "said",
    [
        lambda count: beat(1, busy=False),
        lambda count: beat(count, busy=True),
        lambda count: beat(1, busy=count % 5 > 0),
    ],
    ids=["idle", "moving", "idle at times"],
)
def test_a_worker_that_is_idle_or_moves_is_never_hung(said: Callable[[int], controller_pb2.HeartbeatRequest]) -> None:
    worker = joined()
    for count in range(60):
        now = count * CONTROLLER.heartbeat_s
        worker.heard(said(count), now)
        assert worker.loss(now, CONTROLLER, LOOK_S) is None


@pytest.mark.parametrize("lease_s", [1.0, 15.0, 60.0, 600.0])
def test_a_worker_that_moves_is_never_hung_however_long_the_lease(lease_s: float) -> None:
    controller = ControllerSection(lease_s=lease_s)
    look_s, worker = controller.heartbeat_s / LOOKS_PER_HEARTBEAT, joined()
    for look in range(80):
        if look % LOOKS_PER_HEARTBEAT == 0:
            worker.heard(beat(look, busy=True), look * look_s)
        assert worker.loss(look * look_s, controller, look_s) is None


def test_what_the_controller_could_not_hear_is_not_held_against_anyone() -> None:
    worker = joined()
    worker.forgive(60.0, 61.0)
    assert worker.loss(61.0, CONTROLLER, LOOK_S) is None
    assert first_loss_s(worker, 61.0) <= 60.0 + CONTROLLER.lease_s


@pytest.fixture
async def fleet(store: StoreUnderTest, make_settings: Callable[..., RunSettings]) -> AsyncIterator[Fleet]:
    async with watched(store, make_settings, time.monotonic) as fleet:
        yield fleet


@asynccontextmanager
async def watched(
    store: StoreUnderTest, make_settings: Callable[..., RunSettings], clock: Callable[[], float]
) -> AsyncIterator[Fleet]:
    """A fleet that judges by `clock`."""
    settings = make_settings(controller={"lease_s": 0.5}, rollout={"hang_s": 0.6}, actor={"hang_s": 0.6})
    threads = StoreThreads()
    fleet = Fleet(settings, store.ledger, threads, clock, tokenizer="whole", token_ids="ids")
    watching = asyncio.create_task(fleet.watch())
    yield fleet
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await fleet.close()
    threads.close()


def request(
    incarnation: str,
    role: controller_pb2.Role.ValueType = controller_pb2.ROLE_ROLLOUT,
    worker: str = "rollout-0",
    tokenizer: str = "",
) -> controller_pb2.JoinRequest:
    """A worker's announcement."""
    return controller_pb2.JoinRequest(
        run="test",
        role=role,
        worker=worker,
        incarnation=incarnation,
        address="127.0.0.1:1",
        num_weight_ranks=1,
        version=contract_version(),
        tokenizer=tokenizer,
    )


def says(incarnation: str, **fields: Any) -> controller_pb2.HeartbeatRequest:
    """Its heartbeat."""
    return controller_pb2.HeartbeatRequest(worker="rollout-0", incarnation=incarnation, **fields)


async def until_lost(fleet: Fleet, beat: Callable[[], None] = lambda: None) -> str:
    """Why rollout-0 is given up, while it says `beat`."""
    async with asyncio.timeout(30):
        while not fleet.is_lost("rollout-0"):
            beat()
            await asyncio.sleep(0.05)
    return fleet.is_lost("rollout-0")


async def test_a_silent_worker_may_come_back_and_is_lost_until_then(fleet: Fleet) -> None:
    fleet.join(request("a"))
    assert (await until_lost(fleet)).startswith("silent")
    (status,) = fleet.statuses()
    assert (status.worker, status.incarnation, status.lost[:6]) == ("rollout-0", "a", "silent")
    assert fleet.rollouts() == []
    with pytest.raises(UnknownWorkerError):
        fleet.heartbeat(says("a"))
    fleet.join(request("a"))
    assert fleet.is_lost("rollout-0") == ""
    assert [rollout.policy_version for rollout in fleet.rollouts()] == [-1]


async def test_a_hung_worker_is_told_to_end_and_may_never_join_again(fleet: Fleet) -> None:
    fleet.join(request("a"))
    assert (await until_lost(fleet, lambda: fleet.heartbeat(says("a", busy=True)))).startswith("hung")
    for _ in range(2):
        with pytest.raises(WorkerLostError, match=r"gave rollout-0.a up \(hung"):
            fleet.heartbeat(says("a"))
        with pytest.raises(WorkerLostError):
            fleet.join(request("a"))
    fleet.join(request("b"))
    assert [(status.incarnation, status.lost) for status in fleet.statuses()] == [("b", "")]


async def test_a_zombie_does_not_take_its_successors_place(fleet: Fleet) -> None:
    fleet.join(request("a"))
    await until_lost(fleet)
    fleet.join(request("b"))
    with pytest.raises(WorkerLostError, match=r"replaced by rollout-0.b"):
        fleet.heartbeat(says("a"))
    with pytest.raises(WorkerLostError):
        fleet.join(request("a"))
    fleet.heartbeat(says("b"))


async def test_a_worker_that_leaves_is_not_told_of_as_lost_and_what_it_still_held_goes_to_others_at_once(
    fleet: Fleet, store: StoreUnderTest
) -> None:
    store.admit(1)
    assert len(store.attested("rollout-0.a").claim(1)) == 1
    fleet.join(request("a"))
    fleet.heartbeat(says("a", leaving=True))
    assert fleet.statuses() == []
    assert fleet.is_lost("rollout-0") == "it was asked to end and has left"
    with pytest.raises(WorkerLostError):
        fleet.heartbeat(says("a"))
    await asyncio.wait_for(fleet.settled(), 30)
    assert store.ledger.counts().queued == 1
    with redis.Redis.from_url(store.url, decode_responses=True) as client:
        (key,) = client.scan_iter(match=f"*{store.run}*:g:0")
        assert client.hmget(key, "excused", "deaths") == ["1", None], "no prompt is to blame for it"
    fleet.join(request("b"))
    assert [status.incarnation for status in fleet.statuses()] == ["b"]
    assert fleet.is_lost("rollout-0") == ""


async def test_a_trainer_that_leaves_is_told_at_once(fleet: Fleet) -> None:
    waiting = asyncio.create_task(fleet.trainer_lost())
    fleet.join(request("a", controller_pb2.ROLE_ACTOR))
    await asyncio.sleep(0.05)
    fleet.heartbeat(says("a", leaving=True))
    with pytest.raises(WorkerLostError, match=r"rollout-0.a is lost: it was asked to end and has left"):
        await asyncio.wait_for(waiting, 30)


class Clock:
    """A clock that stands still until it is moved, and counts who looks at it."""

    def __init__(self) -> None:
        self.now, self.num_looks = 0.0, 0

    def __call__(self) -> float:
        self.num_looks += 1
        return self.now

    def move(self) -> None:
        self.now += 0.05


async def test_a_controller_that_stood_still_gives_nobody_up_for_it(
    store: StoreUnderTest, make_settings: Callable[..., RunSettings]
) -> None:
    clock = Clock()
    async with watched(store, make_settings, clock) as fleet:
        fleet.join(request("a"))
        first = clock.num_looks
        await until(lambda: clock.num_looks >= first + 3)  # it has judged, and sleeps
        clock.now += 2.0
        await until(lambda: clock.num_looks >= first + 6)
        assert fleet.is_lost("rollout-0") == ""
        assert (await until_lost(fleet, clock.move)).startswith("silent")


async def test_what_a_lost_rollout_held_goes_to_others_and_it_claims_nothing(
    fleet: Fleet, store: StoreUnderTest
) -> None:
    store.admit(2)
    queue = store.attested("rollout-0.a")
    assert len(queue.claim(2)) == 2
    fleet.join(request("a"))
    await until_lost(fleet)
    await asyncio.wait_for(fleet.settled(), 30)
    assert store.ledger.counts().queued == 2
    with pytest.raises(Exception, match="holds no attested weights"):
        queue.claim(1)


@pytest.mark.parametrize(
    ("role", "is_told"),
    [(controller_pb2.ROLE_ACTOR, True), (controller_pb2.ROLE_CRITIC, True), (controller_pb2.ROLE_REWARD, False)],
)
async def test_the_loss_of_a_trainer_is_told_and_of_others_not(
    fleet: Fleet, role: controller_pb2.Role.ValueType, is_told: bool
) -> None:
    waiting = asyncio.create_task(fleet.trainer_lost())
    fleet.join(request("a", role))
    await asyncio.sleep(0.05)
    await until_lost(fleet)
    await asyncio.sleep(0.05)
    assert waiting.done() is is_told
    if is_told:
        assert isinstance(waiting.exception(), WorkerLostError)
    waiting.cancel()


async def test_a_tokenizer_is_compared_whole_where_it_is_the_policy_s_and_by_its_ids_where_another_model_reads_them(
    fleet: Fleet,
) -> None:
    reference, rollout = controller_pb2.ROLE_REFERENCE, controller_pb2.ROLE_ROLLOUT
    makers = (rollout, controller_pb2.ROLE_ACTOR)
    for place, role in enumerate((*makers, controller_pb2.ROLE_CRITIC, reference, controller_pb2.ROLE_REWARD)):
        fleet.join(request("a", role, f"none-{place}"))  # a directory without one, which nothing is made by
    for role in makers:
        fleet.join(request("b", role, "same", "whole"))
        with pytest.raises(ConfigError, match=r"other-0 makes other tokens or text .* another tokenizer\.json"):
            fleet.join(request("a", role, "other-0", "another"))
    fleet.join(request("a", reference, "ref", "ids"))
    with pytest.raises(ConfigError, match=r"ref-2 takes the policy's token ids for other text"):
        fleet.join(request("a", reference, "ref-2", "whole"))
