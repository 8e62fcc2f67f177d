"""What is written in which order: a batch is fixed before its columns are written, lines are on the disk before they
leave the store, and rows are kept before they are scored.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from rolecall.rpc.channel import open_channel
from rolecall.scoring.client import RewardClient
from rolecall.settings import RpcSection
from rolecall.store import scripts
from rolecall.store.connection import Connection
from rolecall.store.ledger import Ledger
from rolecall.trajectory import rows_of
from services.controller.groups.group_scorer import GroupScorer
from services.controller.threads import StoreThreads
from tests.conftest import MakeSettings
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import LightRun, balance
from tests.waiting import until

ESTIMATOR = """
from pathlib import Path
import redis
from rolecall.algorithms.advantages import Estimate

def spoil_rows_once(batch, url, pattern, flag):
    "Between the reading of the batch's rows and the writing of its columns, once, nothing can be written to them."
    if not Path(flag).exists():
        Path(flag).touch()
        with redis.Redis.from_url(url) as client:
            for key in list(client.scan_iter(pattern)):
                client.rename(key, key.replace(b":row:", b":hidden:"))
                client.set(key, "no hash")
    return Estimate(2 * batch.rewards_N)
"""


async def test_a_batch_is_sealed_before_its_columns_are_written_and_a_controller_that_ends_in_between_loses_nothing(
    light_run: LightRun, store: StoreUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # what the loader adds to it ends with the test
    (tmp_path / "spoiling_for_a_test.py").write_text(ESTIMATOR)
    assert store.section.url is not None
    options = {
        "url": store.section.url.get_secret_value(),
        "pattern": f"{{rl:{store.run}:*:row:*",
        "flag": str(tmp_path / "flag"),
    }
    advantage = {
        "kind": "custom",
        "function": f"{tmp_path}/spoiling_for_a_test:spoil_rows_once",
        "options": options,
    }
    algorithm = {"groups_per_batch": 4, "advantage": advantage}
    async with light_run(algorithm=algorithm, run={"num_steps": 1}) as run, run.rollout("rollout-0"):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            await run.to_the_end()
        sealed = run.ledger.sealed(0)
        assert sealed is not None, (
            "columns are written once: those of a batch that is not fixed would bind nobody to it"
        )
        hidden = list(store.connection.ledger.scan_iter(f"{{rl:{store.run}:*:hidden:*"))
        assert len(hidden) == len(sealed.rows)
        assert not any(store.connection.ledger.hexists(key, "advantages") for key in hidden)
        for key in hidden:
            store.connection.ledger.rename(key, key.replace(b":hidden:", b":row:"))
        await run.to_the_end()
    assert balance(run) == (4, 4, 0, 0)
    assert [record.digest for record in run.actor.trainer.records] == [sealed.digest]
    assert run.actor.trainer.trained == [ref.id for ref in sealed.rows]


async def test_a_committed_row_outlives_the_rollout_that_did_not_get_to_keep_it(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    (claim,) = queue.claim(1)
    group = store.stage(claim)
    assert queue.commit(claim, group, {(0, "d1")})  # and the rollout dies
    keys = [
        key for ref in rows_of(group) for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}:*:row:{ref.id}:*")
    ]
    assert all(store.connection.ledger.ttl(key) > 0 for key in keys)
    threads = StoreThreads()
    async with open_channel("127.0.0.1:9", RpcSection()) as channel:
        nobody = RewardClient(channel, name="reward", address="127.0.0.1:9", timeout_s=5.0, max_attempts=1)
        scorer = GroupScorer(make_settings(), store.rows, threads, nobody, {}, ctl=1)
        scoring = asyncio.create_task(scorer.score(group))
        await until(lambda: all(store.connection.ledger.ttl(key) == -1 for key in keys))
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
    threads.close()
    assert len(keys) == 2


class RecordingRedis(redis.Redis):
    """A client that notes the scripts it runs."""

    noted: list[str]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] in ("EVALSHA", "EVAL"):
            self.noted.append(
                "forget" if args[1] in (scripts.digest("forget"), scripts.source("forget")) else "another script"
            )
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def test_lines_are_synced_before_they_are_deleted_from_the_store(
    store: StoreUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, noted = tmp_path / "history.jsonl", list[str]()

    def sync(file: int) -> None:
        assert path.read_bytes().count(b"\n") == 4, "all lines are in the file when it is synced"
        noted.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    store.admit(4)
    assert store.section.url is not None
    with RecordingRedis.from_url(store.section.url.get_secret_value()) as client:
        client.noted = noted
        ledger = Ledger(Connection(client), store.run)
        ledger.lock(0.1)
        noted.clear()
        monkeypatch.setattr(os, "fsync", sync)
        assert ledger.drain("history", path) == 4
    assert list(dict.fromkeys(noted)) == ["history.jsonl", "forget"]
