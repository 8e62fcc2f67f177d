"""A run whose rows are spread over a cluster of three: nodes are killed and slots are moved under it, the ledger's own
too. Nothing is lost, and nothing trained twice.
"""

import time
from pathlib import Path

import pytest

from tests.conftest import MakeSettings
from tests.failover import check, failing_over, strike
from tests.fixtures_store import MakeStore
from tests.servers import Clustered, PlainServers

SPREAD = {"num_shards": 3}


def slots_of(cluster: Clustered, run: str) -> list[int]:
    """The slot of the run's ledger, then those of its shards."""
    return [cluster.slot_of(f"{{rl:{run}}}:"), *(cluster.slot_of(f"{{rl:{run}:{shard}}}:") for shard in range(3))]


async def test_slots_move_under_a_run_the_ledgers_key_by_key_and_those_of_rows_to_a_node_that_had_none(
    servers: PlainServers, make_store: MakeStore, tmp_path: Path, make_settings: MakeSettings
) -> None:
    cluster = Clustered(servers)
    store = make_store(cluster.url, "moved")
    ledger, *shards = slots_of(cluster, "moved")
    other = next(node for node in cluster.masters if node is not cluster.owner_of(ledger))
    new = cluster.add_node()

    def move() -> None:
        cluster.move(ledger, other, pause_s=0.05)
        for slot in shards:
            cluster.move(slot, new)

    async with failing_over(store, tmp_path, make_settings, store=SPREAD) as run:
        found = await strike(run, 3, move)
        check(run)
    assert cluster.owner_of(ledger) is other
    assert all(cluster.owner_of(slot) is new for slot in shards)
    assert found.lost_steps == 0


@pytest.mark.thorough("test_slots_move_under_a_run_the_ledgers_key_by_key_and_those_of_rows_to_a_node_that_had_none")
@pytest.mark.parametrize("which", [0, 1], ids=["of the ledger", "of rows"])
@pytest.mark.parametrize("num_replicas", [0, 1])
async def test_a_node_is_killed_under_a_run(
    servers: PlainServers,
    make_store: MakeStore,
    tmp_path: Path,
    make_settings: MakeSettings,
    which: int,
    num_replicas: int,
) -> None:
    cluster = Clustered(servers, num_replicas)
    ledger, *shards = slots_of(cluster, "run")
    of_rows = next(slot for slot in shards if cluster.owner_of(slot) is not cluster.owner_of(ledger))
    node = cluster.owner_of((ledger, of_rows)[which])

    def kill() -> None:
        node.kill()
        if not num_replicas:
            time.sleep(3)
            node.start()

    async with failing_over(make_store(cluster.url, "run"), tmp_path, make_settings, store=SPREAD) as run:
        await strike(run, 3, kill)
        check(run)
