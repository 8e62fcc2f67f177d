"""`rolecall train` from the outside, over real processes: how it ends, what it leaves, what it says."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from rolecall.launcher.processes import Processes, Worker
from rolecall.settings import load_settings
from tests.twins.launched import FAILS_IN_A_ROLE, start_train, wait_until_gone, wait_until_up, write_light_config

STOP_LIMIT_S = 100.0
"""Roles that do not end by themselves are killed after 6 s; the rest is a busy machine's."""


def sockets_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    train = start_train(write_light_config(tmp_path))
    processes = wait_until_up(train)
    assert len(processes) >= 3
    assert sockets_below(tmp_path)
    train.send_signal(signal.SIGINT)
    output, _ = train.communicate(timeout=STOP_LIMIT_S)
    assert train.returncode == 130, output
    assert wait_until_gone(processes, STOP_LIMIT_S) == []
    assert sockets_below(tmp_path) == []


def test_sigkill_leaves_no_process_no_socket_and_no_lock(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    train = start_train(config)
    processes = wait_until_up(train)
    train.kill()
    train.communicate(timeout=STOP_LIMIT_S)
    assert wait_until_gone(processes, STOP_LIMIT_S) == []
    assert sockets_below(tmp_path) == []
    # with addresses that are nobody's now
    again = start_train(tmp_path / "run" / "config.yaml", "--resume", under=["nohup"])
    processes = wait_until_up(again)
    again.send_signal(signal.SIGHUP)
    assert len(wait_until_gone(processes, 3.0)) == len(processes), "a terminal that goes stops nothing under nohup"
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=STOP_LIMIT_S)
    assert wait_until_gone(processes, STOP_LIMIT_S) == []


@pytest.mark.thorough("test_sigkill_leaves_no_process_no_socket_and_no_lock")
def test_a_second_launcher_in_the_same_directory_is_refused_with_and_without_resume(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    first = start_train(config)
    wait_until_up(first)
    seconds = [start_train(config), start_train(config, "--resume")]
    outputs = [second.communicate(timeout=STOP_LIMIT_S)[0] for second in seconds]
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=STOP_LIMIT_S)
    assert [second.returncode for second in seconds] == [1, 1]
    assert all(
        f"another `rolecall train`, `sft` or `rewind` works in {tmp_path / 'run'}; stop it first, or name "
        "another run.dir" in output
        for output in outputs
    )


def test_the_first_failure_is_shown_with_its_role_its_last_lines_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_IN_A_ROLE)
    train = start_train(write_light_config(tmp_path, target="mine:score"))
    output, _ = train.communicate(timeout=STOP_LIMIT_S)
    assert train.returncode == 1, output
    assert "reward ended with exit code 1" in output
    assert "no_such_file" in output
    assert str(tmp_path / "run" / "logs" / "reward.log") in output


@pytest.fixture(scope="module")
def under_way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run that goes on."""
    folder = tmp_path_factory.mktemp("light")
    train = start_train(write_light_config(folder))
    try:
        wait_until_up(train)
        yield folder / "run"
    finally:
        train.send_signal(signal.SIGINT)
        train.communicate(timeout=STOP_LIMIT_S)


def test_the_resolved_configuration_is_private_and_holds_no_password(under_way: Path) -> None:
    written = under_way / "config.yaml"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert "url" not in yaml.safe_load(written.read_text())["store"]
    assert load_settings(written).controller.address is not None


def test_a_run_under_way_can_be_asked_paused_and_resumed(under_way: Path) -> None:
    said = {}
    for command in ("status", "pause", "resume"):
        line = [sys.executable, "-m", "rolecall", command, str(under_way)]
        call = subprocess.run(line, capture_output=True, text=True, timeout=STOP_LIMIT_S, check=False)
        said[command] = (call.returncode, call.stdout + call.stderr)
    assert all(code == 0 for code, _ in said.values()), said
    assert "admitted 0 = trained 0 + dropped 0 + live 0" in said["status"][1].replace("\n", " ")


def test_what_a_role_started_ends_with_it(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(600)"
    processes = Processes()
    worker = Worker("reward", "reward", (sys.executable, "-c", parent), {}, tmp_path / "reward.log")
    processes.start(worker)
    deadline = time.monotonic() + STOP_LIMIT_S
    while "up" not in worker.log.read_text().splitlines() and time.monotonic() < deadline:
        time.sleep(0.05)
    role = psutil.Process(processes.running["reward"].process.pid)
    started = [role, *role.children(recursive=True)]
    processes.stop_all()
    assert len(started) == 2
    assert wait_until_gone(started, STOP_LIMIT_S) == []


def test_a_log_that_is_emptied_under_a_role_goes_on_at_its_beginning(tmp_path: Path) -> None:
    says_twice = "print('one', flush=True); input(); print('two', flush=True)"
    to_role = tmp_path / "to_role"
    os.mkfifo(to_role)
    command = (sys.executable, "-c", f"import sys; sys.stdin = open({str(to_role)!r}); {says_twice}")
    processes = Processes()
    worker = Worker("reward", "reward", command, {}, tmp_path / "reward.log")
    try:
        role = processes.start(worker).process
        with to_role.open("w") as line:
            deadline = time.monotonic() + STOP_LIMIT_S
            while "one" not in worker.log.read_text().splitlines() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.truncate(worker.log, 0)  # as logrotate's copytruncate does
            line.write("go on\n")
        assert role.wait(timeout=STOP_LIMIT_S) == 0
        assert worker.log.read_bytes() == b"two\n"
    finally:
        processes.stop_all()


def test_exits_are_told_in_order_with_a_controller_after_those_it_may_fail_of(tmp_path: Path) -> None:
    processes = Processes()
    for name, role in (("controller", "controller"), ("actor", "actor")):
        processes.start(Worker(role, name, (sys.executable, "-c", "raise SystemExit(3)"), {}, tmp_path / f"{name}.log"))
    for start in processes.running.values():
        start.process.wait(timeout=30)
    assert [(start.worker.name, code) for start, code in processes.poll()] == [("actor", 3), ("controller", 3)]
    assert processes.poll() == []
    processes.stop_all()


@pytest.mark.parametrize("word", ["--run.num_steps=zero", "--run.no_such_key=1"])
def test_a_bad_value_exits_with_2_and_starts_nothing(tmp_path: Path, word: str) -> None:
    train = start_train(write_light_config(tmp_path), word)
    output, _ = train.communicate(timeout=STOP_LIMIT_S)
    assert train.returncode == 2
    assert word[2:].split("=")[0] in output
    assert not (tmp_path / "run").exists()
