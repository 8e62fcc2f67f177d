"""Processes that an engine spawns end with the rollout, or the model server, from the first moment of the engine's
start, however that ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rolecall.settings import child_environment
from tests.fixtures_store import StoreUnderTest
from tests.smallest import judged
from tests.twins.launched import wait_until_gone, write_light_config

ENGINE = '''"""An engine whose core is spawned at once and takes for ever to start."""
import multiprocessing, sys, time
from vllm import core
if "--multiprocessing-fork" not in sys.orig_argv:
    multiprocessing.get_context("spawn").Process(target=core.start, args=({told!r},)).start()
    time.sleep(600)
'''
CORE = """import os, time
from pathlib import Path
def start(told):
    Path(told).write_text(str(os.getpid()))
    time.sleep(600)
"""
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 30.0


@pytest.mark.parametrize("role", ["rollout", "model_server"])
def test_an_engine_that_is_still_starting_dies_with_its_killed_role(
    tmp_path: Path, store: StoreUnderTest, role: str
) -> None:
    package, told = tmp_path / "packages" / "vllm", tmp_path / "core.pid"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ENGINE.format(told=str(told)))
    (package / "core.py").write_text(CORE)
    assert store.section.url is not None
    environment = child_environment(
        {"PYTHONPATH": str(package.parent), "ROLECALL_STORE_URL": store.section.url.get_secret_value()}
    )
    command = [sys.executable, "-m", f"services.{role}", str(write_light_config(tmp_path)), "--name", "grader"]
    if role == "model_server":
        command += [f"--reward.{key}={json.dumps(value)}" for key, value in judged(bind="127.0.0.1:1").items()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not told.exists() or not told.read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        assert int(told.read_text()) in {each.pid for each in below}
        process.kill()
        process.wait(timeout=30)
        assert wait_until_gone(below, END_TIMEOUT_S) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
