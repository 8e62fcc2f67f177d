"""Errors cross the wire as themselves, for unary calls and streams, and nothing else looks like them."""

import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from rolecall import errors
from rolecall.rpc import status
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.contract.peer import Peer, serving
from tests.twins.callers import party, shown

GET = controller_pb2.GetRunRequest()
WATCH = controller_pb2.WatchRunRequest()


def leaves() -> list[type[errors.RoleCallError]]:
    found, level = [], [errors.RoleCallError]
    while level:
        found += level
        level = [child for kind in level for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return found


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture
async def stub(peer: Peer) -> AsyncIterator[controller_pb2_grpc.ControllerServiceStub]:
    async with serving(peer) as (_, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        yield controller_pb2_grpc.ControllerServiceStub(channel)


async def test_every_error_of_the_tree_arrives_as_the_class_that_was_raised(
    peer: Peer, stub: controller_pb2_grpc.ControllerServiceStub
) -> None:
    for kind in leaves():
        peer.fails = kind("it is so; do that", worker="rollout-0", version="3")
        with pytest.raises(errors.RoleCallError) as caught:
            await stub.GetRun(GET)
        assert type(caught.value) is kind
        assert caught.value.message == "it is so; do that"
        assert caught.value.details == {"worker": "rollout-0", "version": "3"}


def test_every_error_has_a_reason_of_its_own() -> None:
    reasons = [kind.reason for kind in leaves()]
    assert sorted(reasons) == sorted(set(reasons))


async def test_a_stream_delivers_what_came_before_the_error_and_then_the_error(
    peer: Peer, stub: controller_pb2_grpc.ControllerServiceStub
) -> None:
    peer.fails = errors.FencedError("a newer controller is in charge", ctl="9")
    steps = []

    async def read() -> None:
        async for response in stub.WatchRun(WATCH):
            steps.append(response.status.step)

    with pytest.raises(errors.FencedError, match="newer controller") as caught:
        await read()
    assert steps == [0, 1]
    assert caught.value.details == {"ctl": "9"}


async def test_an_unknown_exception_is_internal_and_its_traceback_stays_in_the_servers_log(
    peer: Peer, stub: controller_pb2_grpc.ControllerServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    peer.fails = ZeroDivisionError("by zero")
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(errors.RoleCallError, match="GetRun failed with ZeroDivisionError: by zero") as caught,
    ):
        await stub.GetRun(GET)
    assert type(caught.value) is errors.RoleCallError
    assert "Traceback" not in caught.value.message
    assert "in GetRun" in caplog.text


async def test_a_timeout_inside_a_method_is_a_deadline_error(
    peer: Peer, stub: controller_pb2_grpc.ControllerServiceStub
) -> None:
    peer.fails = TimeoutError("no store")
    with pytest.raises(errors.DeadlineError, match="no store"):
        await stub.GetRun(GET)


async def test_a_very_long_message_still_arrives(peer: Peer, stub: controller_pb2_grpc.ControllerServiceStub) -> None:
    peer.fails = errors.ConfigError("long " * 10_000, **{f"key{i}": "v" * 1000 for i in range(50)})
    with pytest.raises(errors.ConfigError, match=r"^long .*\.\.\.$"):
        await stub.GetRun(GET)


async def test_a_message_in_any_script_arrives(peer: Peer, stub: controller_pb2_grpc.ControllerServiceStub) -> None:
    peer.fails = errors.InvalidInputError("Größe ≠ 数 " * 500)
    with pytest.raises(errors.InvalidInputError, match="Größe ≠ 数"):
        await stub.GetRun(GET)


async def test_the_original_status_is_canonical_and_carries_error_info(peer: Peer) -> None:
    peer.fails = errors.RowMissingError("row 3/1 is gone", row="3/1")
    async with serving(peer) as (_, address), grpc.aio.insecure_channel(address) as foreign:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await controller_pb2_grpc.ControllerServiceStub(foreign).GetRun(GET, metadata=shown(Caller.OPERATOR))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "row 3/1 is gone"
    assert "grpc-status-details-bin" in {key for key, _ in caught.value.trailing_metadata()}


async def test_an_absent_peer_is_unavailable_and_named(unused_tcp_port: int) -> None:
    target = f"127.0.0.1:{unused_tcp_port}"
    async with open_channel(target, party(Caller.OPERATOR)) as channel:
        with pytest.raises(
            errors.UnavailableError, match=rf"{target} cannot be reached .*ControllerService/GetRun"
        ) as caught:
            await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET)
    assert caught.value.retryable
    assert caught.value.details["target"] == target


async def test_a_method_the_peer_does_not_serve_is_a_version_mismatch(peer: Peer) -> None:
    async with serving(peer) as (_, address), open_channel(address, party(Caller.OPERATOR)) as channel:
        absent = channel.unary_unary(
            "/rolecall.v1.ActorService/Train",
            controller_pb2.GetRunRequest.SerializeToString,
            controller_pb2.GetRunResponse.FromString,
        )
        with pytest.raises(errors.VersionMismatchError, match="ActorService/Train"):
            await absent(GET)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_any_plain_status_becomes_an_error_that_names_target_and_method(code: grpc.StatusCode) -> None:
    error = status.to_error(
        code, "said so", (("grpc-status-details-bin", b"\xff not a status"),), target="reward:1", method="/a.B/C"
    )
    assert "reward:1" in error.message
    assert "/a.B/C" in error.message
    assert error.details["code"] == code.name


def test_error_info_of_another_domain_is_not_taken_for_ours() -> None:
    info = status.trailing_metadata(errors.FencedError("old"))[0][1].replace(b"rolecall", b"elsewher")
    error = status.to_error(
        grpc.StatusCode.FAILED_PRECONDITION, "old", (("grpc-status-details-bin", info),), target="t:1", method="/a.B/C"
    )
    assert type(error) is errors.ConflictError


def test_a_stream_that_a_proxy_had_to_break_off_may_be_asked_again() -> None:
    said = "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"
    error = status.to_error(grpc.StatusCode.INTERNAL, said, (), target="actor:9000", method="/a/Train")
    assert isinstance(error, errors.UnavailableError)
    assert error.message.startswith("actor:9000 was cut off (/a/Train)")


def test_an_internal_error_of_a_foreign_server_is_not_asked_again() -> None:
    error = status.to_error(grpc.StatusCode.INTERNAL, "division by zero", (), target="scorer:9000", method="/a/Score")
    assert type(error) is errors.RoleCallError


@pytest.mark.parametrize("said", ["upstream request timeout", "stream timeout"])
def test_a_proxys_timeout_names_its_remedy(said: str) -> None:
    error = status.to_error(grpc.StatusCode.UNAVAILABLE, said, (), target="actor:9000", method="/a/Train")
    assert isinstance(error, errors.UnavailableError)
    assert "set the route's timeout and its idle timeout to 0 in the mesh" in error.message
