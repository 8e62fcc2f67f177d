"""Certificates, keys and roots are replaced under a running system, again and again, and no call is lost."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.conftest import MakeSettings
from tests.contract.peer import Peer, serving
from tests.contract.test_rpc_membership import started
from tests.twins.callers import party
from tests.twins.rotation import Rotation
from tests.waiting import until

GET = controller_pb2.GetRunRequest()
ROTATIONS = 5


@pytest.fixture
async def peer() -> Peer:
    return Peer()


async def test_everything_is_rotated_again_and_again_under_calls_and_heartbeats_and_nothing_is_lost(
    peer: Peer, tmp_path: Path, make_settings: MakeSettings
) -> None:
    rotation = Rotation(tmp_path / "tls")
    servers = party(Caller.CONTROLLER, tls=rotation.tls("controller"))
    operator = party(Caller.OPERATOR, tls=rotation.tls("operator"))
    peer.delay_s = 0.02
    answered = 0
    done = asyncio.Event()

    async def call(stub: controller_pb2_grpc.ControllerServiceStub) -> None:
        nonlocal answered
        while not done.is_set():
            await stub.GetRun(GET, timeout=10.0)
            answered += 1

    async def moves() -> None:
        before, beats = answered, len(peer.beats)
        await until(lambda: answered > before + 8 and len(peer.beats) > beats)

    async with AsyncExitStack() as stack:
        first = serving(peer, servers)
        _, address = await first.__aenter__()
        stub = controller_pb2_grpc.ControllerServiceStub(
            await stack.enter_async_context(open_channel(address, operator))
        )
        rollout = {"tls": rotation.tls("rollout").model_dump()}
        settings = make_settings(controller={"address": address}, rpc=rollout)
        member = await stack.enter_async_context(started(settings))
        await member.joined()
        calls = [asyncio.create_task(call(stub)) for _ in range(4)]
        for _ in range(ROTATIONS):
            await rotation.turn()
            await moves()
        done.set()
        await asyncio.gather(*calls)
        await first.__aexit__(None, None, None)
        # whoever listens there now shows what the first certificates and roots say nothing of
        await stack.enter_async_context(serving(peer, servers, address))
        beats = len(peer.beats)
        await stub.GetRun(GET, timeout=10.0, wait_for_ready=True)
        await until(lambda: len(peer.beats) > beats)
        assert not member.failed.done()
    assert len(peer.joins) == 1


async def test_half_a_rotation_keeps_the_old_certificate_of_a_caller(peer: Peer, tmp_path: Path) -> None:
    rotation = Rotation(tmp_path / "tls")
    files = rotation.tls("operator")
    async with (
        serving(peer, party(tls=rotation.tls("controller"))) as (_, address),
        open_channel(address, party(Caller.OPERATOR, tls=files)) as channel,
    ):
        stub: Any = controller_pb2_grpc.ControllerServiceStub(channel)
        files.key_file.unlink()
        await stub.GetRun(GET, timeout=5.0)
        files.ca_file.write_text("half of a")
        await stub.GetRun(GET, timeout=5.0)
