"""The scorers in other languages, by the three commands of their READMEs: built from nothing, started, passed through
the conformance kit, and ended.
"""

import json
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
EXAMPLES = ROOT / "examples" / "external_reward"
README_ADDRESS = "127.0.0.1:50070"


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


def commands(name: str) -> list[list[str]]:
    """The commands of a README, as words."""
    lines = (EXAMPLES / name / "README.md").read_text().splitlines()
    return [line.split() for line in lines if line.startswith("    ")]


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_scorer_of_another_language_is_made_and_passes_by_three_commands(name: str, tmp_path: Path) -> None:
    lacks = missing(LANGUAGES[name])
    if lacks:
        pytest.skip(f"no toolchain for {name}: {lacks}")
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(EXAMPLES, tmp_path / "a" / "b", ignore=shutil.ignore_patterns("build", "node_modules"))
    folder, address = tmp_path / "a" / "b" / name, f"127.0.0.1:{free_port()}"
    build, start, kit = commands(name)
    built = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stdout + built.stderr
    server = subprocess.Popen([address if word == README_ADDRESS else word for word in start], cwd=folder)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        assert kit[:2] == ["rolecall", "conformance"]
        words = [address if word == README_ADDRESS else word for word in kit[1:]]
        words += ["--json", "--timeout", "60", "--load-seconds", "0.2", "--drain", str(server.pid)]
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
        assert status["items.expected"] == "passed"
        assert status["calls.health"] == "passed"
        assert server.wait(timeout=20) == 0
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
            server.wait(timeout=20)
