"""The controller's own process: what it does and leaves behind when it is stopped."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rolecall.errors import RoleCallError
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.rpc.membership import Membership
from rolecall.settings import load_settings
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.twins.served import write_settings
from tests.waiting import until

ROOT = Path(__file__).parents[2]


async def test_a_stopped_controller_gives_the_run_back_and_is_not_done(store: StoreUnderTest, tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    with controller_of(write_config(store, tmp_path), log) as controller:
        await until(lambda: holder(store) or controller.poll() is not None)
        assert controller.poll() is None, log.read_text()
        controller.send_signal(signal.SIGTERM)
        code = controller.wait(60)
    assert (code, holder(store)) == (143, b""), log.read_text()
    assert "Error" not in log.read_text()


async def test_a_controller_that_is_stopped_while_it_waits_for_the_run_leaves_it_to_the_next(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    config, log = write_config(store, tmp_path, lease_s=8.0), tmp_path / "controller.log"
    store.ledger.lock(0.0)  # by one that is dead
    looks = num_looks(store)
    with controller_of(config, log) as controller:
        # each is one of those that wait out the lease
        await until(lambda: num_looks(store) > looks + 2 or controller.poll() is not None)
        controller.send_signal(signal.SIGTERM)
        await until(lambda: controller.poll() is not None)
    assert (controller.returncode, holder(store)) == (143, b""), log.read_text()


async def test_a_stopped_controller_gives_nobody_up_whom_it_does_not_hear_any_more(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """Whoever watches the run keeps it from ending for longer than a short lease."""
    config, log = write_config(store, tmp_path, lease_s=1.0), tmp_path / "controller.log"
    settings = load_settings(config)
    lost = set[str]()

    async def watch() -> None:
        async with open_channel(str(settings.controller.address), acting_as(settings, Caller.VIEWER).rpc) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            with suppress(RoleCallError):  # the controller ends
                async for message in stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=120):
                    lost.update(worker.lost for worker in message.status.workers)

    with controller_of(config, log) as controller:
        member = Membership(
            acting_as(settings, Caller.REWARD), controller_pb2.ROLE_REWARD, "reward", "1", "127.0.0.1:1", launched=True
        )
        member.start()
        await member.joined()
        watching = asyncio.create_task(watch())
        await until(lambda: holder(store))
        controller.send_signal(signal.SIGTERM)
        await until(lambda: controller.poll() is not None)
        await watching
        member.stop()
    assert lost == {""}, log.read_text()


def write_config(store: StoreUnderTest, folder: Path, **controller: float) -> Path:
    """A run of one prompt, which nobody holds."""
    (folder / "train.jsonl").write_text('{"prompt": "one", "ground_truth": "1"}\n')
    store.ledger.unlock()
    model = write_qwen3(folder / "model")
    own, actor, reward = ({"address": f"127.0.0.1:{free_port()}"} for _ in range(3))
    return write_settings(store, model, folder, controller={**own, **controller}, reward=reward, actor=actor)


@contextmanager
def controller_of(config: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A controller's process, which ends with this."""
    with log.open("w") as out:
        controller = subprocess.Popen(
            [sys.executable, "-m", "services.controller", str(config)], cwd=ROOT, stdout=out, stderr=out
        )
        try:
            yield controller
        finally:
            controller.kill()
            controller.wait(60)


def holder(store: StoreUnderTest) -> bytes:
    """Who holds the run; empty: nobody."""
    (found,) = store.connection.command("HMGET", f"{{rl:{store.run}}}:run", "holder")
    return bytes(found or b"")


def num_looks(store: StoreUnderTest) -> int:
    """Times that somebody has read who holds a run."""
    found: dict[str, dict[str, int]] = store.connection.command("INFO", "commandstats")
    return found.get("cmdstat_hmget", {"calls": 0})["calls"]
