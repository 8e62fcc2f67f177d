"""Whole runs in an environment over mutual TLS whose rollouts and environment are processes that SIGKILL ends with
sessions open: nothing is lost, trained twice or answered to another turn, no failure becomes a reward, and in the end
every place of the environment is free.
"""

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.conformance.environment.describing import filled
from rolecall.conformance.environment.rows import own_rows
from rolecall.conformance.environment.session import EnvironmentSession
from rolecall.conformance.peer import Peer
from rolecall.rpc.callers import Caller
from rolecall.scoring.scores import Item, Score
from rolecall.settings import RunSettings, child_environment
from tests.fixtures_store import StoreUnderTest
from tests.integration.episode_roles import NUM_TURNS, heard, worth
from tests.ports import free_port
from tests.smallest import smallest_tree
from tests.twins.callers import playing
from tests.twins.run import Life, TwinRun, balance, check_trained_once, twin_run
from tests.waiting import until

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(400)
NUM_STEPS = 14


@dataclass
class Processes:
    """The environment and the rollouts of a run."""

    folder: Path
    kind: str
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    living: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    open_at_kills: list[int] = field(default_factory=list)

    @property
    def tls(self) -> Path:
        return self.folder / "tls"

    @property
    def log(self) -> Path:
        return self.folder / "environment.log"

    @property
    def num_open(self) -> int:
        """Sessions of the environment since it was started last."""
        lines = self.log.read_text().splitlines()
        return lines.count("begun") - lines.count("closed")

    def start(self, name: str) -> None:
        """Starts "environment" or a rollout."""
        words = ["rollout", str(self.folder / "run.yaml"), "--name", name]
        if name == "environment":
            self.log.write_text("")
            words = [name, self.address, self.kind, str(self.log), str(self.tls / "environment-game")]
        with (self.folder / f"{name}.out").open("ab") as out:
            self.living[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.episode_roles", *words],
                env=child_environment({"ROLECALL_DIE_WITH_PARENT": "1"}),
                stdout=out,
                stderr=out,
            )

    async def kill(self, name: str) -> None:
        """SIGKILL while sessions are open, and another in its place."""
        await until(lambda: self.num_open > 0)
        self.open_at_kills.append(self.num_open)
        self.living[name].send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.living.pop(name).wait, 30)
        self.start(name)

    def end(self) -> None:
        for process in self.living.values():
            process.kill()
            process.wait(30)


@pytest.fixture(params=["steps", "agent"])
def processes(request: pytest.FixtureRequest, tmp_path: Path, store: StoreUnderTest) -> Iterator[Processes]:
    running = Processes(tmp_path, request.param)
    assert main(["certificates", str(running.tls), "--run", store.run, "--host", "environment-game=127.0.0.1"]) == 0
    try:
        yield running
    finally:
        running.end()


def saved_settings(folder: Path) -> Callable[..., RunSettings]:
    """Makes the controller's settings, and a file of the same for the rollouts' processes."""

    def make(**sections: Any) -> RunSettings:
        tree = smallest_tree(folder, **sections)
        (folder / "run.yaml").write_text(yaml.safe_dump({**tree, "rpc": {"tls": tls_of(folder / "tls", "rollout")}}))
        return playing(RunSettings.model_validate(tree, context={"base": folder}), Caller.CONTROLLER)

    return make


def tls_of(folder: Path, role: str) -> dict[str, str]:
    own = folder / role
    files = {"certificate_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
    return {name: str(own / file) for name, file in files.items()}


async def all_places_are_free(processes: Processes) -> None:
    """Opens every one at once."""
    roots = (processes.tls / "environment-game" / "ca.crt").read_bytes()
    peer = Peer(processes.address, grpc.ssl_channel_credentials(roots))
    session = EnvironmentSession(peer, own_rows())
    try:
        await session.open()
        assert session.spec.max_sessions == 16
        assert await filled(session) is None
    finally:
        await session.close()


async def test_kills_with_sessions_open_lose_nothing_and_leave_no_session(
    store: StoreUnderTest, processes: Processes
) -> None:
    problems: list[str] = []

    def score(item: Item) -> Score:
        """The environment's word, held to what was said."""
        said = [message.content for message in item.messages]
        turns = [message.content for message in item.messages if message.role == "assistant"]
        told = [word for turn, text in enumerate(turns, 1) for word in (text, heard(turn, text))]
        if len(turns) != NUM_TURNS - 1 or said[-len(told) :] != told:
            problems.append(f"shifted: {said}")
        if item.environment_reward is None or item.environment_reward.value != worth(item.response_text):
            problems.append(f"{item.response_text!r} earned {item.environment_reward}")
        return item.environment_reward or Score(0.0)

    sections: dict[str, Any] = {
        "run": {"num_steps": NUM_STEPS},
        "rpc": {"tls": tls_of(processes.tls, "controller")},
        "environments": {"game": {"address": processes.address, "max_turns": 2 * NUM_TURNS}},
        "sampling": {"num_responses": 2, "max_tokens": 250},
        "data": {"max_prompt_tokens": 120},
        "rollout": {"max_groups": 4, "generation_timeout_s": 60.0},
    }
    processes.start("environment")
    async with AsyncExitStack() as stack:
        made = twin_run(store, processes.folder, saved_settings(processes.folder), score=score, **sections)
        run: TwinRun = await stack.enter_async_context(made)
        life = await stack.enter_async_context(run.controller())
        for worker in ("rollout-0", "rollout-1"):
            processes.start(worker)
        await killed(processes, life)
        await life.ends()
        await until(lambda: processes.num_open == 0)
        await all_places_are_free(processes)
        admitted, trained, dropped, live = balance(run)
        assert (trained, dropped) == (4 * NUM_STEPS, 0)
        check_trained_once(run.actor.trainer, 2 * trained)
    assert problems == []
    logger.info(
        "%s: %d kills with %s sessions open; %d groups admitted, %d trained, %d live",
        *(processes.kind, len(processes.open_at_kills), processes.open_at_kills, admitted, trained, live),
    )


async def killed(processes: Processes, life: Life) -> None:
    """A kill of each process after every other step."""
    step = 1
    for name in 2 * ("rollout-0", "environment", "rollout-1"):
        await life.reaches(step)
        await processes.kill(name)
        step += 2
