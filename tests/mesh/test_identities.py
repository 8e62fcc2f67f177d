"""Who may call what, as the sidecars see it and as the roles behind them do."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rolecall.errors import PermissionDeniedError, UnavailableError
from rolecall.rpc import callers
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.contract.peer import Peer, serving
from tests.mesh.envoy import Habits, Participant
from tests.mesh.pki import write_certificates
from tests.mesh.sidecars import Sidecar
from tests.ports import free_port
from tests.twins.callers import party

pytestmark = pytest.mark.mesh

RUN = "mesh"
CONTROLLER = "controller"
STRANGER = "stranger"
"""The operator of another run, whose certificate the same authority has signed."""
FOREIGNER = "foreigner"
"""An operator by a certificate that another authority has signed."""
EMPTY_S = 20.0


@asynccontextmanager
async def mesh(folder: Path, habits: Habits) -> AsyncIterator[Mapping[str, Participant]]:
    """A served controller behind its sidecar, and a sidecar for every kind of caller."""
    names = [CONTROLLER, *(caller for caller in Caller if caller != CONTROLLER), STRANGER, FOREIGNER]
    port = free_port()
    places = {
        name: Participant(
            name,
            f"spiffe://rolecall/rolecall/{_run_of(name)}/{_role_of(name)}/{name}",
            folder / ("abroad" if name == FOREIGNER else "home") / name,
            f"127.251.1.{index}",
            f"127.251.2.{index}",
            port if name == CONTROLLER else 0,
            (CONTROLLER,),
        )
        for index, name in enumerate(names, 1)
    }
    write_certificates(folder / "home", {name: each.spiffe_id for name, each in places.items() if name != FOREIGNER})
    write_certificates(folder / "abroad", {FOREIGNER: places[FOREIGNER].spiffe_id})
    sidecars = [Sidecar(each, places, RUN, folder) for each in places.values()]
    rpc = party(Caller.CONTROLLER, RUN, behind_mesh=True, forwarded_identity=True)
    async with serving(Peer(), rpc, f"127.0.0.1:{port}"):
        try:
            for sidecar in sidecars:
                sidecar.start(habits)
            for sidecar in sidecars:
                sidecar.ready()
            yield places
        finally:
            for sidecar in sidecars:
                sidecar.kill()


def _run_of(name: str) -> str:
    return "another" if name == STRANGER else RUN


def _role_of(name: str) -> str:
    return Caller.OPERATOR if name in (STRANGER, FOREIGNER) else name


def to_controller(places: Mapping[str, Participant], name: str) -> grpc.aio.Channel:
    """A channel to the controller through the sidecar of `name`."""
    rpc = party(Caller(_role_of(name)), _run_of(name), behind_mesh=True, forwarded_identity=True)
    return open_channel(f"{places[name].here}:{places[CONTROLLER].port}", rpc)


async def test_the_sidecars_policies_are_the_table(tmp_path: Path) -> None:
    async with mesh(tmp_path, Habits()) as places:
        for caller in Caller:
            channel = grpc.aio.insecure_channel(f"{places[caller].here}:{places[CONTROLLER].port}")
            async with channel:
                refused = await refusals(channel, list(callers.rules()))
            expected = {method for method, may in callers.rules().items() if caller not in may}
            assert refused == expected, f"{caller}: {sorted(refused ^ expected)}"


async def refusals(channel: grpc.aio.Channel, methods: Sequence[str]) -> set[str]:
    """The methods that the sidecar in front of the controller refuses."""

    async def is_refused(method: str) -> bool:
        try:
            await channel.unary_unary(method, bytes, bytes)(b"", timeout=EMPTY_S)
        except grpc.aio.AioRpcError as error:
            return error.details() == "RBAC: access denied"
        return False

    answers = await asyncio.gather(*map(is_refused, methods))
    return {method for method, refused in zip(methods, answers, strict=True) if refused}


@pytest.mark.parametrize("rbac", [True, False])
async def test_a_wrong_identity_is_refused_by_the_mesh_and_without_it_by_the_role(tmp_path: Path, rbac: bool) -> None:
    async with mesh(tmp_path, Habits(rbac=rbac)) as places:
        async with to_controller(places, Caller.OPERATOR) as channel:
            await controller_pb2_grpc.ControllerServiceStub(channel).PauseRun(controller_pb2.PauseRunRequest())
        said = "RBAC: access denied" if rbac else "spiffe://rolecall/rolecall/"
        for name in (Caller.VIEWER, Caller.ROLLOUT, STRANGER):
            async with to_controller(places, name) as channel:
                stub = controller_pb2_grpc.ControllerServiceStub(channel)
                with pytest.raises(PermissionDeniedError, match=said):
                    await stub.PauseRun(controller_pb2.PauseRunRequest())
        async with to_controller(places, FOREIGNER) as channel:
            with pytest.raises(UnavailableError, match="reset before headers"):
                await controller_pb2_grpc.ControllerServiceStub(channel).PauseRun(controller_pb2.PauseRunRequest())


async def test_a_caller_that_writes_the_sidecars_header_itself_stays_who_it_is(tmp_path: Path) -> None:
    async with mesh(tmp_path, Habits(rbac=False)) as places, to_controller(places, Caller.VIEWER) as channel:
        forged = (("x-forwarded-client-cert", f"URI={places[Caller.OPERATOR].spiffe_id}"),)
        with pytest.raises(PermissionDeniedError, match="viewer"):
            await controller_pb2_grpc.ControllerServiceStub(channel).PauseRun(
                controller_pb2.PauseRunRequest(), metadata=forged
            )
