"""Runs whose rollouts and trainers share a device of the tests (tests/twins/device.py), in processes of their own under
the real launcher and controller, killed in every shift and while the device changes hands.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.config import write_config
from tests.chaos.driver import Plan
from tests.chaos.faults import SHIFT_PHASES, Fault, Kind
from tests.chaos.runs import WORKERS, drive, light_chaos, require_room
from tests.twins.device import CACHE, MIB, WEIGHTS, TwinDevice, held_by

LEASE_S, HANG_S = 2.0, 6.0
PHASES = {
    "rollout-0": SHIFT_PHASES["rollout"],
    "ref": ("compute:start", "compute:computed", "move:offload", "move:offloaded"),
    "actor": SHIFT_PHASES["actor"],
    "critic": SHIFT_PHASES["critic"],
}
EVERY_PHASE = [(worker, phase) for worker, phases in PHASES.items() for phase in phases]
BRIEF = [
    ("rollout-0", "sleep:start"),
    ("ref", "compute:computed"),
    ("actor", "move:onload"),
    ("ref", "move:offload"),
    ("rollout-0", "wake:end"),
    ("actor", "move:offload"),
]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder near the root: paths of sockets are short."""
    with tempfile.TemporaryDirectory(prefix="shift-") as path:
        yield Path(path)


def kills(at: list[tuple[str, str]]) -> Iterator[Fault]:
    """A SIGKILL of each worker in each phase, in turn, without end."""
    for number, (worker, phase) in enumerate(itertools.cycle(at)):
        yield Fault(number, worker, Kind.KILL, worker, phase, 0.5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("at", "max_staleness"),
    [
        pytest.param(BRIEF, 0, id="brief"),
        *(
            pytest.param(
                EVERY_PHASE,
                staleness,
                marks=pytest.mark.thorough("test_a_kill_in_any_shift_costs_time_and_no_memory_of_the_others"),
                id=f"every-{staleness}",
            )
            for staleness in (0, 1)
        ),
    ],
)
def test_a_kill_in_any_shift_costs_time_and_no_memory_of_the_others(
    short_path: Path, at: list[tuple[str, str]], max_staleness: int
) -> None:
    place = short_path / "killed"
    config = write_config(
        place,
        seed=3,
        num_steps=1_000_000,
        max_staleness=max_staleness,
        lease_s=LEASE_S,
        hang_s=HANG_S,
        takes_shifts=True,
    )
    story, verdict = drive(Plan(place, config, WORKERS, kills(at), len(at), LEASE_S, max_down=1, armed_s=30.0))
    require_room(place, verdict)
    assert verdict.problems == []
    assert (verdict.figures["lost"], verdict.figures["trained twice"], verdict.figures["unattested"]) == (0, 0, 0)
    assert {(record.fault.target, record.fault.phase) for record in story.records if record.exactly} == set(at)


@pytest.mark.thorough("test_a_kill_in_any_shift_costs_time_and_no_memory_of_the_others")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_kills_stops_and_cuts_change_no_weight_of_a_run_that_shares_a_device(
    short_path: Path, max_staleness: int
) -> None:
    story, verdict = light_chaos(short_path, 5, 20, max_staleness, LEASE_S, HANG_S, 2, takes_shifts=True)
    assert verdict.problems == []
    assert story.num_kills >= 20


def test_a_device_of_the_tests_is_full_at_its_capacity_and_free_when_its_holder_ends(tmp_path: Path) -> None:
    """What the runs above rely on: a plan that let both sides on the device would end them."""
    trainer, rollout = (TwinDevice(tmp_path, who, 30 * MIB) for who in ("actor", "rollout-0"))
    trainer.hold("state", 20 * MIB)
    with pytest.raises(MemoryError, match="10485760 more than the device has"):
        rollout.hold("weights", WEIGHTS + CACHE)
    assert held_by(tmp_path) == {"actor": 20 * MIB, "rollout-0": 0}
    trainer.close()
    rollout.hold("weights", WEIGHTS + CACHE)
    assert held_by(tmp_path) == {"rollout-0": WEIGHTS + CACHE}
    rollout.close()
