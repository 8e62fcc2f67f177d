"""A rubric of the real package verifiers, in an environment of its own, through the conformance kit."""

import json
import os
import signal
import subprocess
import sys

import grpc
import pytest

from tests.languages.test_services import EXAMPLES, ROOT, commands
from tests.ports import free_port

pytestmark = pytest.mark.languages
VERIFIERS = os.environ.get("VERIFIERS")
"""The Python of a virtual environment with what the README's first command installs; RoleCall itself is this tree."""
FOLDER = EXAMPLES / "external_reward" / "verifiers"


def test_a_rubric_of_verifiers_keeps_the_contract_and_its_failures_are_no_numbers() -> None:
    if VERIFIERS is None:
        pytest.skip("no verifiers: install it in an environment of its own and name its Python by VERIFIERS")
    address = f"127.0.0.1:{free_port()}"
    _, start, kit = commands(FOLDER)
    server = subprocess.Popen(
        [VERIFIERS, *start[1:-1], address], cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=120)
        words = [address if word == start[-1] else word for word in kit[1:]]
        words += ["--json", "--timeout", "60", "--load-seconds", "0.2", "--drain", str(server.pid)]
        said = subprocess.run(
            [sys.executable, "-m", "rolecall", *words],
            cwd=FOLDER,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert said.returncode == 0, said.stdout + said.stderr
        status = {rule["name"]: rule["status"] for rule in json.loads(said.stdout)["rules"]}
        seen = ("items.expected", "reward.components", "item.ground_truth", "calls.health", "calls.drain")
        assert {rule: status[rule] for rule in seen} == dict.fromkeys(seen, "passed")
        assert server.wait(timeout=60) == 0
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
            server.wait(timeout=20)
