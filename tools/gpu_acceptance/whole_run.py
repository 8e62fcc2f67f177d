"""Check 14: a whole run with actor and reference on the GPU; transformers sample there from what the channel brings.

The actor is killed in its third step.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import SecretStr

from examples.sort_digits import prepare as sort_digits
from rolecall.errors import RoleCallError
from rolecall.launcher.plan import write_config
from rolecall.rpc.callers import Caller
from rolecall.scoring.scores import Item
from rolecall.settings import RunSettings, StoreSection, child_environment, recipe_file
from rolecall.store.connection import connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_sealed
from tests.fixtures_store import StoreUnderTest
from tests.nccl_hosts import as_host
from tests.ports import free_port
from tests.twins.callers import playing
from tests.twins.channel_engine import PolicyEngine
from tests.twins.run import TwinRun, twin_run
from tools.gpu_acceptance.findings import Findings

NUM_STEPS = 5
KILLED_IN = 2
"""The step, from 0, whose sealed batch the actor is given when it dies."""
_SHOWN = (
    "reward/mean",
    "actor/mismatch_mean",
    "actor/mismatch_max",
    "actor/mismatch_kl",
    "publish/time_s",
    "publish/mb_per_s",
)
_RUN_S = 150.0
_POLL_S = 0.02
_END_S = 30.0


class Trainer:
    """A role as a process of its own."""

    def __init__(self, role: str, name: str, config: Path, store_url: str, log: Path) -> None:
        changes = {"ROLECALL_STORE_URL": store_url, "ROLECALL_DIE_WITH_PARENT": str(os.getpid()), **as_host(name)}
        self._command = [sys.executable, "-m", f"services.{role}", str(config), "--name", name]
        self._environment, self._log = child_environment(changes), log
        self.start()

    def start(self) -> None:
        """A new process."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    def check(self) -> None:
        """RuntimeError when it has ended by itself."""
        if self._process.poll() is not None:
            raise RuntimeError(
                f"{self._command[2]} ended with {self._process.returncode}: {self._log.read_text()[-300:]}"
            )

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait(_END_S)


def check_whole_run(found: Findings, folder: Path) -> None:
    """Trains the sort-digits model for a few steps by GRPO with a KL to a reference."""
    os.environ.update(as_host("rollout"))  # before this process's first communicator
    if found.dry:
        torch.set_num_threads(1)  # idle ones would spin on the cores of the other roles
    sort_digits.prepare(folder / "work", 0, num_steps=20 if not found.dry else 4)
    server = EmbeddedStore(folder / "store", "*", 2**31)
    server.start()
    section = StoreSection(url=SecretStr(server.url))
    connection = connect(section)
    ledger = Ledger(connection, "acceptance")
    ledger.lock(0.2)
    store = StoreUnderTest(section, "acceptance", connection, ledger, Rows(connection, "acceptance", 2), [connection])
    try:
        asyncio.run(_run(found, folder, store, server.url))
    finally:
        for opened in store.opened:
            opened.close()
        server.stop()


async def _run(found: Findings, folder: Path, store: StoreUnderTest, url: str) -> None:
    store.ledger.unlock()
    (folder / "run").mkdir()
    async with twin_run(
        store, folder / "run", _settings, score=_share_in_place, **_sections(found, folder / "work")
    ) as run:
        config = write_config(run.settings)
        started = time.monotonic()
        trainers = {
            name: Trainer(role, name, config, url, folder / f"{name}.log")
            for role, name in (("actor", "actor"), ("reference", "ref"))
        }
        device, dtype = (torch.device("cpu"), torch.float32) if found.dry else (torch.device("cuda", 0), torch.bfloat16)
        engine = PolicyEngine(folder / "work" / "model", device, dtype)
        try:
            async with run.rollout("rollout-0", engine=engine), run.controller() as (_, running, _):
                await _kill_in_step(trainers, store, running, found)
                await asyncio.wait_for(running, max(1.0, _RUN_S - (time.monotonic() - started)))
        finally:
            await engine.close()
            for name, trainer in trainers.items():
                await asyncio.to_thread(trainer.kill)
                print(f"--- {name}\n{(folder / f'{name}.log').read_text()[-3000:]}", flush=True)
        found.figure("s", time.monotonic() - started)
        _judge(found, run)


async def _kill_in_step(
    trainers: Mapping[str, Trainer], store: StoreUnderTest, running: "asyncio.Task[None]", found: Findings
) -> None:
    """Kills the actor as soon as the step's batch is sealed, and starts it again."""
    while not running.done():
        try:
            await asyncio.to_thread(read_sealed, store.connection, store.run, KILLED_IN)
        except RoleCallError:  # there is no such batch yet
            for trainer in trainers.values():
                trainer.check()
            await asyncio.sleep(_POLL_S)
            continue
        await asyncio.to_thread(trainers["actor"].kill)
        trainers["actor"].start()
        found.figure("actor killed in step", KILLED_IN + 1)
        return


def _judge(found: Findings, run: TwinRun) -> None:
    steps = run.metrics()
    found.require(f"{len(steps)} steps were reported, not {NUM_STEPS}", len(steps) == NUM_STEPS)
    found.require("a gradient was not finite", all(step["actor/skipped_steps"] == 0 for step in steps))
    # Dry, no answer may be right at all.
    found.require("a gradient was 0", all(step["actor/grad_norm"] > 0 for step in steps), on_device=True)
    counts = Ledger(run.store.connection, run.store.run).counts()
    found.require(
        f"{counts} do not balance", counts.admitted == counts.trained + sum(counts.dropped.values()) + counts.live
    )
    for name in _SHOWN:
        found.figure(name, ", ".join(f"{step[name]:.3g}" for step in steps if name in step))


def _share_in_place(item: Item) -> float:
    """Share of the digits that stand where they belong."""
    return sum(a == b for a, b in zip(item.response_text, item.ground_truth, strict=False)) / max(
        len(item.ground_truth), 1
    )


def _sections(found: Findings, work: Path) -> dict[str, Any]:
    recipe = yaml.safe_load(recipe_file("grpo").read_text())
    # Two roles on one GPU: each has an address, so to the settings they are on machines of their own.
    place: Mapping[str, Any] = {} if found.dry else {"devices": [0]}
    return {
        **recipe,
        "run": {"num_steps": NUM_STEPS},
        "model": {"path": str(work / "model"), "dtype": "float32" if found.dry else "bfloat16"},
        "data": {"train": str(work / "train.jsonl"), "max_prompt_tokens": 40},
        "sampling": {"num_responses": 4, "max_tokens": 8},
        "algorithm": {**recipe["algorithm"], "groups_per_batch": 4, "num_minibatches": 2},
        "actor": {
            "address": f"127.0.0.1:{free_port()}",
            "optimizer": {"learning_rate": 1e-4, "betas": [0.9, 0.99]},
            **place,
            **({"num_threads": 1} if found.dry else {}),
        },
        "references": {"ref": {"address": f"127.0.0.1:{free_port()}", **place}},
        "weights": {"backend": "gloo" if found.dry else "nccl", "bucket_timeout_s": 60.0},
        "controller": {"lease_s": 5.0, "start_timeout_s": 90.0, "stall_timeout_s": 90.0},
    }


def _settings(**sections: Any) -> RunSettings:
    tree: dict[str, Any] = {"reward": {"components": {"digits": {"scorer": {"kind": "exact_match"}}}}}
    tree = {**tree, **sections, "reward": {**tree["reward"], **sections.get("reward", {})}}
    return playing(RunSettings.model_validate(tree), Caller.CONTROLLER)
