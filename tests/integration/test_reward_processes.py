"""Reward over real connections between processes: the example scorer, and the reward service in front of it, started as
people start them.
"""

import asyncio
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2

from rolecall.reward import SERVICE_NAME
from rolecall.rpc.channel import open_channel
from rolecall.rpc.role_process import RESTART
from rolecall.scoring.client import open_client
from rolecall.scoring.scores import Failure, Score
from rolecall.settings import RpcSection, load_settings
from rolecall.v1 import controller_pb2, reward_pb2
from tests.contract import peer
from tests.contract.reward_peers import Liar, client_of, items_of, serving
from tests.ports import free_port
from tests.twins.callers import place
from tests.waiting import until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "external_reward"


class Process:
    """A process whose log is read until it says where it serves."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._up = threading.Event()
        self._address = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    async def address(self) -> str:
        """Where it serves, once it does."""
        await asyncio.to_thread(self._up.wait, 60)
        assert self._address, "".join(self.lines)
        return self._address

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        code = self.process.wait(timeout=20)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"serves .*on (\S+:\d+)$", line.strip())
            if found:
                self._address = found.group(1)
                self._up.set()
        self._up.set()


StartProcess = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[StartProcess]:
    started: list[Process] = []

    def start_one(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield start_one
    for process in started:
        process.end()


def write_run(folder: Path, reward: dict[str, Any], **sections: Any) -> Path:
    """A configuration of a run with this reward section, and with the tokens of this process."""
    if not (folder / "run").exists():
        place(folder / "run")
    tree: dict[str, Any] = {
        "run": {"name": "test", "dir": "run", "num_steps": 1},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "algorithm": {"groups_per_batch": 1},
        "reward": {"bind": "127.0.0.1:0", **reward},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree | sections))
    return path


async def health_of(address: str) -> int:
    """Health of the RewardService at `address`, waiting for somebody to listen there."""
    encode, decode = health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    async with open_channel(address, RpcSection()) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", encode, decode)
        response = await check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=30, wait_for_ready=True)
    return int(response.status)


async def test_the_example_scores_over_a_real_connection(start: StartProcess) -> None:
    example = start(str(EXAMPLE / "scorer.py"), "127.0.0.1:0")
    address = await example.address()
    assert await health_of(address) == health_pb2.HealthCheckResponse.SERVING
    async with client_of(address) as client:
        spec = await client.describe()
        outcomes = await client.score(items_of("to be or", "be", "", truth="to be"))
        (broken,) = await client.score(items_of("to be"))
    assert (spec.name, spec.reward.min, spec.reward.max) == ("words", 0.0, 1.0)
    assert outcomes == [Score(1.0), Score(0.5), Score(0.0)]
    assert isinstance(broken, Failure)
    assert "ZeroDivisionError" in broken.message


async def test_a_group_of_64_long_responses_with_their_ids_is_compared(start: StartProcess, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(items): return [float(len(items))] * len(items)")
    scorer = {"kind": "function", "target": "mine:score", "scope": "group"}
    reward = {"components": {"mine": {"scorer": scorer, "timeout_s": 60}}}
    config = write_run(tmp_path, reward)
    address = await start("-m", "services.reward", str(config)).address()
    items = [
        reward_pb2.ScoreItem(
            id=f"7/{i}",
            group="7",
            response_text="word" * 32768,
            response_token_ids=bytes(4 * 32768),
            num_response_tokens=32768,
        )
        for i in range(64)
    ]
    client, channel = open_client(load_settings(config).reward, address, RpcSection())
    async with channel:
        assert await client.score(items) == [Score(64.0, {"mine": 64.0})] * 64


async def test_the_reward_service_puts_the_example_beside_its_own(start: StartProcess, tmp_path: Path) -> None:
    example = start(str(EXAMPLE / "scorer.py"), "127.0.0.1:0")
    reward = yaml.safe_load((EXAMPLE / "run.yaml").read_text())["reward"]
    reward["components"]["words"]["scorer"]["address"] = await example.address()
    service = start("-m", "services.reward", str(write_run(tmp_path, reward)))
    address = await service.address()
    assert await health_of(address) == health_pb2.HealthCheckResponse.SERVING
    async with client_of(address) as client:
        outcomes = await client.score(items_of("to be", "be", truth="to be"))
    assert outcomes == [
        Score(1.0, {"words": 1.0, "correct": 1.0}, answer="to be"),
        Score(0.25, {"words": 0.5, "correct": 0.0}, answer="be"),
    ]


async def test_the_service_joins_its_run_and_leaves_no_process(start: StartProcess, tmp_path: Path) -> None:
    controller = peer.Peer()
    async with peer.serving(controller) as (_, controller_address):
        path = write_run(
            tmp_path,
            {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
            controller={"address": controller_address},
        )
        service = start("-m", "services.reward", str(path))
        address = await service.address()
        await until(lambda: len(controller.beats) >= 3)
        workers = psutil.Process(service.process.pid).children()
        code = await asyncio.to_thread(service.end)
    (join,) = controller.joins
    assert (join.role, join.worker, join.address) == (controller_pb2.ROLE_REWARD, "reward", address)
    assert len(workers) == 2
    assert code == 0
    assert controller.beats[-1].leaving
    assert not psutil.wait_procs(workers, timeout=30)[1]


async def test_the_service_says_which_scorer_gives_no_scores_in_place_of_serving(
    start: StartProcess, tmp_path: Path
) -> None:
    controller = peer.Peer()

    async def heard(phase: str) -> None:
        await until(lambda: controller.beats and controller.beats[-1].phase == phase)

    async with peer.serving(controller) as (_, controller_address):
        external = f"127.0.0.1:{free_port()}"
        async with serving(Liar(), bind=external):
            words = {"scorer": {"kind": "external", "address": external}, "timeout_s": 1.0, "max_attempts": 1}
            path = write_run(tmp_path, {"components": {"words": words}}, controller={"address": controller_address})
            address = await start("-m", "services.reward", str(path)).address()
            await heard("serving")
        async with client_of(address, timeout_s=30.0) as client:
            (failure,) = await client.score(items_of("a"))
            assert isinstance(failure, Failure)
            await heard(f"no scores from words at {external}")
            async with serving(Liar(), bind=external):
                async with asyncio.timeout(60):
                    while await client.score(items_of("a")) != [Score(0.5, {"words": 0.5})]:
                        await asyncio.sleep(0.1)
                await heard("serving")


async def test_the_service_says_which_function_hangs_while_no_call_is_answered(
    start: StartProcess, tmp_path: Path
) -> None:
    controller = peer.Peer()
    (tmp_path / "slow.py").write_text("import time\n\n\ndef score(item):\n    time.sleep(100)\n")
    slow = {"scorer": {"kind": "function", "target": "slow:score"}, "timeout_s": 0.5, "max_attempts": 50}
    async with peer.serving(controller) as (_, controller_address):
        path = write_run(tmp_path, {"components": {"slow": slow}}, controller={"address": controller_address})
        address = await start("-m", "services.reward", str(path)).address()
        async with client_of(address, timeout_s=100.0) as client:
            scoring = asyncio.create_task(client.score(items_of("a")))
            said = "no scores from slow (slow:score took longer than reward.components.slow.timeout_s = 0.5 s)"
            await until(lambda: controller.beats and controller.beats[-1].phase == said)
            assert not scoring.done()
            scoring.cancel()


async def test_scores_go_on_when_workers_are_killed_at_any_instant(start: StartProcess, tmp_path: Path) -> None:
    path = write_run(tmp_path, {"components": {"correct": {"scorer": {"kind": "exact_match"}, "max_attempts": 5}}})
    service = start("-m", "services.reward", str(path))
    address = await service.address()
    scored = asyncio.Event()

    async def kill_now_and_then() -> None:
        """A worker a batch, however long a new one takes to start: five in a row would be too many for an item."""
        delays_s = random.Random(5)
        while True:
            await asyncio.sleep(delays_s.uniform(0.0, 0.3))
            for worker in psutil.Process(service.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGKILL)
                scored.clear()
                await scored.wait()

    killer = asyncio.ensure_future(kill_now_and_then())
    try:
        async with client_of(address, timeout_s=60.0) as client:
            for _ in range(5):
                outcomes = await client.score(items_of(*["42"] * 200, truth="42"))
                assert [outcome for outcome in outcomes if not isinstance(outcome, Score)] == []
                scored.set()
                await asyncio.sleep(0.2)
    finally:
        killer.cancel()
        with suppress(asyncio.CancelledError):
            await killer


def test_a_component_that_cannot_start_is_said_in_one_line(start: StartProcess, tmp_path: Path) -> None:
    path = write_run(tmp_path, {"components": {"mine": {"scorer": {"kind": "function", "target": "absent:f"}}}})
    service = start("-m", "services.reward", str(path))
    assert service.process.wait(timeout=60) == 1
    service.end()
    assert (
        "component 'mine' cannot start: the scorer's target 'absent:f': there is no module 'absent'"
        in service.lines[-1]
    )
    assert not any("Traceback" in line for line in service.lines)


def test_a_service_whose_scoring_process_is_killed_at_the_start_asks_to_be_started_again(
    start: StartProcess, tmp_path: Path
) -> None:
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    path = write_run(tmp_path, {"components": {"mine": {"scorer": {"kind": "function", "target": "killed:score"}}}})
    service = start("-m", "services.reward", str(path))
    assert service.process.wait(timeout=60) == RESTART
    service.end()
    assert "exit status -9" in service.lines[-1]


def test_the_light_parts_stay_light() -> None:
    imports = "import services.reward.dispatcher, services.reward.service, services.reward.worker, rolecall.reward, sys"
    program = f"{imports}; print({{'torch', 'transformers', 'sympy', 'vllm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


async def test_the_service_is_not_serving_before_its_scorers_are(start: StartProcess, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    (tmp_path / "slow_to_import.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\ndef score(item): return 1.0\n"
    )
    scorer = {"kind": "function", "target": "slow_to_import:score"}
    path = write_run(tmp_path, {"bind": f"unix:{tmp_path / 's'}", "components": {"mine": {"scorer": scorer}}})
    start("-m", "services.reward", str(path))
    seen: list[int] = []
    async with asyncio.timeout(60):
        while not seen or seen[-1] != health_pb2.HealthCheckResponse.SERVING:
            seen.append(await health_of(f"unix:{tmp_path / 's'}"))
            go_on.touch()
            await asyncio.sleep(0.05)
    assert seen[0] == health_pb2.HealthCheckResponse.NOT_SERVING
