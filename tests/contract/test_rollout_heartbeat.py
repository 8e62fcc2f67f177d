"""What a replica's heartbeats would say: an engine that owes something and stands still is seen, a store that is away
ends nothing, and a replica that was stopped watches nothing any more.
"""

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rolecall.errors import ChannelBrokenError, WorkerLostError
from rolecall.rpc.membership import Membership
from rolecall.rpc.role_process import stop_requested
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.prompts import Claim
from rolecall.store.rows import Rows
from rolecall.v1 import controller_pb2
from services.rollout.__main__ import _serve
from services.rollout.activity import LOOK_S, feed_heartbeat
from services.rollout.groups import MixedGroups, Room
from services.rollout.scripted import ScriptedEngine
from tests.conftest import MakeSettings
from tests.contract.rollout_replica import CONSUMER, ReplicaUnderTest, replica_under_test
from tests.fixtures_store import MakeStore, StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.publishing import Beat
from tests.twins.rollout import BriefQueue, NumberTokenizer, RolloutTwin
from tests.waiting import until


def owes(rollout: ReplicaUnderTest) -> bool:
    """Whether the engine has to move now."""
    return rollout.replica.is_busy


async def stands_still(rollout: ReplicaUnderTest, seconds: float = 0.3) -> bool:
    """Whether nothing moves for a while."""
    before = rollout.replica.num_moves
    await asyncio.sleep(seconds)
    return rollout.replica.num_moves == before


async def test_an_engine_without_work_owes_nothing_and_one_that_samples_moves(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.02)) as rollout:
        await rollout.publish(1)
        assert not owes(rollout)
        rollout.engine.hold = True
        rollout.admit(2)
        await until(lambda: owes(rollout))
        assert not await stands_still(rollout)
        rollout.engine.frozen = True
        await asyncio.sleep(0.05)
        assert owes(rollout)
        assert await stands_still(rollout)
        rollout.engine.frozen = rollout.engine.hold = False
        await rollout.committed(2)


async def test_a_load_is_owed_once_its_caller_has_left_and_not_while_it_is_waited_for(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    engine = ScriptedEngine(token_s=1.0)  # what a load takes before it hangs: time to freeze it
    async with replica_under_test(store, tmp_path, engine) as rollout:
        await rollout.publish(1)
        receiving = asyncio.ensure_future(rollout.receive(2))
        await until(lambda: rollout.replica.states.state == "loading_weights")
        engine.frozen = True
        await asyncio.sleep(0.2)
        assert not owes(rollout)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await until(lambda: owes(rollout))
        assert await stands_still(rollout)
        engine.failures.append(ChannelBrokenError("the epoch is over"))
        engine.frozen = False
        await until(lambda: not owes(rollout))


async def test_the_heartbeat_is_fed_at_every_look(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.01)) as rollout:
        pulse = Beat()
        showing = asyncio.create_task(feed_heartbeat(rollout.replica, pulse))
        await rollout.publish(1)
        rollout.engine.hold = True
        rollout.admit(1)
        await until(lambda: pulse.busy)
        before = pulse.count
        await asyncio.sleep(3 * LOOK_S)
        assert pulse.count > before
        showing.cancel()
        rollout.engine.hold = False


class Pinged(ScriptedEngine):
    """An engine that moves whenever it is looked at, as vLLM's core answers pings also without work."""

    @property
    def num_moves(self) -> int:
        """Grows."""
        self._num_moves += 1
        return self._num_moves


async def test_what_only_says_that_an_engine_lives_is_no_progress_of_the_run(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """Else a run in which nothing can go on would never be seen to stall."""
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, Pinged()) as rollout:
        pulse = Beat()
        await rollout.publish(1)
        showing = asyncio.create_task(feed_heartbeat(rollout.replica, pulse))
        await until(lambda: not owes(rollout))
        before = pulse.count
        await asyncio.sleep(3 * LOOK_S)
        assert pulse.count == before
        rollout.engine.hold = True
        rollout.admit(1)
        await until(lambda: pulse.count > before)
        showing.cancel()
        rollout.engine.hold = False


class Crowded(MixedGroups):
    """A sampler whose environment has no place."""

    async def room(self, in_hand: Sequence[Claim], max_groups: int) -> Room:
        return Room(max_groups, {"game": 0})


async def test_a_rollout_moves_the_run_while_a_group_waits_for_a_place_in_its_environment(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """An environment that is away or full is waited for without end: that is no stall. Nobody waits without a group."""
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, Pinged(), sampler=Crowded, environment="game") as rollout:
        pulse = Beat()
        await rollout.publish(1)
        showing = asyncio.create_task(feed_heartbeat(rollout.replica, pulse))
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert not rollout.replica.has_work
        rollout.admit(1)
        await until(lambda: rollout.replica.has_work and not owes(rollout))
        before = pulse.count
        await until(lambda: pulse.count > before)
        store.ledger.drop(0, "late")
        await until(lambda: not rollout.replica.has_work)
        showing.cancel()


@pytest.mark.timeout(300)
async def test_a_store_that_goes_away_ends_no_rollout_and_its_groups_are_committed_when_it_is_back(
    make_embedded_store: Callable[..., EmbeddedStore], make_store: MakeStore, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    server = make_embedded_store(tmp_path / "server")
    store = make_store(server.start(), "test")
    connection, engine = store.connect(retry_s=1.0), ScriptedEngine(token_s=0.01)
    queue, rows = BriefQueue(connection, "test", CONSUMER), Rows(connection, "test", 2)
    async with replica_under_test(store, tmp_path, engine, queue=queue, rows=rows) as rollout:
        rollout.engine.hold = True
        await rollout.publish(1)
        rollout.admit(2)
        await until(lambda: rollout.engine.num_running >= 8)
        await asyncio.to_thread(server.stop)
        rollout.engine.hold = False
        await asyncio.sleep(4.0)  # longer than a client tries and a lease lasts
        assert not rollout.pulling.done()
        server.start()
        rollout.admit(2)
        async with asyncio.timeout(30):
            assert sorted(group.gid for group in await rollout.committed(4)) == [0, 1, 2, 3]


class WatchedEngine(ScriptedEngine):
    """An engine that, as vLLM's, is missed once it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = asyncio.Event()

    async def watch(self) -> None:
        await self.is_closed.wait()  # bounded: by the replica's end
        raise WorkerLostError("the engine died")


async def test_nobody_misses_the_engine_of_a_replica_that_was_stopped(
    store: StoreUnderTest, make_settings: MakeSettings, tmp_path: Path
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    run = {"name": store.run, "dir": str(tmp_path / "run"), "num_steps": 1}
    settings, engine = make_settings(run=run, controller={"address": "127.0.0.1:9"}), WatchedEngine()
    twin = RolloutTwin.of_run(settings, "rollout-0.1", engine, NumberTokenizer(), store.connect())
    address = await twin.server.start()
    membership = Membership(settings, controller_pb2.ROLE_ROLLOUT, "rollout-0", "1", address)
    stop_requested().set()
    await _serve(twin.server, twin.replica, twin.pull, twin.profiles, cast(Any, engine), membership)
    await twin.sampler.close()
    engine.is_closed.set()
    await asyncio.sleep(0.1)
    gc.collect()
    assert not told
