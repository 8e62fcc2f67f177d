"""`rolecall watch` over the lives of a controller, as its stub gives them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands import steer
from rolecall.errors import NotFoundError, RoleCallError, StoreUnavailableError, UnauthenticatedError, UnavailableError
from rolecall.launcher.plan import write_config
from rolecall.launcher.run_dir import run_lock
from rolecall.launcher.run_record import INTERRUPTED, keep_record
from rolecall.rpc.callers import Caller
from rolecall.rpc.identity import acting_as
from rolecall.rpc.server import Server
from rolecall.settings import RpcSection, RunSection, RunSettings
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1 import controller_pb2_grpc

RUNNING = pb.RunStatus(run="test", state=pb.RUN_STATE_RUNNING, step=1, total_steps=4)
FAILED = pb.RunStatus(run="test", state=pb.RUN_STATE_FAILED, step=1, total_steps=4, error="the store was away")
DONE = pb.RunStatus(run="test", state=pb.RUN_STATE_DONE, step=4, total_steps=4)


class Lives:
    """A controller's stub: each stream is a life, which ends in silence where None stands last."""

    def __init__(self, *lives: Sequence[pb.RunStatus | None]) -> None:
        self._lives = iter(lives)

    async def WatchRun(self, request: pb.WatchRunRequest, timeout: float) -> AsyncIterator[pb.WatchRunResponse]:
        for status in next(self._lives):
            if status is None:
                raise UnavailableError("nobody listens")
            yield pb.WatchRunResponse(status=status)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steer, "WATCH_PAUSE_S", 0.0)


async def watch(lives: Any, directory: Path | None) -> int:
    return await steer._watch(lives, steer.Run("h:1", RpcSection(), directory))


async def test_a_controller_that_failed_is_watched_on_while_a_launcher_starts_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_lock(tmp_path):
        assert await watch(Lives([RUNNING, FAILED], [FAILED], [None], [RUNNING, DONE]), tmp_path) == 0
    told = capsys.readouterr().out
    assert told.count("controller: the store was away") == 1
    assert "step 4/4" in told


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_run_that_failed_for_good_ends_its_watch(tmp_path: Path, is_known: bool) -> None:
    assert await watch(Lives([RUNNING, FAILED]), tmp_path if is_known else None) == 1


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (INTERRUPTED, 0)])
def test_a_watch_of_a_run_that_is_over_says_by_its_code_whether_it_failed(
    tmp_path: Path, make_settings: Callable[..., RunSettings], code: int, told: int
) -> None:
    settings = make_settings(controller={"address": f"unix:{tmp_path}/nobody.sock"})
    settings.run.dir.mkdir()
    write_config(settings)
    keep_record(settings.run, FAILED if code else DONE, code)
    assert steer.steer("watch", str(settings.run.dir)) == told
    assert steer.steer("status", str(settings.run.dir)) == 0


async def test_a_controller_that_was_never_seen_is_not_waited_for() -> None:
    with pytest.raises(UnavailableError):
        await watch(Lives([None]), None)


def test_a_controller_that_says_its_store_is_away_is_not_taken_for_one_that_is_over(tmp_path: Path) -> None:
    """There is a record of an earlier life, and no launcher: somebody serves the controller by hand."""
    keep_record(RunSection(name="test", dir=tmp_path, num_steps=4), RUNNING)

    def told(error: RoleCallError) -> str:
        return steer._record_of_what_is_over(steer.Run("h:1", RpcSection(), tmp_path), error).how

    assert "--resume goes on" in told(UnavailableError("nobody listens"))
    with pytest.raises(StoreUnavailableError, match="the store did not answer"):
        told(StoreUnavailableError("the store did not answer"))


async def test_a_controller_of_another_run_at_the_port_of_one_that_is_over_is_not_taken_for_its(
    tmp_path: Path, make_settings: Callable[..., RunSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_settings(run={"name": "other", "dir": str(tmp_path / "other"), "num_steps": 1})
    server = Server(acting_as(other, Caller.CONTROLLER).rpc, "127.0.0.1:0")
    server.add(
        controller_pb2_grpc.add_ControllerServiceServicer_to_server,
        controller_pb2_grpc.ControllerServiceServicer(),  # type: ignore[abstract]  # no call gets so far
        "rolecall.v1.ControllerService",
    )
    address = await server.start()
    settings = make_settings(
        controller={"address": address}, run={"name": "test", "dir": str(tmp_path / "over"), "num_steps": 4}
    )
    acting_as(settings, Caller.CONTROLLER)  # which makes its directory, and its tokens
    write_config(settings)
    keep_record(settings.run, DONE, 0)

    def told(command: str) -> int:
        return steer.steer(command, str(settings.run.dir))

    try:
        for command in ("status", "watch"):
            assert await asyncio.to_thread(told, command) == 0
            said = capsys.readouterr()
            assert "at step 4/4: done" in said.out
            assert f"that is its last record. The controller at {address} refuses this caller (" in said.err
        with pytest.raises(
            NotFoundError, match=r"run test is over \(done\); there is nothing to stop. The controller at"
        ):
            await asyncio.to_thread(told, "stop")
        with run_lock(settings.run.dir), pytest.raises(UnauthenticatedError):
            await asyncio.to_thread(told, "status")
    finally:
        await server.drain(0.0)
