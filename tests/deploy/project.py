"""A Compose project of its own for a test: brought up, looked at from this machine as people do, and taken down."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "compose"
ROLLOUT_S = 240.0
"""A container of vLLM starts, loads weights and serves, on a busy machine of two cores."""


class Project:
    """One project; `folder` is for what this machine keeps of it."""

    def __init__(self, name: str, folder: Path, port: int, **run: object) -> None:
        """run: keys of the section `run` that differ from the example's."""
        self.name, self.folder, self.port = name, folder, port
        tree = yaml.safe_load((FOLDER / "run.yaml").read_text())
        tree["run"] |= run
        self._file = folder / "run.yaml"
        self._file.write_text(yaml.safe_dump(tree))

    def compose(self, *words: str, check: bool = True, timeout_s: float = 540) -> subprocess.CompletedProcess[str]:
        """Runs `docker compose WORDS` on the project."""
        environment = {**os.environ, "ROLECALL_PORT": str(self.port), "ROLECALL_RUN": str(self._file)}
        command = ["docker", "compose", "--project-name", self.name, *words]
        ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=timeout_s, env=environment)
        assert ended.returncode == 0 or not check, f"{' '.join(words)}: {ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return ended

    def containers(self, service: str, *, ended: bool = False) -> list[dict[str, Any]]:
        """What the engine says of the containers of a service, in the order of their numbers."""
        words = ["ps", "--format", "json", *(["--all"] if ended else []), service]
        rows = [json.loads(line) for line in self.compose(*words).stdout.splitlines() if line.strip()]
        ids = [str(row["ID"]) for row in sorted(rows, key=lambda row: str(row["Name"]))]
        return json.loads(docker("inspect", *ids)) if ids else []

    def kill(self, service: str) -> str:
        """SIGKILLs the first container's processes as a crash would, and returns its id. `docker kill` is no crash: it
        forbids the restart.
        """
        container = self.containers(service)[0]
        os.kill(int(container["State"]["Pid"]), signal.SIGKILL)
        return str(container["Id"])

    def operator(self) -> Path:
        """The folder of the operator's certificate, copied out of its volume."""
        target = self.folder / "operator"
        if not target.exists():
            self.compose("cp", "certificates:/run/rolecall/certificates/operator", str(target))
        return target

    def rolecall(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of this machine's own `rolecall` at the controller of the project."""
        return subprocess.run(self._rolecall(*words), capture_output=True, text=True, timeout=120)

    def watch(self) -> "subprocess.Popen[str]":
        """Starts `rolecall watch` on this machine; it ends with the run."""
        return subprocess.Popen(self._rolecall("watch"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _rolecall(self, *words: str) -> list[str]:
        binary, address = str(ROOT / ".venv" / "bin" / "rolecall"), f"localhost:{self.port}"
        return [binary, words[0], address, "--tls", str(self.operator()), *words[1:]]

    def status(self) -> dict[str, Any] | None:
        """The run as `rolecall status` tells it; None while no controller answers."""
        answer = self.rolecall("status", "--json")
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def step(self) -> int:
        """Steps applied, -1 while no controller answers."""
        status = self.status()
        return -1 if status is None else int(status.get("step", 0))

    def wait(self, what: str, holds: Callable[[], bool], within_s: float = 420.0) -> float:
        """Waits until `holds`, and returns for how long; fails with the last lines of the logs."""
        return wait_for(what, holds, within_s, lambda: self.logs(60))

    def logs(self, lines: int, *services: str) -> str:
        """The last lines of the logs."""
        return self.compose("logs", "--no-color", "--tail", str(lines), *services, check=False).stdout

    def ledger(self) -> str:
        """What `rolecall ledger` says in a container of the project; fails when it does not balance."""
        words = ("run", "--rm", "--no-deps", "-T", "--entrypoint", "rolecall", "controller")
        return self.compose(*words, "ledger", "/etc/rolecall/run.yaml").stdout

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, whether the controller runs or not."""
        target = self.folder / "metrics.jsonl"
        self.compose("cp", "controller:/var/lib/rolecall/run/metrics.jsonl", str(target))
        return [json.loads(line) for line in target.read_text().splitlines()]

    def accuracy(self) -> float:
        """Held-out accuracy at the last evaluation."""
        return float([row for row in self.metrics() if "eval/heldout/accuracy" in row][-1]["eval/heldout/accuracy"])


def wait_for(what: str, holds: Callable[[], bool], within_s: float, told: Callable[[], str]) -> float:
    """Waits until `holds`, and returns for how long; fails with what is `told`."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"{what} not within {within_s:.0f} s:\n{told()}")
        time.sleep(1.0)
    return time.monotonic() - began


def docker(*words: str) -> str:
    """Runs `docker WORDS`."""
    return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=True).stdout


@contextmanager
def project(name: str, folder: Path, port: int, **run: object) -> Iterator[Project]:
    """A project that is gone afterwards, with its volumes."""
    made = Project(name, folder, port, **run)
    made.compose("down", "--volumes", "--timeout", "1")
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "1")
