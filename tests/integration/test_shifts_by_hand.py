"""A whole run in shifts on devices of several machines, each role started by hand: without a launcher, with light
engines. A machine here is a folder with a device of its own; run.dir is a link to what they share, or, where the file
system is not shared or keeps its locks to itself, a folder of the machine's.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.launcher.run_dir import prepare_run_dir
from rolecall.lifeline import tied
from rolecall.settings import RunSettings, load_settings
from rolecall.shifts import Post
from rolecall.store.embedded import EmbeddedStore
from tests.chaos.config import write_config
from tests.ports import free_port
from tests.twins.device import OVERFLOW, REFERENCE, TwinDevice
from tests.waiting import until

NUM_STEPS = 6
RUN_S = 200.0


def write_run(folder: Path, *, num_replicas: int = 0, launched: Sequence[str] = ()) -> Path:
    """Writes the file of a run in shifts whose roles all have addresses but for those that are `launched`."""
    config = write_config(folder, seed=1, num_steps=NUM_STEPS, max_staleness=0, lease_s=10.0, hang_s=60.0)
    tree: dict[str, Any] = yaml.safe_load(config.read_text())
    del tree["reward"]["components"]["outside"]
    sections = {name: tree[name] for name in ("reward", "actor", "critic", "controller")} | tree["references"]
    for name in sections.keys() - set(launched):
        sections[name]["address"] = f"127.0.0.1:{free_port()}"
    tree["references"]["ref"]["offload"] = True
    tree["rollout"] |= {"num_replicas": num_replicas, "sleep_mode": True}
    config.write_text(yaml.safe_dump(tree))
    return config


class Machine:
    """The roles of one machine, by name; its folder has their logs and the device."""

    def __init__(self, folder: Path, run_dir: Path | None) -> None:
        """`run_dir`: the one that it shares with others; None: it has its own."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        if run_dir is not None:
            (folder / "run").symlink_to(run_dir)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, name: str, config: Path, store_url: str = "") -> None:
        """Starts a role, which finds the store in the run directory, or by its URL."""
        words = [f"tests.chaos.roles.{role}", str(config), "--name", name, "--run.dir", str(self.folder / "run")]
        self.run(name, *words, ROLECALL_STORE_URL=store_url)

    def run(self, name: str, *words: str, **environment: str) -> None:
        """Starts a Python module."""
        command = tied([sys.executable, "-m", *words])
        with (self.folder / f"{name}.log").open("w") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        self._processes[name] = started

    def code(self, name: str) -> int | None:
        """The exit code of a role; None while it lives."""
        return self._processes[name].poll()

    def said(self, name: str) -> str:
        """What a role said so far."""
        return (self.folder / f"{name}.log").read_text()

    def end(self) -> None:
        """Kills all that still live."""
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(400)
async def test_roles_of_several_machines_take_shifts_without_a_launcher(tmp_path: Path) -> None:
    config = write_run(tmp_path / "shared")
    settings = load_settings(config)
    os.close(prepare_run_dir(settings, resume=False))
    store = EmbeddedStore(settings.run.dir / "store", settings.run.name, settings.store.max_bytes)
    one, two = (Machine(tmp_path / name, settings.run.dir) for name in ("one", "two"))
    apart = Machine(tmp_path / "apart", None)
    other = TwinDevice(two.folder / "device", "other", 2**40)
    other.hold("memory", REFERENCE)  # it has room for the reference, or for the rollout
    try:
        store.start()
        apart.start("rollout", "rollout-2", config, store.url_of("rollout"))
        for machine, role, name in (
            (one, "actor", "actor"),
            (two, "rollout", "rollout-1"),
            (two, "reference", "ref"),
            (one, "critic", "critic"),
            (one, "rollout", "rollout-0"),
            (one, "reward", "reward"),
            (one, "controller", "controller"),
        ):
            machine.start(role, name, config)
        await until(lambda: one.code("controller") is not None, RUN_S)
        await until(lambda: "waiting for a controller" in apart.said("rollout-2"))
        assert apart.code("rollout-2") is None, apart.said("rollout-2")
    finally:
        other.close()
        for machine in (one, two, apart):
            machine.end()
        store.stop()
    assert one.code("controller") == 0, one.said("controller")
    check_shifts(settings, one, two)
    assert not (apart.folder / "device").exists(), "it never loaded"


@pytest.mark.timeout(400)
async def test_a_launcher_starts_what_the_file_gives_no_address_beside_roles_that_wait_for_it(tmp_path: Path) -> None:
    config = write_run(tmp_path / "one", num_replicas=1, launched=("controller", "reward", "critic"))
    settings = load_settings(config)
    one, two = Machine(tmp_path / "one", None), Machine(tmp_path / "two", settings.run.dir)
    try:
        two.run("waiting", "tests.integration.test_shifts_by_hand", str(settings.run.dir))
        await until(lambda: "waiting for a controller" in two.said("waiting"))
        one.run("train", "tests.chaos.launch", str(config))
        resolved = settings.run.dir / "config.yaml"
        await until(lambda: resolved.is_file() and (settings.run.dir / "store" / "url.controller").is_file())
        for machine, role, name in (
            (one, "actor", "actor"),
            (two, "reference", "ref"),
            (two, "rollout", "rollout-1"),
        ):
            machine.start(role, name, resolved)
        await until(lambda: one.code("train") is not None, RUN_S)
        await until(lambda: two.code("waiting") is not None)
    finally:
        for machine in (one, two):
            machine.end()
    assert (one.code("train"), two.code("waiting")) == (0, 0), one.said("train")
    check_shifts(settings, one, two)


def check_shifts(settings: RunSettings, one: Machine, two: Machine) -> None:
    """Checks that every step had its shifts, and that no device had two sides."""
    metrics = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in metrics if "shift/to_training_s" in step] == list(range(1, NUM_STEPS + 1))
    assert "version" in two.said("rollout-1"), "it sampled, too"
    assert [path for machine in (one, two) if (path := machine.folder / "device" / OVERFLOW).exists()] == []


if __name__ == "__main__":  # a role that was there before its run
    logging.basicConfig(level=logging.INFO)
    asyncio.run(Post(Path(sys.argv[1]), "trainers").wait_until_due())
