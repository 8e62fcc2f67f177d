"""The launcher over roles that end, hang and fall silent: what is started again, when, how often, and what people are
told. The roles are fakes.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from rolecall.launcher.run_record import read_record
from rolecall.settings import StoreSection, child_environment, store_url_file
from rolecall.store.connection import connect
from rolecall.trackers.tracker import END_FILE, ID_FILE
from tests.smallest import smallest_tree

ROOT = Path(__file__).parents[2]
NAMES = {"controller", "actor", "reward", "rollout-0", "store"}
DEADLINE_S = 200.0


@dataclass
class Launch:
    """One `rolecall train` over fake roles, from outside."""

    folder: Path
    said: list[str] = field(default_factory=list)
    process: "subprocess.Popen[str] | None" = None

    def start(self, trackers: dict[str, Any] | None = None, **launcher: float) -> "Launch":
        """Starts it and waits until every role is up. Back-offs are short unless `launcher` says otherwise."""
        tree = smallest_tree(
            self.folder,
            run={"name": "fake", "dir": "run", "num_steps": 9},
            model={"path": str(self.folder)},  # nobody loads one
            launcher={"backoff_s": 0.05, **launcher},
            trackers=trackers or {},
        )
        (self.folder / "train.jsonl").touch()
        config = self.folder / "fake.yaml"
        config.write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "tests.integration.fake_roles", str(config)]
        environment = child_environment({"PYTHONPATH": str(ROOT)})
        log = (self.folder / "said").open("w")
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, text=True)
        log.close()
        self.until(lambda: self.pids().keys() >= NAMES and all(self.is_up(name) for name in NAMES - {"store"}))
        return self

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def output(self) -> str:
        return (self.folder / "said").read_text()

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert self.process is not None
            assert self.process.poll() is None or condition(), self.output()
            time.sleep(0.02)

    def entries(self) -> dict[str, dict[str, Any]]:
        file = self.run_dir / "processes.json"
        listed = json.loads(file.read_text())["processes"] if file.exists() else []
        return {entry["name"]: entry for entry in listed}

    def pids(self) -> dict[str, int]:
        return {name: entry["pid"] for name, entry in self.entries().items()}

    def starts(self, name: str) -> int:
        return int(self.entries()[name]["start"]) if name in self.entries() else -1

    def is_up(self, name: str) -> bool:
        log = self.run_dir / "logs" / f"{name}.log"
        return log.exists() and f"is up as {self.entries()[name]['incarnation']}" in log.read_text()

    def signal(self, name: str, number: signal.Signals) -> int:
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def tell_to_end(self, name: str, code: int, *, always: bool = False) -> None:
        file = self.run_dir / f"exit-{name}"
        file.with_suffix(".new").write_text(f"{code} {'always' if always else ''}")
        file.with_suffix(".new").rename(file)

    def report(self, **status: Any) -> None:
        """What the controller says from now on."""
        file = self.run_dir / "status.json"
        file.with_suffix(".new").write_text(
            json.dumps({"run": "fake", "state": "RUN_STATE_RUNNING", "totalSteps": 9, **status})
        )
        file.with_suffix(".new").rename(file)

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    if launch.process is not None and launch.process.poll() is None:
        launch.process.kill()
        launch.process.wait(30)


@pytest.mark.thorough("test_a_controller_that_does_not_answer_is_killed_and_started_again")
def test_a_worker_that_hangs_before_it_joins_is_replaced_as_soon_as_its_starts_are_known(launch: Launch) -> None:
    launch.start()
    launch.report(step=1, workers=[{"worker": "reward", "incarnation": launch.entries()["reward"]["incarnation"]}])
    launch.until(lambda: "step 1/9" in launch.output())  # only then has the launcher heard that it joined
    launch.report(step=1)
    os.kill(launch.pids()["reward"], signal.SIGKILL)
    launch.until(lambda: launch.starts("reward") == 1)
    launch.until(lambda: launch.starts("reward") == 2)  # three times what its first start took, and at least 15 s
    assert re.search(r"reward had not joined the controller after \d+ s and was killed", launch.output())


def test_a_killed_role_is_started_again_under_its_name_with_a_new_incarnation_and_the_same_log(launch: Launch) -> None:
    launch.start()
    before = launch.entries()["rollout-0"]
    launch.signal("rollout-0", signal.SIGKILL)
    launch.until(lambda: launch.starts("rollout-0") == 1 and launch.is_up("rollout-0"))
    assert "rollout-0 was killed by SIGKILL; starting it again in 0.05 s (1 of 5 without a step)" in launch.output()
    assert launch.entries()["rollout-0"]["incarnation"] != before["incarnation"]
    assert (launch.run_dir / "logs" / "rollout-0.log").read_text().count("=== started rollout-0") == 2
    assert {name: launch.starts(name) for name in NAMES} == {name: int(name == "rollout-0") for name in NAMES}


@pytest.mark.parametrize("code", [0, 75, 3])
def test_a_role_that_ends_by_itself_is_started_again_whatever_it_says_but_final(launch: Launch, code: int) -> None:
    launch.start()
    launch.tell_to_end("reward", code)
    launch.until(lambda: launch.starts("reward") == 1)
    assert f"reward ended with exit code {code} (reward failed: told to end); starting it again" in launch.output()


@pytest.mark.parametrize("code", [1, 2])
def test_a_final_error_ends_the_run_without_a_restart(launch: Launch, code: int) -> None:
    launch.start()
    launch.tell_to_end("reward", code)
    assert launch.end() == 1
    assert f"reward ended with exit code {code}" in launch.output()
    assert "told to end" in launch.output()
    assert "starting it again" not in launch.output()
    assert not (launch.run_dir / "checkpoints").exists(), "nothing was trained yet"


def test_a_spent_budget_ends_the_run_with_a_checkpoint_and_the_role_s_last_words(launch: Launch) -> None:
    launch.start(max_restarts=2)
    launch.report(step=3)
    launch.until(lambda: "step 3/9" in launch.output())
    launch.tell_to_end("reward", 75, always=True)
    assert launch.end() == 1
    output = launch.output()
    assert re.findall(r"starting it again in (\S+) s \((\d) of 2", output) == [("0.05", "1"), ("0.1", "2")]
    assert "after 2 restarts without a step in between (launcher.max_restarts): giving up" in output
    assert "reward failed: told to end" in output.partition("giving up")[2]
    assert "logs/reward.log" in output
    assert "there is a checkpoint of step 3; --resume goes on from it" in output
    assert (launch.run_dir / "told_of").read_text() in output
    assert "reward ended with exit code 75" in (launch.run_dir / "told_of").read_text()


ENDED = """
import pathlib

