"""A worker belongs to a run through any fate of its controller, and says so when it cannot."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import grpc
import pytest

from rolecall.contract import contract_version
from rolecall.errors import ConfigError, RunLockedError, UnavailableError, VersionMismatchError, WorkerLostError
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.membership import Membership
from rolecall.settings import RpcSection, RunSettings, tied_to_this_process
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.conftest import MakeSettings
from tests.contract.peer import SERVICE, Authority, Peer, serving
from tests.twins.callers import party, playing
from tests.waiting import TIMEOUT_S, until


@pytest.fixture
async def peer() -> Peer:
    return Peer()


def member_of(settings: RunSettings, *, launched: bool | None = None) -> Membership:
    return Membership(
        playing(settings, Caller.ROLLOUT),
        controller_pb2.ROLE_ROLLOUT,
        "rollout-0",
        "abc123",
        "127.0.0.1:5",
        num_weight_ranks=2,
        on_gpus=True,
        launched=launched,
    )


@asynccontextmanager
async def started(settings: RunSettings, *, launched: bool | None = None) -> AsyncIterator[Membership]:
    member = member_of(settings, launched=launched)
    member.start()
    try:
        yield member
    finally:
        member.stop()


async def test_a_worker_joins_with_its_particulars_and_learns_who_is_in_charge(
    peer: Peer, make_settings: MakeSettings
) -> None:
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        assert member.ctl == 7
        await until(lambda: member.ctl == 8)
    (join,) = peer.joins
    assert join == controller_pb2.JoinRequest(
        run="test",
        role=controller_pb2.ROLE_ROLLOUT,
        worker="rollout-0",
        incarnation="abc123",
        address="127.0.0.1:5",
        num_weight_ranks=2,
        version=contract_version(),
        on_gpus=True,
    )


@contextmanager
def hearing(heartbeat_s: float) -> Iterator[tuple[str, list[controller_pb2.HeartbeatRequest]]]:
    """A controller in a thread of its own; gives its address and the heartbeats that it heard."""
    beats: list[controller_pb2.HeartbeatRequest] = []

    def hear(request: bytes, context: grpc.ServicerContext) -> bytes:
        beats.append(controller_pb2.HeartbeatRequest.FromString(request))
        return b""

    joined = controller_pb2.JoinResponse(ctl=1, heartbeat_s=heartbeat_s).SerializeToString()
    methods = {"Join": lambda request, context: joined, "Heartbeat": hear}
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield address, beats
        server.stop(0).wait()


def block_until(holds: Callable[[], bool]) -> None:
    """Keeps the event loop busy until another thread has brought it about."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def test_heartbeats_go_on_while_the_workers_event_loop_is_busy(make_settings: MakeSettings) -> None:
    with hearing(0.02) as (address, beats):
        async with started(make_settings(controller={"address": address})) as member:
            await member.joined()
            num_heard = len(beats)
            block_until(lambda: len(beats) >= num_heard + 5)


async def test_heartbeats_carry_progress_and_phase(peer: Peer, make_settings: MakeSettings) -> None:
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        member.progress()
        member.progress()
        member.phase = "generating"
        await until(lambda: any(beat.progress == 2 and beat.phase == "generating" for beat in peer.beats))


async def test_a_worker_that_leaves_says_so_last(peer: Peer, make_settings: MakeSettings) -> None:
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        await until(lambda: peer.beats)
        await member.leave()
        assert [beat.leaving for beat in peer.beats].index(True) == len(peer.beats) - 1
        await member.leave()


