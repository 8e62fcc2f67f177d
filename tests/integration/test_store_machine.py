"""The ledger as a whole, model-checked against a real server (ledger_machine.py): random games, and planted violations,
by hand and as scripts with one line changed, which the checks must see.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)
from redis import ResponseError

from rolecall.errors import RoleCallError
from rolecall.store import scripts
from rolecall.store.embedded import EmbeddedStore
from tests.integration.ledger_machine import LedgerMachine


def unfenced_renewal(machine: LedgerMachine) -> None:
    """A zombie renews without naming its token, and so steals its entry back."""
    machine.claim("r.0", 1)
    machine.expel("r.0", False)
    machine.client.xclaim(
        f"{{rl:{machine.run}}}:prompts", "rollout", "r.0", 0, [machine.claims[0].entry_id], justid=True
    )


def deleting_first(machine: LedgerMachine) -> None:
    """A dead worker's consumer is deleted before its entries are handed back."""
    machine.claim("r.0", 1)
    machine.connection.command("XGROUP", "DELCONSUMER", f"{{rl:{machine.run}}}:prompts", "rollout", "r.0")
    machine.expel("r.0", False)
    machine.claim("r.1", 3)


def commit_twice(machine: LedgerMachine) -> None:
    """A commit that is a bare XADD: when its answer is lost, another follows."""
    machine.claim("r.0", 1)
    machine.commit_one(machine.claims[0])
    group = machine.groups[0]
    machine.connection.command(
        "XADD", f"{{rl:{machine.run}}}:trajectories", "*", "gid", group.gid, "group", group.SerializeToString()
    )


def uncounted_drop(machine: LedgerMachine) -> None:
    """A group leaves the ledger without being counted."""
    machine.connection.command("ZREM", f"{{rl:{machine.run}}}:live", 0)


def planted_and_checked(plant: Callable[[LedgerMachine], None], machine: LedgerMachine) -> None:
    plant(machine)
    machine.check_all()


@pytest.fixture
def machine_server(make_embedded_store: Callable[..., EmbeddedStore]) -> EmbeddedStore:
    server = make_embedded_store(run="*")
    server.start()
    return server


def explore(machine: Callable[[], LedgerMachine], max_examples: int, steps: int) -> None:
    """Plays `max_examples` random games; the first that goes wrong raises, without being made shorter."""
    chosen = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[arg-type]


def test_the_ledger_keeps_its_promises_whatever_happens(machine_server: EmbeddedStore, tmp_path: Path) -> None:
    explore(lambda: LedgerMachine(machine_server, tmp_path), 30, 50)


@pytest.mark.parametrize("plant", [unfenced_renewal, deleting_first, commit_twice, uncounted_drop])
def test_the_checks_see_a_planted_violation(
    machine_server: EmbeddedStore, tmp_path: Path, plant: Callable[[LedgerMachine], None]
) -> None:
    machine = LedgerMachine(machine_server, tmp_path)
    machine.first_controller()
    machine.check_all()
    with pytest.raises(AssertionError):
        planted_and_checked(plant, machine)
    machine.client.close()


VARIANTS = {
    "a renewal without a fence": ("renew", "if held(ARGV[i], ARGV[1], ARGV[i + 1]) then", "if owner(ARGV[i]) then"),
    "a release without a fence": ("release", "if held(ARGV[i], ARGV[1], ARGV[i + 1]) then", "if owner(ARGV[i]) then"),
    "a commit without a fence": ("commit", "if not held(entry, consumer, count) or", "if"),
    "a claim that takes more than there are places": ("claim", "places[name].left > 0", "places[name].left >= 0"),
    "a claim that loses what it passes over": (
        "claim",
        "redis.call('XCLAIM', prompts, 'rollout', free_list(name), 0, entry, 'JUSTID')",
        "",
    ),
    "a claim that counts anew": ("claim", "consumer, 0, entry)", "consumer, 0, entry, 'RETRYCOUNT', 1)"),
    "a drop that counts twice": (
        "drop",
        "if not state or state == 'dropped' or state == 'trained' then",
        "if state == 'sealed' then",
    ),
    "a drop that forgets the entry": ("drop", "redis.call('XDEL', prompts, entry)", ""),
    "a step that is counted without what it carries over": (
        "commit_step",
        "redis.call('HSET', run, 'algorithm_state', ARGV[3])",
        "",
    ),
    "a step that leaves its groups live": ("commit_step", "redis.call('ZREM', live, gid)", ""),
    "an expulsion that deletes first": (
        "expel",
        "redis.call('DEL', worker_key(ARGV[2]))",
        "redis.call('XGROUP', 'DELCONSUMER', prompts, 'rollout', ARGV[2])",
    ),
}
"""What is wrong -> (script, line, what it is changed to)."""


@pytest.mark.thorough("test_the_ledger_keeps_its_promises_whatever_happens")
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_games_find_a_script_with_one_line_changed(
    machine_server: EmbeddedStore, tmp_path: Path, variant: str
) -> None:
    name, line, changed = VARIANTS[variant]
    assert line in scripts.source(name)
    text = scripts.source(name).replace(line, changed)
    with pytest.raises((AssertionError, pytest.fail.Exception, RoleCallError, ResponseError)):
        explore(lambda: LedgerMachine(machine_server, tmp_path, {name: text}), 200, 50)
