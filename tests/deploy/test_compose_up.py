"""The Compose project on a real engine (`make test-deploy`): it trains and ends, outlives the death of each container,
grows and shrinks, goes on after `down`, and says what to do when something is in the way.
"""

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.project import ROLLOUT_S, Project, docker, project

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
ROLES = ("controller", "actor", "rollout", "reward")
PORT = 9471


def tell(line: str) -> None:
    """Shows a figure in the run's output (`-s`)."""
    sys.stdout.write(f"\n{line}\n")


def test_up_trains_the_example_and_ends_with_every_role(tmp_path: Path) -> None:
    with project("rolecall-up", tmp_path, PORT) as made:
        began = time.monotonic()
        said = made.compose("up", "--no-build", "--no-color", timeout_s=1200).stdout
        took_s = time.monotonic() - began
        for role in ROLES:
            (container,) = made.containers(role, ended=True)
            assert (container["State"]["Status"], container["State"]["ExitCode"]) == ("exited", 0), made.logs(40, role)
        accuracy = made.accuracy()
        tell(f"up to the end: {took_s:.0f} s, held-out accuracy {accuracy:.3f}")
        assert accuracy >= 0.95, said[-3000:]
        assert "balanced" in made.ledger()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A run that would go on for ever."""
    with project("rolecall-kills", tmp_path_factory.mktemp("kills"), PORT + 1, num_steps=100_000) as made:
        made.compose("up", "--no-build", "--detach")
        made.wait("the first step", lambda: made.step() >= 1, 2 * ROLLOUT_S)
        yield made


@pytest.mark.parametrize("service", ["reward", "controller", "store", "actor", "rollout"])
def test_a_container_that_is_killed_comes_back_and_the_run_goes_on(running: Project, service: str) -> None:
    before = running.step()
    killed = running.kill(service)
    began = time.monotonic()

    def is_back() -> bool:
        containers = running.containers(service)
        return bool(containers) and containers[0]["Id"] == killed and containers[0]["RestartCount"] >= 1

    back_s = running.wait(f"{service} back", is_back)
    running.wait(f"a step after {service} was killed", lambda: running.step() > before + 1, 2 * ROLLOUT_S)
    tell(f"| {service} | back after {back_s:.0f} s | two steps after {time.monotonic() - began:.0f} s |")


def test_the_ledger_balances_after_the_kills_while_the_run_goes_on(running: Project) -> None:
    assert "balanced" in running.ledger()


def test_rollouts_are_added_and_taken_away(running: Project) -> None:
    def attested() -> int:
        workers = (running.status() or {}).get("workers", [])
        return sum(worker["role"] == "ROLE_ROLLOUT" and not worker.get("lost") for worker in workers)

    running.compose("up", "--no-build", "--detach", "--no-recreate", "--scale", "rollout=3")
    grew_s = running.wait("three rollouts", lambda: attested() == 3, 3 * ROLLOUT_S)
    running.compose("up", "--no-build", "--detach", "--no-recreate", "--scale", "rollout=1")
    running.wait("one rollout", lambda: attested() == 1)
    before = running.step()
    running.wait("a step with one rollout", lambda: running.step() > before)
    tell(f"three rollouts after {grew_s:.0f} s")


def test_the_run_goes_on_after_down_and_up(running: Project) -> None:
    before = running.step()
    running.compose("down", timeout_s=300)
    running.compose("up", "--no-build", "--detach")
    took_s = running.wait("a step after down and up", lambda: running.step() > before, 2 * ROLLOUT_S)
    assert "balanced" in running.ledger()
    tell(f"down at step {before}, a further step {took_s:.0f} s after up")


def test_a_person_on_this_machine_watches_pauses_and_stops_the_run(running: Project) -> None:
    running.wait("a run at work", lambda: (running.status() or {}).get("state") == "running", ROLLOUT_S)
    watch = running.watch()
    assert "paused" in running.rolecall("pause").stdout
    assert running.rolecall("resume").returncode == 0
    assert "stopping" in running.rolecall("stop").stdout
    running.wait("the end of every role", lambda: not any(running.containers(role) for role in ROLES))
    told, _ = watch.communicate(timeout=60)
    assert watch.returncode == 0, told[-2000:]
    assert "balanced" in running.ledger()


def test_a_wrong_password_a_missing_job_and_a_port_that_is_taken_are_named(tmp_path: Path) -> None:
    with project("rolecall-wrong", tmp_path, PORT + 2) as made, socket.create_server(("127.0.0.1", PORT + 2)):
        made.compose("up", "--no-build", "--detach", "--wait", "store")
        made.compose("run", "--rm", "--no-deps", "-T", "certificates")
        check = ("run", "--rm", "--no-deps", "-T", "check")
        missing = made.compose(*check, check=False)
        assert missing.returncode == 2
        assert "/var/lib/rolecall/job/model" in missing.stdout + missing.stderr
        assert "store:6379 answers" in missing.stdout
        write = "open('/v/store-url', 'w').write('redis://sort-digits.controller:wrong@store:6379/0')"
        volume, image = "rolecall-wrong_store-controller:/v", made.containers("store")[0]["Config"]["Image"]
        docker("run", "--rm", "--volume", volume, "--entrypoint", "python", image, "-c", write)
        wrong = made.compose(*check, check=False)
        assert wrong.returncode == 2
        assert "password" in wrong.stdout + wrong.stderr
        taken = made.compose("up", "--no-build", "--detach", "--no-deps", "controller", check=False)
        assert taken.returncode != 0
        assert "address already in use" in taken.stderr or "port is already allocated" in taken.stderr
