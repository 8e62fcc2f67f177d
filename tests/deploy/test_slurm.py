"""The batch script of Slurm: roles are on the nodes that have their GPUs, addresses and certificates name these nodes,
and the script itself keeps what it promises, with a small stand-in for Slurm's commands. Where a Slurm answers, a run
trains on it to its end.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.settings import load_settings
from tests.deploy.project import ROOT
from tests.ports import free_port

RUN: dict[str, Any] = {
    "run": {"name": "sort-digits", "dir": "run", "num_steps": 20},
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 40},
    "sampling": {"num_responses": 8, "max_tokens": 8},
    "algorithm": {"groups_per_batch": 32},
    "reward": {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
    "store": {"max_bytes": 2**28},
}
IN_SHIFTS: dict[str, Any] = {"sleep_mode": True, "num_replicas": 4, "tensor_parallel_size": 4}
HAS_SLURM = shutil.which("sbatch") and subprocess.run(["sinfo"], capture_output=True, timeout=30).returncode == 0


def written(folder: Path, **sections: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The script and the run's file that `rolecall manifests` makes in `folder`/out of a run with other sections."""
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(RUN | sections))
    assert main(["manifests", str(file), "--to", "slurm", "--out", str(folder / "out")]) == 0
    script = (folder / "out" / "run.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    return script, yaml.safe_load((folder / "out" / "run.yaml").read_text())


def roles_of(script: str) -> dict[str, tuple[int, list[str]]]:
    """Node and command by the name of each role that the script starts."""
    found = re.findall(r"^role (?!store)(.*)$", script.replace("\\\n", ""), re.MULTILINE)
    return {name: (int(node), command) for _, name, node, *command in map(shlex.split, found)}


def test_the_store_has_the_bytes_that_its_roles_count_on(tmp_path: Path) -> None:
    """They find its URL in their environment, and would derive none."""
    large = {"store": {}, "algorithm": {"groups_per_batch": 4096}, "sampling": {"num_responses": 8, "max_tokens": 4096}}
    script, run = written(tmp_path, **large)
    assert run["store"]["max_bytes"] > 2 * 2**30
    assert f"{-(-run['store']['max_bytes'] // 2**20)}mb" in script
    assert "max_bytes" not in written(tmp_path, store={})[1]["store"]


def test_roles_with_the_same_gpus_are_on_different_nodes_and_others_share_one(tmp_path: Path) -> None:
    script, run = written(
        tmp_path,
        actor={"devices": [0, 1, 2, 3], "num_ranks": 8},
        critic={"devices": [4, 5], "num_ranks": 2},
        references={"a": {"devices": [4]}, "b": {"devices": [6, 7], "num_ranks": 4}},
        algorithm={
            **RUN["algorithm"],
            "advantage": {"kind": "gae"},
            "distillation": {"teacher": "b", "task_coef": 1.0},
            "kl": {"reference": "a", "kl_coef": 0.1},
        },
        rollout={"num_replicas": 3, "devices": [[0, 1], [2, 3], [0, 1]], "tensor_parallel_size": 2},
    )
    roles = roles_of(script)
    assert {name: node for name, (node, _) in roles.items()} == {
        "controller": 0,
        "reward": 0,
        "actor": 0,
        "actor.1": 1,
        "critic": 0,
        "a": 1,
        "b": 0,
        "b.1": 1,
        "rollout-0": 2,
        "rollout-1": 2,
        "rollout-2": 3,
    }
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert run["actor"]["devices"] == [0, 1, 2, 3]
    assert run["rollout"]["devices"] == [[0, 1], [2, 3], [0, 1]]
    assert run["references"]["a"]["address"].startswith("NODE_1:")
    assert run["weights"]["host"] == "NODE_0"
    bound = [run[name]["bind"] for name in ("controller", "reward", "actor", "critic")]
    bound += [section["bind"] for section in run["references"].values()]
    assert len(set(bound)) == 6
    assert "CUDA_VISIBLE_DEVICES=4,5" in roles["critic"][1]
    for rank, name in enumerate(("actor", "actor.1")):
        ranks = {"--nnodes=2", "--nproc-per-node=4", f"--node-rank={rank}"}
        meeting = {f"--local-addr=${{NODES[{rank}]}}", "--master-addr=${NODES[0]}"}
        assert ranks | meeting <= set(roles[name][1])
    ports = {word for _, command in roles.values() for word in command if word.startswith("--master-port")}
    assert len(ports) == 3
    assert '--host "reference=${NODES[1]}" --host "reference=${NODES[0]}"' in script


def test_trainers_and_rollouts_that_take_shifts_have_the_same_gpus_of_the_same_nodes(tmp_path: Path) -> None:
    eight = list(range(8))
    script, run = written(
        tmp_path,
        actor={"devices": eight, "num_ranks": 16},
        critic={"devices": eight, "num_ranks": 16},
        references={"a": {"devices": [0, 1, 2, 3], "num_ranks": 4}, "b": {"devices": [8, 9], "num_ranks": 2}},
        algorithm={
            **RUN["algorithm"],
            "advantage": {"kind": "gae"},
            "distillation": {"teacher": "b", "task_coef": 1.0},
            "kl": {"reference": "a", "kl_coef": 0.1},
        },
        rollout=IN_SHIFTS | {"devices": [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]},
    )
    assert {name: node for name, (node, _) in roles_of(script).items()} == {
        "controller": 0,
        "reward": 0,
        "actor": 0,
        "actor.1": 1,
        "critic": 0,
        "critic.1": 1,
        "a": 0,
        "b": 0,
        "rollout-0": 0,
        "rollout-1": 1,
        "rollout-2": 0,
        "rollout-3": 1,
    }
    assert "#SBATCH --nodes=2\n" in script
    assert run["weights"]["host"] == "NODE_0"
    settings = load_settings(tmp_path / "out" / "run.yaml")
    assert settings.takes_shifts
    assert settings.references_in_shifts == ("a",), "the other has GPUs of its own"


def test_a_role_that_computes_on_processors_has_a_node_of_its_own(tmp_path: Path) -> None:
    script, _ = written(tmp_path, rollout={"num_replicas": 2}, actor={"num_ranks": 2})
    nodes = {name: node for name, (node, _) in roles_of(script).items()}
    assert nodes == {"controller": 0, "reward": 0, "actor": 0, "rollout-0": 1, "rollout-1": 2}
    assert "#SBATCH --gpus" not in script


def test_paths_are_written_in_full_and_certificates_lie_beside_the_job_s_own_copy(tmp_path: Path) -> None:
    _, run = written(tmp_path)
    assert run["run"]["dir"] == str(tmp_path / "run")
    assert run["data"]["train"] == str(tmp_path / "train.jsonl")
    assert run["reward"]["search_path"] == str(tmp_path)
    assert run["rpc"]["tls"]["ca_file"] == "tls/{role}/ca.crt"
    load_settings(tmp_path / "out" / "run.yaml")


def test_each_role_shows_its_numbers_on_a_port_of_its_own(tmp_path: Path) -> None:
    tls = {"certificate_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
    script, _ = written(tmp_path, telemetry={"metrics_bind": "0.0.0.0:9464"}, rpc={"tls": tls})
    shown = {command[-1] for _, command in roles_of(script).values()}
    assert shown == {f"0.0.0.0:{port}" for port in range(9464, 9468)}


@pytest.mark.parametrize(
    ("section", "keys", "told"),
    [
        ("actor", {"address": "elsewhere:9001"}, "actor.address: the job has its own actor"),
        ("rpc", {"behind_mesh": True}, "rpc.behind_mesh: the roles of a job of Slurm have no sidecars"),
        ("rollout", {"devices": [[0]], "num_replicas": 2}, "rollout.devices has 1 entries, rollout.num_replicas is 2"),
        ("rollout", {"devices": [[0]], "sleep_mode": True}, "actor.devices is [], and those of rollout.devices are"),
        ("rollout", {"sleep_mode": True}, "rollout.sleep_mode: vLLM gives memory up on GPUs only"),
        ("environments", {"a": {"address": "localhost:1"}}, "environments.a.address localhost:1 is each rollout's own"),
        ("rollout", {"endpoint_bind": "0.0.0.0:2"}, "rollout.endpoint_bind: rollouts of a job share nodes"),
    ],
)
def test_a_run_that_an_allocation_could_not_hold_is_refused(
    section: str, keys: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    played: dict[str, Any] = {"environments": {"game": {"address": "games:1"}}}
    file.write_text(yaml.safe_dump(RUN | (played if "endpoint_bind" in keys else {}) | {section: keys}))
    assert main(["manifests", str(file), "--to", "slurm", "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rollouts_that_do_not_divide_the_actor_s_nodes_among_themselves_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {"actor": {"devices": [0, 1, 2, 3, 4, 5], "num_ranks": 12}}
    pairs = {"sleep_mode": True, "num_replicas": 6, "tensor_parallel_size": 2}
    ring = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0]]
    script, _ = written(tmp_path, **sections, rollout={**pairs, "devices": ring})
    assert [roles_of(script)[f"rollout-{i}"][0] for i in range(6)] == [0, 1] * 3
    file, devices = tmp_path / "mine.yaml", [ring[0], ring[3], ring[1], ring[2], ring[4], ring[5]]
    file.write_text(yaml.safe_dump(RUN | sections | {"rollout": {**pairs, "devices": devices}}))
    assert main(["manifests", str(file), "--to", "slurm", "--out", str(tmp_path / "other")]) == 2
    assert "rollout.devices[3] [2, 3]: on each of the actor's 2 nodes" in capsys.readouterr().err


COMMANDS = {
    "scontrol": "case $1 in show) printf 'localhost\\nlocalhost\\n' ;; *) echo $* > queued; exit 1 ;; esac",
    # a role ends by the codes that a test gives it, one a start, and goes on after them until the run is stopped
    "srun": """exec > /dev/null
        name=$(sed 's/.*--job-name=//; s/ .*//' <<< "$*")
        echo "$name $ROLECALL_STORE_URL_FILE $*" >> started
        code=$(sed -n "$(grep -c "^$name " started)p" "codes/$name" 2> /dev/null)
        [ -z "$code" ] || exit "$code"
        [ "$name" != store ] || exec python3 -c "$LISTEN"
        until [ -e stopped ] || [ -e over ] || [ $SECONDS -gt 150 ]; do
            sleep 0.1
            [ "$name" != controller ] || ! grep -qs " controller" killed || exit 137
        done""",
    "rolecall": """case $1 in
        stop) touch stopped ;;
        store-acl) mkdir -p "$3/actor" && touch "$3/actor/store-url" ;;
        ledger) echo balanced ;;
        health) [ ! -e hangs ] || code=1 ;;
        esac
        echo "$*" >> asked
        exit ${code:-0}""",
    "squeue": """case $* in
        *--steps*) echo "7.5 reward"
            for name in controller store; do echo "$name.$(grep -c "^$name " started) $name"; done ;;
        *) [ -e cancelled ] && echo COMPLETING || echo RUNNING ;;
        esac""",
    "scancel": "echo $* >> killed",
    "valkey-server": "",
}
"""What stands for Slurm, for `rolecall` and its roles on the script's PATH."""
LISTEN = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", PORT))
server.settimeout(0.1)
while not os.path.exists("over"):
    if os.path.exists("killed") and "store" in open("killed").read():
        sys.exit(137)
    try:
        connection, _ = server.accept()
        if not os.path.exists("deaf"):
            connection.sendall(b"-NOAUTH Authentication required." + bytes([13, 10]))
    except OSError:
        pass
"""
"""A store that refuses whoever connects, and hangs while there is a file `deaf`."""


class Job:
    """A script at work in a folder, among small commands that stand for those that it calls."""

    def __init__(self, folder: Path, **codes: str) -> None:
        """codes: how the first starts of roles end, by name with _ for -."""
        script, _ = written(folder, launcher={"max_restarts": 2})
        self._folder, port = folder / "out", str(free_port())
        (self._folder / "bin").mkdir()
        (self._folder / "codes").mkdir()
        for name, text in COMMANDS.items():
            file = self._folder / "bin" / name
            file.write_text(f"#!/bin/bash\n{text}\n")
            file.chmod(0o755)
        for name, those in codes.items():
            (self._folder / "codes" / name.replace("_", "-")).write_text(those.replace(" ", "\n"))
        environment = {
            "PATH": f"{self._folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(self._folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_CPUS_ON_NODE": "2",
            "LISTEN": LISTEN.replace("PORT", port),
        }
        for asked, here in (("28000", port), ("ASK_S=30", "ASK_S=1"), ("timeout 60", "timeout 5")):
            script = script.replace(asked, here)
        command = ["bash", "-c", script.replace("STORE_TLS=yes", "STORE_TLS=no")]
        with (self._folder / "said").open("w") as said:
            self.process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)

    def lines(self, file: str) -> list[str]:
        """What a command noted."""
        path = self._folder / file
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, name: str) -> int:
        """Starts of a role so far."""
        return sum(line.startswith(f"{name} ") for line in self.lines("started"))

    def said(self) -> str:
        """What the script said so far."""
        return (self._folder / "said").read_text()

    def end(self) -> tuple[int, str]:
        """Waits for the script's end; its exit code and what it said."""
        try:
            self.process.wait(timeout=120)
        finally:
            self.process.kill()
            (self._folder / "over").touch()
        return self.process.returncode, self.said()


def wait(what: str, holds: Callable[[], object], timeout_s: float) -> None:
    """Waits until it holds."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.2)


def test_the_job_ends_with_the_run_and_says_whether_the_ledger_balances(tmp_path: Path) -> None:
    job = Job(tmp_path, controller="0", reward="0", actor="0", rollout_0="0")
    code, said = job.end()
    assert code == 0, said
    assert said.endswith("balanced\n")
    assert job.lines("queued") == []
    url_files = {line.split()[0]: line.split()[1] for line in job.lines("started") if "store-url" in line.split()[1]}
    assert url_files == {"actor": str(tmp_path / "out/job/store-users/actor/store-url")}
    run = (tmp_path / "out/job/run.yaml").read_text()
    assert "NODE_" not in run
    assert "localhost:28001" in run


def test_a_role_is_started_again_by_its_exit_code_as_often_as_the_launcher_does(tmp_path: Path) -> None:
    job = Job(tmp_path, rollout_0="75", actor="137 75 143")
    wait("the third end of the actor", lambda: job.starts("actor") == 3, 60)
    code, said = job.end()
    assert code == 143, said
    assert "actor ended with 75; starting it again in 2 s (2 of 2 without a step)" in said
    assert "actor ended with 143 for good" in said
    assert job.starts("rollout-0") == 2
    assert any(line.startswith("stop ") and line.endswith("--checkpoint") for line in job.lines("asked"))


@pytest.mark.parametrize("code", [1, 2])
def test_a_role_that_is_refused_is_not_started_again_and_ends_the_job(tmp_path: Path, code: int) -> None:
    job = Job(tmp_path, reward=str(code))
    assert job.end()[0] == code
    assert (job.starts("reward"), job.lines("queued")) == (1, [])


def test_a_controller_that_answers_no_more_is_killed_and_started_again(tmp_path: Path) -> None:
    job, folder = Job(tmp_path), tmp_path / "out"
    wait("an answer", lambda: any(line.startswith("health ") for line in job.lines("asked")), 60)
    (folder / "hangs").touch()
    wait("the kill", lambda: job.lines("killed"), 60)
    assert job.lines("killed") == ["--signal=KILL controller.1"]
    (folder / "hangs").unlink()
    wait("the end of its first life", lambda: "controller ended with 137; starting it again" in job.said(), 60)
    (folder / "killed").unlink()
    wait("its second life", lambda: job.starts("controller") == 2, 60)
    answers = len(job.lines("asked"))
    wait("more answers", lambda: len(job.lines("asked")) > answers + 7, 60)
    assert job.lines("killed") == []
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 0


def test_a_store_that_answers_no_more_is_killed_and_started_again(tmp_path: Path) -> None:
    job, folder = Job(tmp_path), tmp_path / "out"
    wait("more questions than a store may leave unanswered", lambda: len(job.lines("asked")) > 12, 60)
    assert job.lines("killed") == []
    (folder / "deaf").touch()
    wait("the kill", lambda: job.lines("killed"), 120)
    assert job.lines("killed") == ["--signal=KILL store.1"]
    assert "the store does not answer; killing it" in job.said()
    (folder / "deaf").unlink()
    wait("its end", lambda: "store ended with 137; starting it again" in job.said(), 60)
    (folder / "killed").unlink()
    wait("its second life", lambda: job.starts("store") == 2, 60)
    assert job.starts("controller") == 1
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 0


def test_before_the_time_limit_the_run_stops_with_a_checkpoint_and_the_job_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    wait("the rollout", lambda: job.starts("rollout-0"), 60)
    job.process.send_signal(signal.SIGTERM)
    code, said = job.end()
    assert code == 0, said
    assert any(line.startswith("stop ") and line.endswith("--checkpoint") for line in job.lines("asked"))
    assert job.lines("queued") == ["requeue 7"]


def test_a_job_that_is_cancelled_is_not_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    wait("the rollout", lambda: job.starts("rollout-0"), 60)
    (tmp_path / "out/cancelled").touch()
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 2
    assert not any(line.startswith("stop ") for line in job.lines("asked"))
    assert job.lines("queued") == []


def test_a_store_without_tls_is_not_taken_for_one_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "out/job/logs").mkdir(parents=True)
    (tmp_path / "out/job/logs/store.log").write_text("# Failed finding TLS support.\n")
    code, said = Job(tmp_path, store="1").end()
    assert code == 2
    assert "was built without TLS; name another as STORE_SERVER, or say STORE_TLS=no" in said


class Slurm:
    """A run of the example on the Slurm of this machine."""

    def __init__(self, folder: Path, task: Path, **run: object) -> None:
        tree = RUN | {
            "run": {**RUN["run"], "name": folder.name, "dir": str(folder / "run"), "checkpoint_every_steps": 5, **run},
            "model": {"path": str(task / "model"), "dtype": "float32"},
            "data": {"train": str(task / "train.jsonl"), "max_prompt_tokens": 40},
            "evaluation": {"every_steps": 10, "sets": {"heldout": {"path": str(task / "heldout.jsonl")}}},
            "actor": {"optimizer": {"learning_rate": 1.0e-4, "betas": [0.9, 0.99]}},
            "rollout": {"kv_cache_bytes": 2**28},
        }
        tree["algorithm"] = {**RUN["algorithm"], "num_minibatches": 2}
        self.folder = folder / "out"
        (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
        assert main(["manifests", str(folder / "mine.yaml"), "--to", "slurm", "--out", str(self.folder)]) == 0
        script = self.folder / "run.sbatch"
        script.write_text(script.read_text().replace("ASK_S=30", "ASK_S=5"))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["sbatch", "--parsable", "run.sbatch"]
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        self.job = subprocess.check_output(command, cwd=self.folder, env=environment, text=True, timeout=60).strip()

    def shown(self, field: str) -> str:
        """What Slurm says of the job."""
        said = subprocess.check_output(["scontrol", "show", "job", "-o", self.job], text=True, timeout=60)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)[field]

    def metrics(self, key: str) -> list[float]:
        """The values of a metric so far."""
        file = self.folder.parent / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row[key] for row in rows if key in row]

    def said(self) -> str:
        """The job's output."""
        return (self.folder / f"slurm-{self.job}.out").read_text()

    def end(self) -> None:
        """Waits for the job's end, which is to be that of the run."""
        wait("the end", lambda: self.shown("JobState") not in ("PENDING", "RUNNING", "COMPLETING"), 1200)
        assert (self.shown("JobState"), self.shown("ExitCode")) == ("COMPLETED", "0:0"), self.said()

    def cancel(self, *options: str) -> None:
        """Signals the job."""
        subprocess.run(["scancel", *options, self.job], check=True, timeout=60)


on_slurm = pytest.mark.skipif(not HAS_SLURM, reason="no Slurm answers (sinfo); this needs one of two nodes")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the example."""
    folder = tmp_path_factory.mktemp("task")
    prepare = ROOT / "examples" / "sort_digits" / "prepare.py"
    subprocess.run([sys.executable, str(prepare), str(folder)], check=True, timeout=600)
    return folder


@on_slurm
@pytest.mark.timeout(3000)
def test_a_run_is_queued_again_before_its_time_is_over_and_trains_to_its_end(tmp_path: Path, task: Path) -> None:
    run = Slurm(tmp_path, task)
    try:
        wait("step 5", lambda: len(run.metrics("actor/loss")) >= 5, 900)
        run.cancel("--batch", "--signal=TERM")
        wait("the queue", lambda: run.shown("Restarts") == "1", 600)
        stopped_at = max(run.metrics("step"))
        run.end()
    finally:
        run.cancel()
    steps = [step for step in run.metrics("step") if step > 0]
    assert stopped_at < 20
    assert sorted(set(steps)) == list(range(1, 21))
    assert run.metrics("eval/heldout/accuracy")[-1] >= 0.95
    assert run.said().count("balanced") == 2


@on_slurm
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("role", ["controller", "store"])
def test_a_run_whose_controller_or_store_hangs_goes_on_under_another(tmp_path: Path, task: Path, role: str) -> None:
    run = Slurm(tmp_path, task)
    store = str(run.folder / "job" / "store")
    try:
        wait("step 3", lambda: len(run.metrics("actor/loss")) >= 3, 900)
        for process in psutil.process_iter(["name", "cmdline", "cwd"]):
            command, where, is_srun = process.info["cmdline"] or (), process.info["cwd"], process.info["name"] == "srun"
            is_controller = "controller" in command and where == str(run.folder)
            if not is_srun and (is_controller if role == "controller" else where == store):
                process.suspend()
        run.end()
    finally:
        run.cancel()
    assert f"the {role} does not answer; killing it" in run.said()
    assert sorted({step for step in run.metrics("step") if step > 0}) == list(range(1, 21))
    assert "balanced" in run.said()
