"""What `rolecall manifests` writes, on a real cluster (`make test-cluster`): it trains and ends, outlives the loss of
each pod, grows and shrinks, says why it failed and goes on, and a trainer on two nodes comes back whole.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.cluster import ClusterRun, cluster_run
from tests.deploy.project import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
START_S = 480.0
"""All pods start, load and take a step, on a cluster of one machine of two cores, and a Job has paused before."""
SMALL = ("--actor.num_ranks=1", "--rollout.num_replicas=1")
ENDLESS = ("--run.num_steps=100000", "--run.checkpoint_every_steps=5")
EVERY_ROLE = (
    "--critic.optimizer.learning_rate=3.0e-4",
    "--references.ref={}",
    "--algorithm.advantage={kind: gae, gamma: 1.0, gae_lambda: 0.95, whiten: true}",
    "--algorithm.kl={reference: ref, kl_coef: 0.02, estimator: k1, placement: reward}",
)
OF_JOBS = ("controller", "actor", "critic")
OTHERS = ("rollout", "reward", "reference", "store")


def tell(line: str) -> None:
    """Shows a figure in the run's output (`-s`)."""
    sys.stdout.write(f"\n{line}\n")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the example."""
    folder = tmp_path_factory.mktemp("job")
    prepare = ROOT / "examples" / "sort_digits" / "prepare.py"
    subprocess.run([sys.executable, str(prepare), str(folder)], check=True, timeout=600)
    return folder


def test_a_run_trains_to_its_end_and_its_jobset_is_done(job: Path, tmp_path: Path) -> None:
    with cluster_run("rolecall-ends", tmp_path, job) as run:
        began = time.monotonic()
        run.apply()
        run.wait("the end of the JobSet", lambda: run.jobset() != "", 2 * START_S)
        assert run.jobset() == "Completed", run.told()
        took_s = time.monotonic() - began
        accuracy = [row for row in run.metrics() if "eval/heldout/accuracy" in row][-1]["eval/heldout/accuracy"]
        tell(f"apply to the end: {took_s:.0f} s, held-out accuracy {accuracy:.3f}")
        assert accuracy >= 0.95


@pytest.fixture(scope="module")
def running(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRun]:
    """A run with every role that would go on for ever."""
    folder = tmp_path_factory.mktemp("running")
    with cluster_run("rolecall-runs", folder, job, *SMALL, *ENDLESS, *EVERY_ROLE) as run:
        run.apply()
        run.wait("the first step", lambda: run.step() >= 1, START_S)
        yield run


def goes_on(run: ClusterRun, role: str, what: str) -> None:
    """Takes the newest pod of a role away, and waits until it is back and for two steps."""
    lost, uid = list(run.ready(role).items())[-1]
    before, began = run.step_now(), time.monotonic()
    is_kept = what == "crashes" and role in OTHERS  # the kubelet starts its container again
    num_restarts = run.restarts(lost)
    {"is deleted": run.delete, "crashes": run.crash, "is evicted": run.evict}[what](lost)

    def is_back() -> bool:
        ready = run.ready(role)
        if is_kept:
            return lost in ready and run.restarts(lost) > num_restarts
        return bool(ready) and uid not in ready.values()

    back_s = run.wait(f"{role} back", is_back, START_S)
    run.wait(f"two steps after {role} {what}", lambda: run.step() >= before + 2, START_S)
    tell(f"| {role} | {what} | back after {back_s:.0f} s | two steps after {time.monotonic() - began:.0f} s |")


@pytest.mark.parametrize("what", ["crashes", "is deleted"])
@pytest.mark.parametrize("role", [*OTHERS, *OF_JOBS])
def test_a_pod_that_is_lost_is_replaced_and_the_run_goes_on(running: ClusterRun, role: str, what: str) -> None:
    goes_on(running, role, what)


@pytest.mark.parametrize("role", ["rollout", "reference", "critic"])
def test_a_drain_takes_a_pod_and_the_run_goes_on(running: ClusterRun, role: str) -> None:
    goes_on(running, role, "is evicted")


def test_the_ledger_balances_after_all_that(running: ClusterRun) -> None:
    (controller,) = running.ready("controller")
    words = ("exec", controller, "--", "rolecall", "ledger", "/etc/rolecall/run.yaml")
    assert "balanced" in running.kubectl(*words).stdout


def test_rollouts_are_added_and_taken_away(running: ClusterRun) -> None:
    lost = set(running.lost())
    running.kubectl("scale", "deployment/rollout", "--replicas=3")
    grew_s = running.wait("three rollouts", lambda: len(running.ready("rollout")) == 3, START_S)
    running.kubectl("scale", "deployment/rollout", "--replicas=1")
    running.wait("one rollout", lambda: len(running.pods("rollout")) == 1)
    before = running.step_now()
    running.wait("two steps with one rollout", lambda: running.step() >= before + 2)
    assert set(running.lost()) <= lost, "those that were asked to end have left"
    tell(f"three rollouts after {grew_s:.0f} s")


def test_its_operator_pauses_and_stops_it_and_the_jobset_is_done(running: ClusterRun) -> None:
    assert "paused" in running.rolecall("pause").stdout
    assert running.rolecall("resume").returncode == 0
    assert "stopping" in running.rolecall("stop").stdout
    running.wait("the end of the JobSet", lambda: running.jobset() != "")
    assert running.jobset() == "Completed"


def test_a_bad_setting_fails_the_jobset_and_the_run_goes_on_once_it_is_mended(job: Path, tmp_path: Path) -> None:
    with cluster_run("rolecall-fails", tmp_path, job, *SMALL, "--data.train=/data/trian.jsonl") as run:
        run.apply()
        run.wait("the JobSet's failure", lambda: run.jobset() == "Failed", START_S)
        assert "first failed job: run-controller-0" in run.kubectl("describe", "jobset", "run").stdout
        assert "/data/trian.jsonl" in run.kubectl("logs", "job/run-controller-0").stdout
        run.kubectl("delete", "jobset", "run")
        run.change("data.train", "/data/train.jsonl")
        run.apply()
        run.kubectl("rollout", "restart", "deployment")
        run.wait("the end of the JobSet", lambda: run.jobset() == "Completed", 2 * START_S)


def test_a_trainer_on_two_nodes_loses_one_and_meets_again(job: Path, tmp_path: Path) -> None:
    on_two = ("--actor.num_ranks=2", "--actor.devices=[0]", "--rollout.num_replicas=1")
    with cluster_run("rolecall-two", tmp_path, job, *ENDLESS, *on_two) as run:
        run.without_gpus()
        run.apply()
        run.wait("the first step", lambda: run.step() >= 1, START_S)
        both = run.ready("actor")
        assert len(both) == 2
        before, began = run.step_now(), time.monotonic()
        run.delete(next(name for name in both if "-actor-0-1-" in name))
        run.wait("both pods anew", lambda: len(set(run.ready("actor").values()) - set(both.values())) == 2, START_S)
        run.wait("two steps of both", lambda: run.step() >= before + 2, START_S)
        tell(f"a trainer's second node is lost: two steps after {time.monotonic() - began:.0f} s")
