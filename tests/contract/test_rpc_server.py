"""What every role's server promises: it says who can serve, refuses what would go wrong in silence, and ends without
dropping calls.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from rolecall.errors import ConfigError, ExhaustedError, UnavailableError
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.options import LIVENESS, MAX_MESSAGE_BYTES
from rolecall.rpc.server import Server
from rolecall.rpc.server_calls import MAX_STREAMS
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.contract.peer import SERVICE, Peer, serving
from tests.twins.callers import party
from tests.waiting import until

GET = controller_pb2.GetRunRequest()


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture
def socket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


async def health_of(address: str, service: str) -> str:
    async with open_channel(address, party(Caller.OPERATOR)) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", _to_bytes, health_pb2.HealthCheckResponse.FromString
        )
        response = await check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_a_role_is_serving_only_after_it_said_so_while_it_lives_all_along(peer: Peer) -> None:
    async with serving(peer) as (server, address):
        for serves in (False, True, False):
            await server.set_serving(serves)
            expected = "SERVING" if serves else "NOT_SERVING"
            assert await health_of(address, SERVICE) == expected
            assert await health_of(address, "") == expected
            assert await health_of(address, LIVENESS) == "SERVING"


async def test_a_new_server_is_not_serving(peer: Peer) -> None:
    async with serving(peer) as (_, address):
        assert await health_of(address, SERVICE) == "NOT_SERVING"


@pytest.mark.parametrize(("bind", "reflection"), [("127.0.0.1:0", None), ("0.0.0.0:0", True)])
async def test_reflection_lists_the_services_on_loopback_and_where_it_is_asked_for(
    peer: Peer, bind: str, reflection: bool | None
) -> None:
    names = await reflected(peer, bind, reflection)
    assert {SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(("bind", "reflection"), [("0.0.0.0:0", None), ("127.0.0.1:0", False)])
async def test_reflection_is_off_beyond_loopback_and_where_it_is_not_wanted(
    peer: Peer, bind: str, reflection: bool | None
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflected(peer, bind, reflection)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def reflected(peer: Peer, bind: str, reflection: bool | None) -> set[str]:
    """The services that a server lists."""
    rpc = party(behind_mesh=True, reflection=reflection)
    async with serving(peer, rpc, bind) as (_, address), grpc.aio.insecure_channel(address) as channel:
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        # its one request goes with the call: a stream of requests may be refused before its first is sent, which is
        # another error
        info = channel.unary_stream(path, _to_bytes, reflection_pb2.ServerReflectionResponse.FromString)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in info(request, timeout=5)]
    return {service.name for answer in answers for service in answer.list_services_response.service}


async def test_a_port_in_use_is_a_clear_error(peer: Peer, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(peer) as (_, address):
        with pytest.raises(
            ConfigError, match=rf"cannot listen on {address}: it is in use: another process listens there"
        ):
            await Server(party(Caller.OPERATOR), address).start()
    assert capfd.readouterr().err.count("Failed to add port") <= 1  # gRPC's own words, at each try


async def test_a_unix_socket_in_use_is_a_clear_error_and_a_dead_one_is_replaced(peer: Peer, socket_dir: Path) -> None:
    bind = f"unix:{socket_dir / 'rpc.sock'}"
    async with serving(peer, bind=bind) as (_, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        assert address == bind
        with pytest.raises(ConfigError, match="another process listens there"):
            await Server(party(Caller.OPERATOR), bind).start()
        await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)
    async with serving(peer, bind=bind) as (_, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "192.0.2.1:50051", "rollout-0.internal:50051"])
async def test_listening_beyond_loopback_without_tls_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"without TLS.*rpc.behind_mesh"):
        Server(party(Caller.OPERATOR), bind)


async def test_behind_a_mesh_plaintext_may_listen_anywhere(peer: Peer) -> None:
    rpc = party(Caller.OPERATOR, behind_mesh=True)
    async with serving(peer, rpc, "0.0.0.0:0") as (_, address):
        port = address.rpartition(":")[2]
        async with open_channel(f"127.0.0.1:{port}", rpc) as channel:
            await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)


async def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        Server(party(Caller.OPERATOR), "localhost")


async def test_messages_up_to_the_limit_pass_and_larger_ones_are_named_errors(peer: Peer) -> None:
    async with serving(peer) as (_, address), open_channel(address, party(Caller.ROLLOUT)) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        await stub.Join(controller_pb2.JoinRequest(worker="w" * (MAX_MESSAGE_BYTES - 1024)))
        with pytest.raises(ExhaustedError, match=r"Join.*larger than max"):
            await stub.Join(controller_pb2.JoinRequest(worker="w" * (MAX_MESSAGE_BYTES + 1)))


async def _until_called(peer: Peer) -> None:
    """Returns once GetRun is under way. Bounded by the test's own limit."""
    await until(lambda: peer.calls)


async def _ask_until_refused(stub: controller_pb2_grpc.ControllerServiceStub) -> None:
    """Calls until one fails: a moment passes before a server that drains takes no more."""
    while True:
        await stub.GetRun(GET, timeout=60.0)


async def test_a_drain_lets_calls_under_way_finish_and_takes_no_new_ones(peer: Peer) -> None:
    peer.delay_s = 0.3
    async with serving(peer) as (server, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        under_way = asyncio.create_task(_get(stub))
        await _until_called(peer)
        draining = asyncio.create_task(server.drain(60.0))
        with pytest.raises(UnavailableError):
            await _ask_until_refused(stub)
        assert await under_way == controller_pb2.GetRunResponse()
        await draining


async def test_a_drain_cancels_what_does_not_finish_within_its_grace(peer: Peer) -> None:
    peer.delay_s = 60.0
    async with serving(peer) as (server, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        under_way = asyncio.create_task(_get(controller_pb2_grpc.ControllerServiceStub(channel)))
        await _until_called(peer)
        await asyncio.wait_for(server.drain(0.2), 30.0)
        with pytest.raises(UnavailableError):
            await under_way
    await asyncio.wait_for(peer.cancelled.wait(), 30.0)


async def test_a_reader_that_leaves_a_stream_frees_the_server(peer: Peer) -> None:
    peer.delay_s = 60.0
    async with serving(peer) as (_, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        call = controller_pb2_grpc.ControllerServiceStub(channel).WatchRun(controller_pb2.WatchRunRequest())
        async for _response in call:
            break
        call.cancel()
        await asyncio.wait_for(peer.cancelled.wait(), 30.0)


def _to_bytes(message: Message) -> bytes:
    return message.SerializeToString()


async def _get(stub: controller_pb2_grpc.ControllerServiceStub) -> controller_pb2.GetRunResponse:
    return await stub.GetRun(GET)


async def test_streams_are_bounded_apart_so_that_watchers_leave_room_for_heartbeats(peer: Peer) -> None:
    peer.num_sent, peer.delay_s = 1, 60.0
    async with (
        serving(peer) as (_, address),
        open_channel(address, party(Caller.OPERATOR)) as channel,
        AsyncExitStack() as watchers,
    ):
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        for _ in range(MAX_STREAMS):
            stream = stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=60)
            watchers.callback(stream.cancel)
            await anext(aiter(stream))
        with pytest.raises(ExhaustedError, match="256 streams are open already"):
            await anext(aiter(stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=60)))
        await stub.PauseRun(controller_pb2.PauseRunRequest())
        stream.cancel()
        async with asyncio.timeout(30):
            while True:  # until the server has seen the end of one
                try:
                    await anext(aiter(stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=60)))
                    return
                except ExhaustedError:
                    await asyncio.sleep(0.02)
