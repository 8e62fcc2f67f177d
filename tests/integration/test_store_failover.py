"""A replica takes over from the store's master in the middle of a run: what it lacks is seen, the run goes back to its
checkpoint, and nothing is trained twice or lost in silence.
"""

from pathlib import Path

import pytest

from tests.conftest import MakeSettings
from tests.failover import check, failing_over, strike
from tests.fixtures_store import MakeStore
from tests.servers import PlainServers, Replicated, until

LOST = "the store lost what it had acknowledged"


async def test_a_run_goes_back_to_its_checkpoint_when_the_replica_that_takes_over_lacks_what_was_acknowledged(
    servers: PlainServers, make_store: MakeStore, tmp_path: Path, make_settings: MakeSettings
) -> None:
    replicated = Replicated(servers)
    longer = {"num_steps": 16, "checkpoint_every_steps": 3}
    async with failing_over(make_store(replicated.url, "run"), tmp_path, make_settings, run=longer) as run:

        def lose() -> None:
            replicated.cut_off()
            step = run.ledger.position().step
            until(lambda: run.ledger.position().step > step, "a step with a master that nobody follows")
            replicated.lose_master()

        found = await strike(run, 4, lose)
        check(run)
    # a loop that reads a row before its heartbeat is answered meets the loss there
    assert any(LOST in failure or "is gone; it expired or was deleted" in failure for failure in found.failures)


@pytest.mark.thorough(
    "test_a_run_goes_back_to_its_checkpoint_when_the_replica_that_takes_over_lacks_what_was_acknowledged"
)
async def test_a_run_goes_on_when_its_master_is_killed_and_the_replicas_had_kept_up(
    servers: PlainServers, make_store: MakeStore, tmp_path: Path, make_settings: MakeSettings
) -> None:
    replicated = Replicated(servers)
    async with failing_over(make_store(replicated.url, "run"), tmp_path, make_settings) as run:
        await strike(run, 4, replicated.kill_master)
        check(run)


@pytest.mark.thorough(
    "test_a_run_goes_back_to_its_checkpoint_when_the_replica_that_takes_over_lacks_what_was_acknowledged"
)
@pytest.mark.parametrize("min_replicas", ["0", "1"])
async def test_what_a_demoted_master_goes_on_acknowledging_is_seen_to_be_lost(
    servers: PlainServers, make_store: MakeStore, tmp_path: Path, make_settings: MakeSettings, min_replicas: str
) -> None:
    replicated = Replicated(servers, min_replicas_to_write=min_replicas)
    longer = {"num_steps": 40, "checkpoint_every_steps": 3}
    async with failing_over(make_store(replicated.url, "run"), tmp_path, make_settings, run=longer) as run:
        await strike(run, 4, replicated.demote)
        check(run)
        assert run.ledger.position().lineage == 1, "by a mark, or by a row that is gone"


@pytest.mark.thorough(
    "test_a_run_goes_back_to_its_checkpoint_when_the_replica_that_takes_over_lacks_what_was_acknowledged"
)
async def test_a_master_that_hands_over_loses_nothing(
    servers: PlainServers, make_store: MakeStore, tmp_path: Path, make_settings: MakeSettings
) -> None:
    replicated = Replicated(servers)
    longer = {"num_steps": 30, "checkpoint_every_steps": 3}
    async with failing_over(make_store(replicated.url, "run"), tmp_path, make_settings, run=longer) as run:
        found = await strike(run, 4, lambda: replicated.demote("COORDINATED"))
        check(run)
    handed_over = replicated.master_port() != replicated.master.port
    assert (found.lost_steps, handed_over) == (0, True), replicated.changes_of_master()