async def test_a_worker_leaves_without_a_controller_that_is_away(peer: Peer, make_settings: MakeSettings) -> None:
    async with serving(peer) as (server, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        await server.drain(0.0)
        await asyncio.wait_for(member.leave(), TIMEOUT_S / 4)


async def test_a_worker_that_the_controller_does_not_know_joins_again(peer: Peer, make_settings: MakeSettings) -> None:
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        peer.known.clear()
        await until(lambda: len(peer.joins) == 2)
        num_heard = len(peer.beats)
        await until(lambda: len(peer.beats) > num_heard)
        assert not member.failed.done()


async def test_a_restarted_controller_is_joined_again(peer: Peer, make_settings: MakeSettings) -> None:
    successor = Peer()
    async with serving(peer) as (server, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        await server.drain(0.0)
        await asyncio.sleep(0.2)
        async with serving(successor, bind=address):
            await until(lambda: len(successor.joins) == 1 and "rollout-0" in successor.known)
            assert not member.failed.done()


async def test_a_worker_may_start_before_its_controller(
    peer: Peer, make_settings: MakeSettings, unused_tcp_port: int
) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    async with started(make_settings(controller={"address": address})) as member:
        await asyncio.sleep(0.2)
        async with serving(peer, bind=address):
            await asyncio.wait_for(member.joined(), 30)


async def test_a_controller_that_never_appears_is_an_error_within_the_start_timeout(
    make_settings: MakeSettings, unused_tcp_port: int
) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    async with started(make_settings(controller={"address": address, "start_timeout_s": 0.6})) as member:
        with pytest.raises(UnavailableError, match=rf"not joined to a controller at {address} within 0.6 s"):
            await asyncio.wait_for(member.joined(), 60.0)
        assert member.failed.done()


async def test_another_release_is_refused_at_once(peer: Peer, make_settings: MakeSettings) -> None:
    peer.refusal = VersionMismatchError("the controller is 9.9.9, this worker 0.1.0; install the same release")
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        with pytest.raises(VersionMismatchError, match="install the same release"):
            await member.joined()
    assert len(peer.joins) == 1


async def test_a_controller_that_is_not_in_charge_is_waited_for(peer: Peer, make_settings: MakeSettings) -> None:
    peer.refusal = RunLockedError("another controller holds the run")
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await until(lambda: len(peer.joins) >= 2)
        peer.refusal = None
        await member.joined()


async def test_heartbeats_have_a_connection_of_their_own(peer: Peer, make_settings: MakeSettings) -> None:
    async with (
        serving(peer) as (_, address),
        open_channel(address, party(Caller.OPERATOR)) as channel,
        started(make_settings(controller={"address": address})) as member,
    ):
        await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(controller_pb2.GetRunRequest())
        await member.joined()
    assert len(peer.peers) == 2


async def test_heartbeats_go_over_mutual_tls(
    peer: Peer, make_settings: MakeSettings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tls = Authority(tmp_path_factory.mktemp("ca")).issue("rollout")
    rpc = RpcSection(tls=tls)
    async with (
        serving(peer, party(tls=tls)) as (_, address),
        started(make_settings(controller={"address": address}, rpc=rpc.model_dump())) as member,
    ):
        await member.joined()
        await until(lambda: bool(peer.beats))


async def test_a_stopped_worker_is_silent(peer: Peer, make_settings: MakeSettings) -> None:
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        member.stop()
        for _ in range(10):  # turns of the loop for one that is under way
            await asyncio.sleep(0.02)
        num_heard = len(peer.beats)
        await asyncio.sleep(0.2)
        assert len(peer.beats) == num_heard
        assert not member.failed.done()


async def test_a_worker_ends_with_the_run_unless_a_launcher_ends_it(
    peer: Peer, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.over = True
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await asyncio.wait_for(asyncio.shield(member.failed), 30)
        assert len(peer.beats) == 1
    monkeypatch.setenv("ROLECALL_DIE_WITH_PARENT", "1")
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await until(lambda: len(peer.beats) > 3)
        assert not member.failed.done()


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_controller_that_leaves_is_missed_only_before_the_end_of_the_run(
    peer: Peer,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_over: bool,
) -> None:
    monkeypatch.setenv("ROLECALL_DIE_WITH_PARENT", "1")
    peer.over = is_over
    async with AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(serving(peer))
        async with started(make_settings(controller={"address": address})):
            await until(lambda: len(peer.beats) > 1)
            await stack.aclose()
            if is_over:
                await asyncio.sleep(1.0)  # some twenty heartbeats
            else:
                await until(lambda: "heartbeats are not heard" in caplog.text)
    assert ("heartbeats are not heard" in caplog.text) != is_over


async def test_a_worker_that_starts_processes_of_its_own_ends_with_the_run_too(
    peer: Peer, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.over = True
    for name, value in tied_to_this_process().items():
        monkeypatch.setenv(name, value)  # for those: a rollout's engine
    async with serving(peer) as (_, address):
        settings = make_settings(controller={"address": address})
        async with started(settings, launched=False) as member:
            await asyncio.wait_for(asyncio.shield(member.failed), 30)


async def test_a_worker_without_a_controller_address_is_told_what_to_give(make_settings: MakeSettings) -> None:
    with pytest.raises(ConfigError, match=r"--controller.address HOST:PORT"):
        member_of(make_settings())


async def test_a_worker_that_was_given_up_fails_for_good(peer: Peer, make_settings: MakeSettings) -> None:
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        await member.joined()
        peer.given_up = WorkerLostError("hung: no progress for 15 s")
        with pytest.raises(WorkerLostError, match="no progress"):
            await asyncio.wait_for(asyncio.shield(member.failed), 30)
        num_heard = len(peer.beats)
        await asyncio.sleep(0.3)
        assert len(peer.beats) == num_heard


async def test_a_given_up_worker_that_joins_again_is_refused_for_good(peer: Peer, make_settings: MakeSettings) -> None:
    peer.refusal = WorkerLostError("replaced by rollout-0.b")
    async with serving(peer) as (_, address), started(make_settings(controller={"address": address})) as member:
        with pytest.raises(WorkerLostError, match="replaced by"):
            await asyncio.wait_for(member.joined(), 30)
    assert len(peer.joins) == 1


async def test_an_event_loop_that_stands_still_is_work_without_progress(make_settings: MakeSettings) -> None:
    with hearing(0.05) as (address, beats):
        async with started(make_settings(controller={"address": address})) as member:
            await member.joined()
            await until(lambda: beats and not beats[-1].busy)
            block_until(lambda: beats[-1].busy)
            assert beats[-1].progress == beats[0].progress
            await until(lambda: not beats[-1].busy)
            member.busy = True
            await until(lambda: beats[-1].busy)
            member.busy = False
            await until(lambda: not beats[-1].busy)
