"""Whole runs with two environments and prompts that are answered once, in one data set: rollouts and environments are
processes, over mutual TLS. Each row is played where it belongs; an environment that SIGKILL ends, and that is away for
a while, delays its own groups alone, and nothing is lost or trained twice.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands.cli import main
from rolecall.scoring.scores import Item, Score
from rolecall.settings import child_environment
from tests.fixtures_store import StoreUnderTest
from tests.integration.episode_roles import NUM_TURNS, worth
from tests.integration.test_episode_kills import saved_settings, tls_of
from tests.ports import free_port
from tests.twins.run import TwinRun, balance, check_trained_once, twin_run
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)
NUM_STEPS, NUM_GROUPS = 8, 6
KINDS = {"game": "steps", "tools": "agent"}


@dataclass
class Processes:
    """The environments and the rollouts of a run."""

    folder: Path
    addresses: dict[str, str] = field(default_factory=lambda: {name: f"127.0.0.1:{free_port()}" for name in KINDS})
    living: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Starts an environment or a rollout."""
        words = ["rollout", str(self.folder / "run.yaml"), "--name", name]
        if name in KINDS:
            own = self.folder / "tls" / f"environment-{name}"
            words = ["environment", self.addresses[name], KINDS[name], str(self.folder / f"{name}.log"), str(own)]
        with (self.folder / f"{name}.out").open("ab") as out:
            self.living[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.episode_roles", *words],
                env=child_environment({"ROLECALL_DIE_WITH_PARENT": "1"}),
                stdout=out,
                stderr=out,
            )

    async def kill(self, name: str) -> None:
        """SIGKILL, and nobody in its place."""
        self.living[name].send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.living.pop(name).wait, 30)

    def played(self, name: str) -> Counter[str]:
        """Lines that an environment wrote."""
        return Counter((self.folder / f"{name}.log").read_text().splitlines())

    def end(self) -> None:
        for process in self.living.values():
            process.kill()
            process.wait(30)


@pytest.fixture
def processes(tmp_path: Path, store: StoreUnderTest) -> Iterator[Processes]:
    running = Processes(tmp_path)
    hosts = [word for name in KINDS for word in ("--host", f"environment-{name}=127.0.0.1")]
    assert main(["certificates", str(tmp_path / "tls"), "--run", store.run, *hosts]) == 0
    rows = [{"prompt": f"{task} {i}", "task": task} for i in range(12) for task in ("game", "maths", "tools")]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        yield running
    finally:
        running.end()


async def test_each_row_is_played_where_it_belongs_and_an_environment_that_dies_delays_its_own_alone(
    store: StoreUnderTest, processes: Processes
) -> None:
    problems: list[str] = []
    num_scored: Counter[str] = Counter()

    def score(item: Item) -> Score:
        """The environment's word on what it played; of the rest the parity of its length."""
        task = item.messages[0].content.split()[0]
        turns = [message for message in item.messages if message.role == "assistant"]
        num_scored[task] += 1
        if task == "maths":
            if item.environment_reward is not None or turns:
                problems.append(f"{task} was played")
            return Score(float(item.num_response_tokens % 2))
        if item.environment_reward != Score(worth(item.response_text)) or len(turns) != NUM_TURNS - 1:
            problems.append(f"{task}: {item.environment_reward} after {len(turns) + 1} turns")
        return item.environment_reward or Score(0.0)

    sections: dict[str, Any] = {
        "run": {"num_steps": NUM_STEPS},
        "rpc": {"tls": tls_of(processes.folder / "tls", "controller")},
        "environments": {
            name: {"address": address, "max_turns": 2 * NUM_TURNS, "when": {"task": name}}
            for name, address in processes.addresses.items()
        },
        "sampling": {"num_responses": 2, "max_tokens": 250},
        "data": {"train": str(processes.folder / "mixed.jsonl"), "max_prompt_tokens": 120},
        "algorithm": {"groups_per_batch": NUM_GROUPS, "max_staleness": 1},
        "rollout": {"max_groups": 4, "generation_timeout_s": 60.0},
    }
    for name in KINDS:
        processes.start(name)
    async with AsyncExitStack() as stack:
        made = twin_run(store, processes.folder, saved_settings(processes.folder), score=score, **sections)
        run: TwinRun = await stack.enter_async_context(made)
        life = await stack.enter_async_context(run.controller())
        for worker in ("rollout-0", "rollout-1"):
            processes.start(worker)
        await life.reaches(2)
        for name in KINDS:
            await processes.kill(name)
            await until(lambda name=name: waiting(run) == {name}, 60)  # type: ignore[misc]
            processes.start(name)
            await life.reaches((await life.status()).step + 2)
        await life.ends()
        _, trained, dropped, _ = balance(run)
        assert (trained, dropped) == (NUM_GROUPS * NUM_STEPS, 0)
        check_trained_once(run.actor.trainer, 2 * trained)
        lines = run.metrics()
    assert problems == []
    for name in KINDS:
        assert {line for line in processes.played(name) if line.startswith("task")} == {f"task {name}"}
        assert sum(line.get(f"episode/{name}/groups", 0) for line in lines) > 0
        assert {line[f"episode/{name}/turns"] for line in lines if f"episode/{name}/turns" in line} == {NUM_TURNS}
    assert min(num_scored.values()) > 0
    assert len(num_scored) == 3


def waiting(run: TwinRun) -> set[str]:
    """What plays the groups that are admitted and not committed."""
    return {group.prompt.environment for group in run.ledger.queued()}
