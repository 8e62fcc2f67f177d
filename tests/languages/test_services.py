"""The scorers and environments in other languages, by the three commands of their READMEs: built from nothing, started,
passed through the conformance kit, and ended.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.ports import free_port

pytestmark = pytest.mark.languages
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Contract:
    """The examples of a contract."""

    folder: str
    address: str
    """Where the READMEs serve them."""
    options: tuple[str, ...]
    """Options of the kit that the READMEs leave out; PID is the server's process."""
    seen: tuple[str, ...]
    """Rules that must not be skipped."""


CONTRACTS = {
    "scorer": Contract(
        "external_reward",
        "127.0.0.1:50070",
        ("--timeout", "60", "--load-seconds", "0.2", "--drain", "PID"),
        ("items.expected", "calls.health"),
    ),
    "environment": Contract(
        "environment",
        "127.0.0.1:50080",
        (),
        (
            "calls.health",
            "describe.deterministic",
            "reset.task",
            "reward.end",
            "session.lease",
            "step.kept",
            "session.reaped",
        ),
    ),
}


@dataclass(frozen=True)
class Language:
    """What a language needs on the machine."""

    programs: tuple[str, ...]
    probe: tuple[str, ...]
    """A command that succeeds where its gRPC library is."""


LANGUAGES = {
    "cpp": Language(("g++", "make", "protoc", "grpc_cpp_plugin", "pkg-config"), ("pkg-config", "--exists", "grpc++")),
    "go": Language(
        ("go", "make", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        ("test", "-d", "/usr/share/gocode/src/google.golang.org/grpc"),
    ),
    "node": Language(("node", "npm"), ("node", "--version")),
}


def missing(language: Language) -> str | None:
    """What of a toolchain is not on this machine; None when all is."""
    absent = [program for program in language.programs if shutil.which(program) is None]
    if absent:
        return f"without {', '.join(absent)}"
    probe = subprocess.run(language.probe, capture_output=True, timeout=60)
    return None if probe.returncode == 0 else f"`{' '.join(language.probe)}` fails"


def commands(folder: Path) -> list[list[str]]:
    """The commands of a README, as words."""
    lines = (folder / "README.md").read_text().splitlines()
    return [line.split() for line in lines if line.startswith("    ")]


@pytest.mark.parametrize(
    ("what", "name"),
    [*(("scorer", name) for name in LANGUAGES), *(("environment", name) for name in ("go", "node"))],
)
def test_a_service_of_another_language_is_made_and_passes_by_three_commands(
    what: str, name: str, tmp_path: Path
) -> None:
    lacks = missing(LANGUAGES[name])
    if lacks:
        pytest.skip(f"no toolchain for {name}: {lacks}")
    contract = CONTRACTS[what]
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    examples = tmp_path / "a" / "b"
    shutil.copytree(EXAMPLES / contract.folder, examples, ignore=shutil.ignore_patterns("build", "node_modules"))
    folder, address = examples / name, f"127.0.0.1:{free_port()}"
    build, start, kit = commands(folder)
    built = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stdout + built.stderr
    server = subprocess.Popen(
        [address if word == contract.address else word for word in start],
        cwd=folder,
        env={**os.environ, "LEASE_S": "2"},
    )
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        assert kit[:2] == ["rolecall", "conformance"]
        words = [address if word == contract.address else word for word in kit[1:]]
        words += ["--json", *(str(server.pid) if word == "PID" else word for word in contract.options)]
        said = subprocess.run(
            [sys.executable, "-m", "rolecall", *words],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert said.returncode == 0, said.stdout + said.stderr
        status = {rule["name"]: rule["status"] for rule in json.loads(said.stdout)["rules"]}
        assert {rule: status[rule] for rule in contract.seen} == dict.fromkeys(contract.seen, "passed")
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) == 0
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
            server.wait(timeout=20)
