"""A store that lost what it had acknowledged, as the controller sees it: the run goes back to its checkpoint by itself,
or says why it cannot. What is lost here is only said to be: real failovers are test_store_failover.py's.
"""

from pathlib import Path

import pytest

from rolecall.errors import InvalidInputError, StoreRolledBackError, UnavailableError
from rolecall.store.ledger import Ledger
from rolecall.v1.trajectory_pb2 import TrainBatch
from tests.conftest import MakeSettings
from tests.failover import check
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import TwinRun, twin_run


def another_server(store: StoreUnderTest, **fields: int) -> None:
    """Makes the ledger one that was last confirmed on another server, with other `fields`."""
    store.connection.command("HSET", f"{{rl:{store.run}}}:run", "server", "another", *sum(fields.items(), ()))


async def test_a_run_goes_back_by_itself_and_gives_no_gid_twice(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 8, "checkpoint_every_steps": 2}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        async with run.controller() as life:
            await life.reaches(3)
            another_server(store, mark=1)
            await life.ends()
            assert (await life.status()).num_recoveries >= 1
        check(run)
    position = Ledger(store.connection, store.run).position()
    assert (position.lineage, position.set_back, position.step) == (1, 0, 8)
    assert position.lineage_gid > 1_000_000


async def test_a_server_that_has_all_it_acknowledged_is_gone_on_with(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 6}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        async with run.controller() as life:
            for step in (1, 2, 3):
                await life.reaches(step)
                another_server(store)
            await life.ends()
            assert (await life.status()).num_recoveries == 0
        check(run)
    assert Ledger(store.connection, store.run).position().lineage == 0


async def test_without_a_checkpoint_the_run_ends_and_begins_anew_once_its_trainers_did(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 4, "checkpoint_every_steps": 4}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        async with run.controller() as life:
            await life.reaches(1)
            another_server(store, mark=1)
            with pytest.raises(StoreRolledBackError, match=r"holds no checkpoint.*start the trainers again"):
                await life.ends()
        run.actor.restart()
        async with run.controller() as life:
            await life.ends()
        check(run)


async def test_rows_that_a_sealed_batch_needs_are_lost_and_the_run_goes_back(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 6, "checkpoint_every_steps": 2}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        _lose_rows_of(run, step=3)
        async with run.controller() as life:
            await life.ends()
        check(run)
    assert Ledger(store.connection, store.run).position().lineage == 1


async def test_a_controller_that_finds_the_rows_of_a_sealed_batch_gone_goes_back_too(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 6, "checkpoint_every_steps": 2}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        async with run.controller() as life:
            await life.reaches(3)
            run.actor.trainer.failures.append(InvalidInputError("the run ends with a batch sealed"))
            with pytest.raises(InvalidInputError):
                await life.ends()
        ledger = Ledger(store.connection, store.run)
        sealed = ledger.sealed(ledger.position().step)
        assert sealed is not None
        store.rows.delete(list(sealed.rows))
        async with run.controller() as life:
            await life.ends()
        check(run)
    assert ledger.position().lineage == 1


async def test_a_store_that_loses_writes_again_while_trainers_are_set_back_begins_another_lineage(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 6, "checkpoint_every_steps": 2}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        load, lost = run.actor.trainer.load, list[str]()

        def losing(path: str, *rest: object) -> None:
            if not lost:
                lost.append(path)
                another_server(store, mark=1)
                raise UnavailableError("the actor is away")
            load(path, *rest)  # type: ignore[arg-type]

        run.actor.trainer.load = losing  # type: ignore[method-assign, assignment]
        async with run.controller() as life:
            await life.reaches(3)
            another_server(store, mark=1)
            await life.ends()
        check(run)
    position = Ledger(store.connection, store.run).position()
    assert (position.lineage, position.set_back, position.step) == (2, 0, 6)


def _lose_rows_of(run: TwinRun, step: int) -> None:
    """Deletes the rows of the batch of `step` when the actor is to train it for the first time."""
    train = run.actor.trainer.train
    lost: list[TrainBatch] = []

    def losing(batch: TrainBatch, *rest: object) -> object:
        if batch.step == step and not lost:
            lost.append(batch)
            run.store.rows.delete(list(batch.rows))
        return train(batch, *rest)  # type: ignore[arg-type]

    run.actor.trainer.train = losing  # type: ignore[method-assign, assignment]
