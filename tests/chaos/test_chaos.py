"""A short chaos run in the default tests, and a planted violation that its checker catches. `make chaos` runs longer
ones.
"""

import asyncio
import gc
import itertools
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.checker import check_journals
from tests.chaos.config import write_config
from tests.chaos.driver import Driver, Plan
from tests.chaos.faults import RANDOM, Fault, Kind, draw
from tests.chaos.links import PhaseServer, Traps
from tests.chaos.runs import TARGETS, WORKERS, light_chaos
from tests.chaos.trainer import AMNESIA

KILLS_EVERY_ROLE = 91
"""A seed whose first kills are of every role."""
NUM_KILLS = 15


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder near the root: paths of sockets are short. It stays when a run failed to be what it should."""
    path = Path(tempfile.mkdtemp(prefix="chaos-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seed", "max_staleness"),
    [
        (KILLS_EVERY_ROLE, 0),
        pytest.param(
            1,
            2,
            marks=pytest.mark.thorough(
                "test_kills_stops_and_cuts_lose_nothing_train_nothing_twice_and_change_no_weight"
            ),
        ),
    ],
)
def test_kills_stops_and_cuts_lose_nothing_train_nothing_twice_and_change_no_weight(
    short_path: Path, seed: int, max_staleness: int
) -> None:
    story, verdict = light_chaos(short_path, seed, kills=NUM_KILLS, staleness=max_staleness, lease_s=2.0, hang_s=6.0)
    assert verdict.problems == []
    assert (verdict.figures["lost"], verdict.figures["trained twice"], verdict.figures["unattested"]) == (0, 0, 0)
    assert story.num_kills >= NUM_KILLS
    assert verdict.figures["trained"] > 0
    assert verdict.figures["spans"] > 0


@pytest.mark.thorough("test_kills_stops_and_cuts_lose_nothing_train_nothing_twice_and_change_no_weight")
@pytest.mark.timeout(400)
def test_an_actor_that_forgets_its_weights_is_caught(short_path: Path) -> None:
    config = write_config(short_path, seed=0, num_steps=1_000_000, max_staleness=0, lease_s=2.0, hang_s=6.0)
    (short_path / AMNESIA).touch()
    faults = (Fault(number, "actor", Kind.KILL, "actor", RANDOM, 0.5) for number in itertools.count())
    driver = Driver(Plan(short_path, config, WORKERS, faults, num_kills=20, lease_s=2.0, hang_s=150.0))
    with pytest.raises(AssertionError, match="actor: "):
        asyncio.run(driver.run())
    assert any(
        "that are not those after" in problem or "other weights than" in problem
        for problem in check_journals(short_path / "run").problems
    )


def test_the_same_seed_draws_the_same_faults_over_every_role_and_kind() -> None:
    first, second, other = (list(itertools.islice(draw(seed, TARGETS), 2000)) for seed in (5, 5, 6))
    assert first == second != other
    assert {fault.target for fault in first} == {*TARGETS, "store"}
    assert {fault.kind for fault in first} == set(Kind)


def test_the_short_schedule_kills_every_role() -> None:
    kills = (fault.target for fault in draw(KILLS_EVERY_ROLE, TARGETS) if fault.kind is Kind.KILL)
    roles = {target.partition("-")[0] for target in itertools.islice(kills, NUM_KILLS)}
    assert roles == {target.partition("-")[0] for target in TARGETS} | {"store"}


def test_a_role_that_outlives_the_driver_leaves_no_open_socket_in_it(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as role:
        asyncio.run(_say_a_phase(short_path / "phases", role))
        gc.collect()  # a connection left open warns here, which fails a test


async def _say_a_phase(path: Path, role: socket.socket) -> None:
    server = PhaseServer(path, Traps(lambda worker, pid, phase: None))
    await server.start()
    role.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(role, str(path))
    await loop.sock_sendall(role, b"actor 1 idle\n")
    assert await loop.sock_recv(role, 1) == b"."
    await server.close()
