"""What every call of a channel promises: a deadline, the caller's deadline when that is nearer, repetition only where
it is safe, and a trace.
"""

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from opentelemetry import trace

from rolecall import telemetry
from rolecall.errors import DeadlineError, NotAttestedError, UnavailableError
from rolecall.rpc import deadlines
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.options import KEEPALIVE_S, channel_options, server_options
from rolecall.settings import TelemetrySection
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.contract.peer import SERVICE, Peer, serving
from tests.twins.callers import party

GET = controller_pb2.GetRunRequest()
WATCH = controller_pb2.WatchRunRequest()


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture
async def address(peer: Peer) -> AsyncIterator[str]:
    async with serving(peer) as (_, address):
        yield address


async def test_a_call_that_names_no_deadline_has_the_default_one(peer: Peer, address: str) -> None:
    peer.delay_s = 60.0
    async with open_channel(address, party(Caller.OPERATOR), default_timeout_s=0.2) as channel:
        with pytest.raises(DeadlineError, match="GetRun"):
            await asyncio.wait_for(controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET), 50.0)
    await asyncio.wait_for(peer.cancelled.wait(), 50.0)


async def test_a_stream_has_the_default_deadline_too(peer: Peer, address: str) -> None:
    peer.delay_s = 60.0
    async with open_channel(address, party(Caller.OPERATOR), default_timeout_s=0.3) as channel:
        with pytest.raises(DeadlineError, match="WatchRun"):
            async for _response in controller_pb2_grpc.ControllerServiceStub(channel).WatchRun(WATCH):
                pass


@pytest.mark.parametrize("closes", ["the channel", "the reader"])
async def test_a_channel_that_is_closed_under_a_stream_does_not_cancel_its_reader(
    peer: Peer, address: str, closes: str
) -> None:
    peer.delay_s = 60.0
    channel = open_channel(address, party(Caller.OPERATOR))
    first = asyncio.Event()

    async def read() -> None:
        async for _response in controller_pb2_grpc.ControllerServiceStub(channel).WatchRun(WATCH):
            first.set()

    reader = asyncio.create_task(read())
    await asyncio.wait([reader, asyncio.create_task(first.wait())], return_when=asyncio.FIRST_COMPLETED, timeout=50.0)
    if closes == "the channel":
        await channel.close()
    else:
        reader.cancel()
    await asyncio.wait([reader], timeout=50.0)
    assert reader.cancelled() == (closes == "the reader")
    if closes == "the channel":
        with pytest.raises(UnavailableError, match=r"was closed under .*WatchRun"):
            reader.result()
    await channel.close()


async def test_a_call_keeps_its_own_deadline(peer: Peer, address: str) -> None:
    async with open_channel(address, party(Caller.OPERATOR), default_timeout_s=1.0) as channel:
        await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET, timeout=50.0)
    assert peer.time_remaining_s is not None
    assert 40.0 < peer.time_remaining_s < 51.0


async def test_a_child_call_gets_no_more_time_than_its_caller_has_left(peer: Peer, address: str) -> None:
    front = Peer()
    async with (
        open_channel(address, party(Caller.OPERATOR)) as to_peer,
        serving(front) as (_, front_address),
        open_channel(front_address, party(Caller.OPERATOR)) as to_front,
    ):
        child = controller_pb2_grpc.ControllerServiceStub(to_peer)

        async def call_child() -> None:
            await child.GetRun(GET, timeout=100.0)

        front.on_get_run = call_child
        await controller_pb2_grpc.ControllerServiceStub(to_front).GetRun(GET, timeout=5.0)
        assert peer.time_remaining_s is not None
        assert peer.time_remaining_s <= 5.5  # the wire rounds timeouts up

        async def call_detached_child() -> None:
            with deadlines.without_deadline():
                await child.GetRun(GET, timeout=100.0)

        front.on_get_run = call_detached_child
        await controller_pb2_grpc.ControllerServiceStub(to_front).GetRun(GET, timeout=5.0)
        assert peer.time_remaining_s > 50.0


async def test_a_call_whose_callers_deadline_has_passed_is_not_made(peer: Peer, address: str) -> None:
    async with open_channel(address, party(Caller.OPERATOR)) as channel:
        deadlines.inherit(-1.0)
        with pytest.raises(DeadlineError, match="was not called"):
            await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)
    assert peer.calls == []


async def test_an_idempotent_method_is_repeated_while_the_peer_is_unavailable(peer: Peer, address: str) -> None:
    peer.fails, peer.num_fails = NotAttestedError("no weights yet"), 2
    async with open_channel(address, party(Caller.OPERATOR), idempotent=[f"{SERVICE}/GetRun"]) as channel:
        await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)
    assert len(peer.calls) == 3


async def test_a_method_not_named_idempotent_is_never_repeated(peer: Peer, address: str) -> None:
    peer.fails = NotAttestedError("no weights yet")
    async with open_channel(address, party(Caller.OPERATOR), idempotent=[f"{SERVICE}/WatchRun"]) as channel:
        with pytest.raises(NotAttestedError):
            await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)
    assert len(peer.calls) == 1


def test_an_idempotent_method_must_be_named_in_full() -> None:
    with pytest.raises(ValueError, match="not a full method name"):
        open_channel("127.0.0.1:1", party(Caller.OPERATOR), idempotent=["GetRun"])


async def test_a_trace_passes_through_a_call(peer: Peer, address: str) -> None:
    telemetry.configure(TelemetrySection(log_level="WARNING"), "test", "test")
    async with open_channel(address, party(Caller.OPERATOR)) as channel:
        with telemetry.tracer().start_as_current_span("outer") as span:
            seen: list[str] = []

            async def look() -> None:
                seen.append(trace.format_trace_id(trace.get_current_span().get_span_context().trace_id))

            peer.on_get_run = look
            await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)
            trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    assert seen == [trace_id]
    assert trace_id in peer.metadata["traceparent"]


async def test_a_call_that_has_nothing_to_hear_for_many_pings_goes_on(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.rpc.options.KEEPALIVE_S", 0.1)
    peer.delay_s = 3.0
    async with serving(peer) as (_, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        told = controller_pb2_grpc.ControllerServiceStub(channel).WatchRun(WATCH)
        assert len([message async for message in told]) == peer.num_sent


def test_every_option_is_one_that_grpc_knows() -> None:
    """It passes over others without a word."""
    core = find_spec("grpc._cython.cygrpc")
    assert core is not None
    known = Path(str(core.origin)).read_bytes()
    named = {name for name, _ in [*server_options(60.0), *channel_options([], loopback=True)]}
    assert [name for name in sorted(named) if name.encode() not in known] == []


def test_a_strangers_server_is_pinged_less_often_than_grpc_allows_by_default() -> None:
    """One in Go closes a connection, with the calls on it, at the third ping that comes within five minutes."""
    ours, strangers = (dict(channel_options([], loopback=True, ours=is_ours)) for is_ours in (True, False))
    assert strangers["grpc.keepalive_time_ms"] > 300_000
    assert ours["grpc.keepalive_time_ms"] == KEEPALIVE_S * 1000