class Ended:
    def __init__(self, run, path): self.run, self.path = run, pathlib.Path(path)
    def log(self, step, values): pass
    def keep_samples(self, step, samples): pass
    def close(self): pass
    def end(self, how):
        with self.path.open("a") as file: file.write(f"{self.run.id} {how.name}\\n")
"""


@pytest.mark.parametrize(("last_told", "told"), [(None, "abcd FAILED"), ("GOES_ON", "abcd FAILED"), ("DONE", "")])
def test_trackers_are_told_that_a_run_failed_whose_controller_is_given_up(
    launch: Launch, last_told: str | None, told: str
) -> None:
    (launch.folder / "ended.py").write_text(ENDED)
    file = launch.folder / "told"
    custom = {"function": f"{launch.folder}/ended:Ended", "options": {"path": str(file)}}
    launch.start({"tensorboard": False, "custom": custom}, max_restarts=0)
    (launch.run_dir / ID_FILE).write_text("abcd\n")  # as the controller, which is a fake, would have left it
    if last_told is not None:
        (launch.run_dir / END_FILE).write_text(f"{last_told}\n")
    launch.signal("controller", signal.SIGKILL)
    assert launch.end() == 1
    assert (file.read_text() if file.exists() else "").strip() == told


def test_without_an_actor_there_is_no_checkpoint_and_it_says_so(launch: Launch) -> None:
    launch.start(max_restarts=0)
    launch.report(step=3)
    launch.until(lambda: "step 3/9" in launch.output())
    launch.signal("actor", signal.SIGKILL)
    assert launch.end() == 1
    assert (
        "no checkpoint of step 3 could be saved, the last is of step 0; --resume goes on from the store"
        in launch.output()
    )
    assert "actor" in (launch.run_dir / "told_of").read_text(), "the controller shows that the run failed"


def test_an_applied_step_renews_the_budget(launch: Launch) -> None:
    launch.start(max_restarts=1)
    for step in (1, 2, 3):
        launch.report(step=step)
        launch.until(lambda step=step: f"step {step}/9" in launch.output())  # type: ignore[misc]
        launch.signal("rollout-0", signal.SIGKILL)
        launch.until(lambda step=step: launch.starts("rollout-0") == step)  # type: ignore[misc]


def test_a_worker_that_the_controller_gives_up_is_killed_though_it_is_stopped_and_only_for_its_own_sins(
    launch: Launch,
) -> None:
    launch.start()
    launch.signal("rollout-0", signal.SIGSTOP)
    lost = {"worker": "rollout-0", "lost": "no progress for 15 s"}
    launch.report(step=1, workers=[{**lost, "incarnation": "00000000"}])
    launch.until(lambda: "step 1/9" in launch.output())
    assert launch.starts("rollout-0") == 0, "that report is about an earlier process"
    incarnation = launch.entries()["rollout-0"]["incarnation"]
    launch.report(step=1, workers=[{**lost, "incarnation": incarnation}])
    launch.until(lambda: launch.starts("rollout-0") == 1)
    assert (
        "rollout-0 was given up by the controller (no progress for 15 s) and killed; starting it again"
        in launch.output()
    )
    launch.report(step=2, workers=[{**lost, "incarnation": incarnation}])
    launch.until(lambda: "step 2/9" in launch.output())
    assert launch.starts("rollout-0") == 1, "the report stands until the next incarnation joins"


def test_a_killed_store_is_started_again_with_what_it_held_at_the_same_url(launch: Launch) -> None:
    launch.start()
    file = store_url_file(launch.run_dir, "controller")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    url = file.read_text()
    connection = connect(StoreSection(url=SecretStr(url)))
    connection.command("SET", "{rl:fake}:x", "kept")
    launch.signal("store", signal.SIGKILL)
    launch.until(lambda: launch.starts("store") == 1)
    assert connection.command("GET", "{rl:fake}:x") == b"kept"
    connection.close()
    assert file.read_text() == url
    assert "the store ended; starting it again" in launch.output()


@pytest.mark.thorough("test_a_controller_that_does_not_answer_is_killed_and_started_again")
def test_a_store_that_does_not_answer_is_killed_and_started_again(launch: Launch) -> None:
    launch.start()
    launch.signal("store", signal.SIGSTOP)
    launch.until(lambda: launch.starts("store") == 1)
    assert "the store did not answer for 5 s and was killed; starting it again" in launch.output()
    connection = connect(StoreSection(url=SecretStr(store_url_file(launch.run_dir, "controller").read_text())))
    connection.command("SET", "{rl:fake}:x", "1")
    connection.close()


def test_a_killed_controller_is_started_again_and_followed(launch: Launch) -> None:
    launch.start()
    launch.signal("controller", signal.SIGKILL)
    launch.until(lambda: launch.starts("controller") == 1 and launch.is_up("controller"))
    launch.report(step=4)
    launch.until(lambda: "step 4/9" in launch.output())


def test_a_controller_that_has_no_stream_left_for_its_launcher_is_asked_again_and_again(launch: Launch) -> None:
    """Each machine of a large fleet has a launcher that watches."""
    launch.start()
    (launch.run_dir / "crowded").touch()

    def heard_step() -> int:
        record = read_record(launch.run_dir)
        return record.status.step if record else 0

    for step in (3, 4):
        launch.report(step=step)
        launch.until(lambda step=step: heard_step() == step)  # type: ignore[misc]


def test_a_controller_that_does_not_answer_is_killed_and_started_again(launch: Launch) -> None:
    launch.start()
    launch.report(step=1)
    launch.until(lambda: "step 1/9" in launch.output())
    launch.signal("controller", signal.SIGSTOP)
    launch.until(lambda: launch.starts("controller") == 1)
    assert "controller did not answer for 10 s and was killed; starting it again" in launch.output()


def test_a_failed_controller_is_started_again_when_its_exit_code_says_that_this_may_help(launch: Launch) -> None:
    launch.start()
    launch.report(step=2, state="RUN_STATE_FAILED", error="the store was away")
    launch.until(lambda: "failed   step 2/9" in launch.output())
    launch.tell_to_end("controller", 75)
    launch.until(lambda: launch.starts("controller") == 1)
    launch.report(step=3)
    launch.until(lambda: "running  step 3/9" in launch.output())


def test_the_run_ends_well_when_its_controller_does_and_leaves_no_list_and_no_url(launch: Launch) -> None:
    launch.start()
    launch.tell_to_end("controller", 0)
    assert launch.end() == 0
    assert not (launch.run_dir / "processes.json").exists()
    assert not store_url_file(launch.run_dir, "controller").exists()


def test_a_controller_that_fails_for_good_ends_the_run(launch: Launch) -> None:
    launch.start()
    launch.tell_to_end("controller", 1)
    assert launch.end() == 1
    assert "controller failed: told to end" in launch.output()


def test_ctrl_c_ends_the_run_while_a_role_waits_to_be_started_again(launch: Launch) -> None:
    launch.start(backoff_s=20.0)
    launch.signal("reward", signal.SIGKILL)
    launch.until(lambda: "starting it again in 20 s" in launch.output())
    pids = launch.pids()
    assert launch.process is not None
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == 130
    assert [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()] == []
