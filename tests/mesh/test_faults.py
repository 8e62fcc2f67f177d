"""Runs of twins behind Envoys that delay, refuse, overflow, repeat, cut off, hang and die: nothing is lost, nothing is
trained twice.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rolecall.settings import load_settings
from tests.chaos.checker import Verdict, check_run
from tests.chaos.config import write_config
from tests.chaos.processes import Outside
from tests.mesh.envoy import ISTIO_RETRIES, Habits
from tests.mesh.runs import MeshRun

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

FIRST_STEP_S = 180.0
MOVES_S = 180.0
"""For a few steps, whatever the sidecars do."""
NUM_HITS, MAX_STEPS = 20, 100
"""Of one fault, and steps that it may take to meet so many."""
HANG_S = 8.0
"""Longer than the lease: the controller has given up those behind the sidecar when it comes back."""
NUM_CUT, MAX_KILLS = 3, 30
"""Calls of Train to be cut off, and kills of the actor's sidecar that it may take to hit so many."""
TRAIN = "/rolecall.v1.ActorService/Train"


@pytest.fixture
def light() -> Iterator[MeshRun]:
    """A run of twins with every role, ready to be started, in a folder near the root: paths of sockets are short."""
    short_path = Path(tempfile.mkdtemp(prefix="mesh-"))
    place = short_path / "light"
    config = write_config(place, seed=0, num_steps=1_000_000, max_staleness=0, lease_s=5.0, hang_s=15.0, num_rollouts=2)
    outside = Outside(f"unix:{place / 'scorer.sock'}", short_path / "scorer.log")
    outside.tend()
    run = MeshRun(load_settings(config), short_path, package="tests.chaos.roles")
    try:
        yield run
    finally:
        run.end()
        outside.end()


async def test_delays_refusals_and_overflows_lose_nothing_and_train_nothing_twice(light: MeshRun) -> None:
    light.start()
    await light.until(lambda: light.status.step >= 1, FIRST_STEP_S, "the first step")
    await disturbed(light, "delays_injected", {"fault.http.delay.fixed_delay_percent": 30})
    await disturbed(light, "aborts_injected", {"fault.http.abort.abort_percent": 10})
    narrow: dict[str, int | None] = {f"circuit_breakers.{name}.default.max_requests": 1 for name in light.sidecars}
    await disturbed(light, "upstream_rq_active_overflow", narrow)
    await light.stop()
    require_balance(light)


async def test_sidecars_that_die_or_hang_and_repeat_calls_lose_nothing_and_train_nothing_twice(light: MeshRun) -> None:
    light.habits = careless = Habits(retries={"/": ISTIO_RETRIES})
    light.start()
    await light.until(lambda: light.status.step >= 1, FIRST_STEP_S, "the first step")
    for name, sidecar in light.sidecars.items():
        started = time.monotonic()
        sidecar.restart(careless)
        await light.steps(1, MOVES_S)
        logger.info("killed that of %s: a step after %.1f s", name, time.monotonic() - started)
    for name in ("controller", "actor", "ref", "reward", "rollout-0"):
        started = time.monotonic()
        light.sidecars[name].freeze()
        await asyncio.sleep(HANG_S)
        light.sidecars[name].restart(careless)
        await light.steps(1, MOVES_S)
        logger.info("stopped that of %s for %.0f s: a step after %.1f s", name, HANG_S, time.monotonic() - started)
    logger.info("%d recoveries, %d restarts of roles", light.status.num_recoveries, light.num_restarts)
    await light.stop()
    require_balance(light)


async def disturbed(run: MeshRun, counter: str, values: Mapping[str, int | None]) -> None:
    """Takes steps while the sidecars do what `values` say, until they did it NUM_HITS times, as `counter` counts."""
    for sidecar in run.sidecars.values():
        sidecar.set(values)
    hits, first = 0, run.status.step
    while hits < NUM_HITS:
        assert run.status.step - first < MAX_STEPS, f"{counter}: {hits}"
        await run.steps(1, MOVES_S)
        hits = sum(sidecar.count(counter) for sidecar in run.sidecars.values())
    for sidecar in run.sidecars.values():
        sidecar.set(dict.fromkeys(values))
    steps = run.status.step - first
    logger.info("%s: %d in %d steps, %d recoveries until now", counter, hits, steps, run.status.num_recoveries)


async def test_a_train_that_the_mesh_repeats_is_applied_once(light: MeshRun) -> None:
    light.habits = Habits(retries={TRAIN: {"retry_on": "5xx", "num_retries": 20, "per_try_timeout": "0.03s"}})
    light.start()

    def num_repeated() -> int:
        return light.sidecars["controller"].count("cluster.actor.upstream_rq_retry")

    # on a quiet machine most calls of Train are answered before a try ends
    await light.until(lambda: light.status.step >= 10 and num_repeated() > 0, FIRST_STEP_S, "a repeated call of Train")
    logger.info("%d calls of Train repeated by the sidecar", num_repeated())
    await light.stop()
    verdict = require_balance(light)
    assert verdict.figures["actor replays"] == 0


async def test_a_train_whose_sidecar_dies_in_the_middle_is_attached_to_again(light: MeshRun) -> None:
    light.start()
    await light.until(lambda: light.status.step >= 1, FIRST_STEP_S, "the first step")
    log = light.settings.run.dir / "logs" / "controller.log"
    kills = 0
    while (attached := log.read_text().count("attaching again")) < NUM_CUT:
        kills += 1
        assert kills < MAX_KILLS, f"{kills} sidecars killed, {attached} calls of Train cut off"
        await light.heard(
            lambda status: "training of" in status.waiting_for or "microbatch" in status.waiting_for, MOVES_S
        )
        light.sidecars["actor"].restart(Habits())
        await light.steps(1, MOVES_S)
    await light.stop()
    logger.info("%d sidecars killed, %d calls of Train cut off", kills, attached)
    verdict = require_balance(light)
    assert verdict.figures["actor replays"] == 0


def require_balance(run: MeshRun) -> Verdict:
    """The ledger balances, and the trainers' journals agree with it. The folder goes with that; it stays of a run that
    failed.
    """
    run.end()
    verdict = check_run(run.settings.run.dir)
    logger.info("%s", dict(verdict.figures))
    assert verdict.problems == []
    assert (verdict.figures["lost"], verdict.figures["trained twice"], verdict.figures["unattested"]) == (0, 0, 0)
    assert verdict.figures["trained"] > 0
    shutil.rmtree(run.folder)
    return verdict
