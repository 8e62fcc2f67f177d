"""Real trainers in processes of their own, started by their command lines as people and clusters start them, which join
a controller of the test's and may be killed there.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import psutil

from rolecall.launcher.plan import ranks_command
from rolecall.settings import child_environment
from rolecall.v1 import controller_pb2
from tests.contract.peer import Peer
from tests.forks import forked_role
from tests.ports import free_port

START_TIMEOUT_S = 300.0
TORCHRUN = "rolecall.training.ranks.torchrun"


class Command(NamedTuple):
    """One outermost process: the words after `python -m`, or the role that is forked and its words."""

    words: Sequence[str]
    role: str = ""
    environment: Mapping[str, str] = {}


class Forked:
    """A forked process, with the members of an asyncio process that are used here."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it lives."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self._process.kill()

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        while (code := self._process.exitcode) is None:
            await asyncio.sleep(0.02)
        return code


def ranks_together(config: Path, num_ranks: int, *overrides: str, role: str = "actor") -> list[Command]:
    """A trainer of `num_ranks` ranks on one machine: under a torchrun where there are several."""
    words = [str(config), f"--{role}.num_ranks", str(num_ranks), *overrides]
    if num_ranks == 1:
        return [Command(words, role)]
    _python, _, _, *torchrun = ranks_command(num_ranks, [f"services.{role}", *words])
    return [Command(torchrun)]


def ranks_alone(config: Path, num_ranks: int, *overrides: str) -> list[Command]:
    """An actor whose ranks nobody sees end: each is on a machine of its own as far as it knows."""
    place = {"WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(free_port())
    words = [str(config), "--actor.num_ranks", str(num_ranks), *overrides]
    return [Command(words, "actor", place | {"RANK": str(rank)}) for rank in range(num_ranks)]


def nodes(config: Path, addresses: Sequence[str], *overrides: str) -> list[Command]:
    """An actor of a rank on each node, with a torchrun of its own at this address; the first is the leader."""
    port, number = free_port(), len(addresses)
    words = ["-m", "services.actor", str(config), "--actor.num_ranks", str(number), *overrides]
    return [
        Command(
            [
                *(TORCHRUN, f"--nnodes={number}", "--nproc-per-node=1", f"--node-rank={index}"),
                *(f"--local-addr={address}", f"--master-addr={addresses[0]}", f"--master-port={port}", *words),
            ]
        )
        for index, address in enumerate(addresses)
    ]


@dataclass
class TrainerProcesses:
    """The outermost processes of one trainer, each in a session of its own."""

    role: str
    logs: list[Path]
    processes: list[asyncio.subprocess.Process | Forked] = field(default_factory=list)
    join: controller_pb2.JoinRequest = field(default_factory=controller_pb2.JoinRequest)
    """What the trainer said of itself to the controller; empty before."""
    ranks: list[psutil.Process] = field(default_factory=list)
    """The ranks of the first outermost process, in their order, once it has joined."""

    async def joined(self, peer: Peer, num_joins: int) -> None:
        """Returns when the controller has heard of it, after `num_joins` others."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(peer.joins) == num_joins:
                assert all(process.returncode is None for process in self.processes), self.said()
                await asyncio.sleep(0.05)
        own = psutil.Process(self.processes[0].pid)
        ranks = [child for child in own.children() if f"services.{self.role}" in child.cmdline()] or [own]
        self.ranks = sorted(ranks, key=lambda rank: rank.environ().get("RANK", "0"))
        self.join = peer.joins[-1]

    async def ended(self, within_s: float) -> None:
        """Waits until the first outermost process and its ranks are gone. One that nobody reaped has ended, too."""
        async with asyncio.timeout(within_s):
            await self.processes[0].wait()
            while any(_lives(rank) for rank in self.ranks):
                await asyncio.sleep(0.05)

    def said(self, index: int = 0) -> str:
        """Returns what one of them, and all that it started, wrote to stdout and stderr."""
        return self.logs[index].read_text(errors="replace")


@asynccontextmanager
async def started(config: Path, commands: Sequence[Command], role: str = "actor") -> AsyncIterator[TrainerProcesses]:
    """Starts a trainer's processes, the first last, and kills their sessions whole at the end."""
    number = len(list(config.parent.glob(f"{role}-*.log")))
    trainer = TrainerProcesses(role, [config.parent / f"{role}-{number + index}.log" for index in range(len(commands))])
    try:
        for command, log in reversed(list(zip(commands, trainer.logs, strict=True))):
            trainer.processes.insert(0, await _start(command, log))
        yield trainer
    finally:
        for process in trainer.processes:
            for kill in (partial(os.killpg, process.pid, signal.SIGKILL), process.kill):
                with suppress(ProcessLookupError):  # it has ended, or has no session of its own yet
                    kill()
            await process.wait()


@asynccontextmanager
async def joined(
    peer: Peer, config: Path, commands: Sequence[Command], role: str = "actor"
) -> AsyncIterator[TrainerProcesses]:
    """Starts a trainer that has joined `peer`."""
    num_joins = len(peer.joins)
    async with started(config, commands, role) as trainer:
        await trainer.joined(peer, num_joins)
        yield trainer


async def _start(command: Command, log: Path) -> "asyncio.subprocess.Process | Forked":
    if command.role:
        return Forked(forked_role(command.role, log, command.environment, *command.words))
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ROLECALL_DIE_WITH_PARENT": "1"}
    words, environment = (sys.executable, "-m", *command.words), child_environment({**threads, **command.environment})
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *words, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _lives(rank: psutil.Process) -> bool:
    try:
        return bool(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
