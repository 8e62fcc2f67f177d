"""The controller's scripts against a real server: what each promises, once and when repeated."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from rolecall.errors import (
    BatchMismatchError,
    ConflictError,
    FencedError,
    LeaseLostError,
    NotAttestedError,
    NotFoundError,
    OutOfOrderError,
    RowMissingError,
    RunLockedError,
    StaleVersionError,
    StoreRolledBackError,
    WeightsMismatchError,
)
from rolecall.store.connection import Connection
from rolecall.store.ledger import Admission, Ledger
from rolecall.store.position import Garbage, GroupState, PendingEntry, RunPosition, SuccessRate
from rolecall.store.scripts import ledger_keys
from rolecall.store.sealed import read_ctl, read_sealed
from rolecall.v1.training_pb2 import TrainResult
from rolecall.v1.trajectory_pb2 import Metric, TrainBatch
from tests.fixtures_store import DIGEST, StoreUnderTest, sample_group

CONTROLLER_CALLS: dict[str, Callable[[Ledger], object]] = {
    "beat": lambda ledger: ledger.beat(),
    "unlock": lambda ledger: ledger.unlock(),
    "admit": lambda ledger: ledger.admit(sample_group(0), b""),
    "admit_all": lambda ledger: ledger.admit_all([Admission(sample_group(0), b"")]),
    "drop": lambda ledger: ledger.drop(0, "late"),
    "seal": lambda ledger: ledger.seal(TrainBatch(step=0, digest="b")),
    "commit_step": lambda ledger: ledger.commit_step(0, []),
    "free_rows": lambda ledger: ledger.free_rows(0),
    "forget": lambda ledger: ledger.forget(Garbage((), ("batch:0",))),
    "start_lineage": lambda ledger: ledger.start_lineage(RunPosition(lineage=1)),
    "next_epoch": lambda ledger: ledger.next_epoch(),
    "begin_publish": lambda ledger: ledger.begin_publish(0, 0),
    "attest": lambda ledger: ledger.attest(0, 0, DIGEST, ["r.0"]),
    "expel": lambda ledger: ledger.expel("r.0"),
    "reap": lambda ledger: ledger.reap([PendingEntry("1-1", "r.0", 0.0, 1)]),
    "note": lambda ledger: ledger.note_scored([(0, 0.5)]),
    "rate": lambda ledger: ledger.rate("prompt-0", SuccessRate(0, 0.5)),
    "pause": lambda ledger: ledger.pause(True),
    "evaluated": lambda ledger: ledger.evaluated(1),
    "reported": lambda ledger: ledger.reported(1),
    "measured": lambda ledger: ledger.measured(0, []),
    "pending": lambda ledger: ledger.pending(),
    "snapshot": lambda ledger: ledger.snapshot(),
}


@pytest.mark.parametrize("name", CONTROLLER_CALLS)
def test_a_replaced_controller_is_fenced_from_every_call_and_changes_nothing(store: StoreUnderTest, name: str) -> None:
    store.ledger.unlock()
    successor = Ledger(store.connect(), store.run)
    assert successor.lock(5.0) == store.ledger.ctl + 1
    before = successor.snapshot()
    with pytest.raises(FencedError):
        CONTROLLER_CALLS[name](store.ledger)
    assert successor.snapshot() == before


def test_a_controller_that_knows_a_newer_number_than_the_store_finds_it_rolled_back(store: StoreUnderTest) -> None:
    other = Ledger(store.connection, f"{store.run}-other")
    assert other.lock(0.1) == 1
    other.unlock()
    assert Ledger(store.connection, f"{store.run}-other").lock(0.1) == 2
    store.connection.command("HSET", f"{{rl:{store.run}-other}}:run", "ctl", "0")
    with pytest.raises(StoreRolledBackError):
        other.beat()


def test_a_second_controller_is_refused_while_the_heartbeat_of_the_first_moves(store: StoreUnderTest) -> None:
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(0.05):
            store.ledger.beat()

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(RunLockedError):
            Ledger(store.connect(), store.run).lock(5.0)
    finally:
        stopped.set()
        heart.join(30)
    store.ledger.beat()


def test_a_silent_controller_is_replaced_after_one_lease_and_a_finished_one_at_once(store: StoreUnderTest) -> None:
    started = time.monotonic()
    second = Ledger(store.connect(), store.run)
    assert second.lock(0.5) == 2
    assert time.monotonic() - started >= 0.5
    second.unlock()
    assert Ledger(store.connect(), store.run).lock(600.0) == 3, "nobody is waited for"


class MeetingRedis(redis.Redis):
    """A client for two threads: neither goes on from its first look at who holds the run before both have looked."""

    looks: "itertools.count[int]"
    both: threading.Barrier

    def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if args[0] == "HMGET" and next(self.looks) < 2:
            self.both.wait(60)
        return answer


def test_of_two_controllers_that_wait_for_a_dead_one_exactly_one_gets_the_run(store: StoreUnderTest) -> None:
    won: list[int] = []
    refused: list[RunLockedError] = []
    client = MeetingRedis.from_url(store.url)
    assert isinstance(client, MeetingRedis)
    client.looks, client.both = itertools.count(), threading.Barrier(2)

    def wait() -> None:
        try:
            won.append(Ledger(Connection(client), store.run).lock(0.4))
        except RunLockedError as error:
            refused.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(60)
    client.close()
    assert (won, len(refused)) == ([2], 1)


def test_a_repeated_lock_of_the_same_attempt_counts_once(store: StoreUnderTest) -> None:
    keys = ledger_keys(f"{store.run}-new")
    first = store.connection.script("lock", keys, ["0", "0", "nonce", 0])
    assert first[:3] == [b"OK", 1, 1]
    assert store.connection.script("lock", keys, ["0", "0", "nonce", 0]) == [b"DONE", *first[1:]]


def test_a_heartbeat_after_the_last_look_keeps_the_run(store: StoreUnderTest) -> None:
    """Between the last look of one that waits and its script: the script compares what was seen."""
    prefix = f"{{rl:{store.run}}}:"
    ctl, beat = store.connection.command("HMGET", f"{prefix}run", "ctl", "beat")
    store.ledger.beat()
    verdict, _ = store.connection.script("lock", ledger_keys(store.run), [ctl, beat or "0", "other", 0])
    assert verdict == b"LOCKED"
    store.ledger.beat()


def test_admission_is_in_order_of_gids_and_repeating_it_adds_nothing(store: StoreUnderTest) -> None:
    assert store.ledger.admit(sample_group(0), b"after 0", "00-trace")
    assert not store.ledger.admit(sample_group(0), b"after 0 again", "00-trace")
    with pytest.raises(OutOfOrderError):
        store.ledger.admit(sample_group(2), b"")
    position = store.ledger.position()
    assert (position.next_gid, position.cursor, position.admitted) == (1, b"after 0", 1)
    counts = store.ledger.counts()
    assert (counts.live, counts.queued) == (1, 1)


def test_many_are_admitted_in_order_and_however_often_once_also_by_a_server_that_lost_its_scripts(
    store: StoreUnderTest,
) -> None:
    admissions = [Admission(sample_group(gid), f"after {gid}".encode()) for gid in range(5)]
    store.ledger.admit_all(admissions[:3])
    store.connection.command("SCRIPT", "FLUSH")
    store.ledger.admit_all(admissions)
    store.ledger.admit_all([])
    with pytest.raises(OutOfOrderError):
        store.ledger.admit_all([Admission(sample_group(5), b"after 5"), Admission(sample_group(7), b"after 7")])
    position = store.ledger.position()
    assert (position.next_gid, position.cursor, position.admitted) == (6, b"after 5", 6)


def test_committed_groups_are_read_in_order_from_any_position(store: StoreUnderTest) -> None:
    store.committed(3)
    first, *rest = store.ledger.read_committed("0", 10, 0)
    assert [group.gid for _, group in (first, *rest)] == [0, 1, 2]
    assert [group.gid for _, group in store.ledger.read_committed(first[0], 1, 0)] == [1]
    started = time.monotonic()
    assert store.ledger.read_committed(rest[-1][0], 10, 0.2) == []
    assert time.monotonic() - started >= 0.2


def test_a_batch_is_sealed_once_and_only_of_committed_groups_of_the_next_step(store: StoreUnderTest) -> None:
    groups = store.committed(2)
    store.admit(1)
    batch = store.batch(0, groups)
    with pytest.raises(OutOfOrderError):
        store.ledger.seal(store.batch(1, groups))
    with pytest.raises(ConflictError, match="twice"):
        store.ledger.seal(store.batch(0, [groups[0], groups[0]]))
    with pytest.raises(ConflictError, match="is admitted"):
        store.ledger.seal(TrainBatch(step=0, digest="b", gids=[0, 2]))
    assert set(store.ledger.live().values()) == {GroupState.COMMITTED, GroupState.ADMITTED}
    assert store.ledger.seal(batch)
    assert not store.ledger.seal(batch)
    with pytest.raises(BatchMismatchError):
        store.ledger.seal(store.batch(0, groups[:1], digest="b2"))
    assert store.ledger.sealed(0) == batch == read_sealed(store.connection, store.run, 0)
    assert store.ledger.live() == {0: GroupState.SEALED, 1: GroupState.SEALED, 2: GroupState.ADMITTED}


def test_reading_a_batch_that_is_not_sealed_says_so(store: StoreUnderTest) -> None:
    assert store.ledger.sealed(0) is None
    with pytest.raises(NotFoundError):
        read_sealed(store.connection, store.run, 0)
    assert read_ctl(store.connection, store.run) == 1
    assert read_ctl(store.connection, f"{store.run}-none") == 0


def test_a_step_is_committed_once_and_keeps_its_results(store: StoreUnderTest) -> None:
    batch = store.batch(0, store.committed(2))
    with pytest.raises(NotFoundError):
        store.ledger.commit_step(0, [])
    with pytest.raises(NotFoundError):
        store.ledger.measured(0, [])
    store.ledger.seal(batch)
    with pytest.raises(OutOfOrderError):
        store.ledger.commit_step(1, [])
    with pytest.raises(BatchMismatchError):
        store.ledger.commit_step(0, [TrainResult(step=0, digest="b1"), TrainResult(step=0, digest="b2")])
    results = [TrainResult(step=0, digest="b1"), TrainResult(step=0, digest="b1", train_s=2.0)]
    assert store.ledger.position().algorithm_state == b""
    assert store.ledger.numbers(0) is None
    told, loss = Metric(name="reward/mean", value=0.5), Metric(name="actor/loss", value=2.0)
    results[0].metrics.append(loss)
    store.ledger.measured(0, [told])
    assert store.ledger.numbers(0) is None, "it is not trained yet"
    assert store.ledger.commit_step(0, results, b"after 0")
    assert not store.ledger.commit_step(0, [], b"after 0, computed again")
    assert store.ledger.position().algorithm_state == b"after 0"
    assert store.ledger.results(0) == results
    assert store.ledger.numbers(0) == [told, loss]
    assert store.balance() == (2, 2, 0, 0)
    assert store.ledger.position().step == 1
    assert not store.ledger.seal(batch), "a batch that was trained is sealed already"


def test_what_trainers_were_asked_about_is_known_until_its_batch_is_freed_or_undone(store: StoreUnderTest) -> None:
    groups = store.committed(2)
    with pytest.raises(OutOfOrderError):
        store.ledger.begin_batch(1, [0, 1])
    store.ledger.begin_batch(0, [0])
    store.ledger.begin_batch(0, [1, 0])
    assert store.ledger.begun(0) == [1, 0]
    assert store.ledger.sealed(0) is None
    store.ledger.seal(store.batch(0, groups))
    store.ledger.commit_step(0, [])
    store.ledger.begin_batch(1, [7])
    store.ledger.free_rows(1)
    assert store.ledger.begun(0) == []
    store.ledger.start_lineage(RunPosition(lineage=1, step=1, next_gid=2))
    assert store.ledger.begun(1) == []


def test_the_success_rate_of_a_prompt_is_that_of_its_newest_group_and_outlives_lineages(store: StoreUnderTest) -> None:
    assert store.ledger.rate("a prompt", SuccessRate(3, 0.1))
    assert not store.ledger.rate("a prompt", SuccessRate(3, 0.9))
    assert not store.ledger.rate("a prompt", SuccessRate(2, 0.9))
    assert store.ledger.rate("a prompt", SuccessRate(11, 1 / 3))
    assert store.ledger.rate("another", SuccessRate(0, 1.0))
    store.ledger.start_lineage(RunPosition(lineage=1))
    assert store.ledger.rates() == {"a prompt": SuccessRate(11, 1 / 3), "another": SuccessRate(0, 1.0)}


def test_a_group_is_dropped_once_from_wherever_it_is(store: StoreUnderTest) -> None:
    store.committed(1)
    store.admit(2)
    claim = store.worker("r.0").claim(1)[0]
    for gid in range(3):
        assert store.ledger.drop(gid, "filtered")
        assert not store.ledger.drop(gid, "other")
    assert store.ledger.position().dropped == {"filtered": 3}
    assert store.balance() == (3, 0, 3, 0)
    with pytest.raises(LeaseLostError):
        store.worker("r.0").commit(claim, store.stage(claim), {(0, DIGEST)})
    with pytest.raises(NotFoundError):
        store.ledger.drop(3, "filtered")


def test_a_sealed_group_cannot_be_dropped_and_a_trained_one_stays_trained(store: StoreUnderTest) -> None:
    store.ledger.seal(store.batch(0, store.committed(1)))
    with pytest.raises(ConflictError, match="sealed into batch 0"):
        store.ledger.drop(0, "late")
    store.ledger.commit_step(0, [])
    assert not store.ledger.drop(0, "late")
    assert store.balance() == (1, 1, 0, 0)


def test_rows_stay_for_replay_until_a_checkpoint_covers_them(store: StoreUnderTest) -> None:
    batch = store.trained(2)
    with pytest.raises(OutOfOrderError):
        store.ledger.sweep(store.rows, 2)
    assert store.ledger.sweep(store.rows, 0) == 0
    store.rows.read(batch.rows, ["token_ids"])
    assert store.ledger.sweep(store.rows, 1) == len(batch.rows)
    with pytest.raises(RowMissingError):
        store.rows.read(batch.rows, ["token_ids"])
    assert store.ledger.sealed(0) is None
    assert store.ledger.sweep(store.rows, 1) == 0


def test_rows_of_a_sweep_that_died_halfway_are_found_by_the_next(store: StoreUnderTest) -> None:
    batch = store.trained(1)
    assert list(store.ledger.free_rows(1).rows) == list(batch.rows)
    assert store.ledger.sweep(store.rows, 1) == len(batch.rows)


def test_rows_of_dropped_groups_are_swept_too(store: StoreUnderTest) -> None:
    group = store.committed(1)[0]
    store.ledger.drop(0, "filtered")
    assert store.ledger.sweep(store.rows, 0) == len(group.rows)
    with pytest.raises(RowMissingError):
        store.rows.read_meta(group.rows)


def test_a_publish_revokes_every_attestation_before_it_attests_any(store: StoreUnderTest) -> None:
    store.admit(3)
    queue = store.attested("r.0")
    assert queue.claim(1)
    assert store.ledger.begin_publish(1, 0)
    assert not store.ledger.begin_publish(1, 0)
    with pytest.raises(NotAttestedError):
        queue.claim(1)
    store.ledger.attest(1, 0, DIGEST, ["r.1"])
    store.ledger.attest(1, 0, DIGEST, ["r.1"])
    with pytest.raises(NotAttestedError):
        queue.claim(1)
    assert store.worker("r.1").claim(1)
    store.ledger.attest(1, 0, DIGEST, ["r.0"])
    assert queue.claim(1)


def test_versions_only_grow_and_each_has_one_step_and_one_digest(store: StoreUnderTest) -> None:
    store.publish(3, 0, "r.0")
    for version in (3, 2):
        with pytest.raises(StaleVersionError):
            store.ledger.begin_publish(version, 0)
    store.ledger.begin_publish(4, 0)
    with pytest.raises(StaleVersionError):
        store.ledger.begin_publish(4, 1)
    with pytest.raises(StaleVersionError):
        store.ledger.attest(3, 0, DIGEST, ["r.0"])
    with pytest.raises(OutOfOrderError):
        store.ledger.attest(4, 1, DIGEST, ["r.0"])
    assert store.ledger.position().policy_version == 3
    store.ledger.attest(4, 0, DIGEST, ["r.0"])
    with pytest.raises(WeightsMismatchError):
        store.ledger.attest(4, 0, "other", ["r.1"])
    position = store.ledger.position()
    assert (position.policy_version, position.begun_version, position.published_step) == (4, 4, 0)


def test_epochs_grow(store: StoreUnderTest) -> None:
    assert [store.ledger.next_epoch() for _ in range(3)] == [1, 2, 3]
    assert store.ledger.position().epoch == 3


def test_a_store_that_lost_lineages_may_skip_some_and_never_goes_back(store: StoreUnderTest) -> None:
    store.ledger.start_lineage(RunPosition(lineage=3))
    assert store.ledger.position().lineage == 3
    with pytest.raises(OutOfOrderError):
        store.ledger.start_lineage(RunPosition(lineage=2))


def test_a_new_lineage_starts_empty_and_reuses_no_number(store: StoreUnderTest) -> None:
    trained = store.trained(2)
    store.admit(3)
    queue = store.worker("r.0")
    committed, claimed = queue.claim(2)
    group = store.commit(queue, committed)
    store.ledger.drop(4, "filtered")
    epoch = store.ledger.next_epoch()
    store.ledger.evaluated(1)
    store.ledger.reported(1)
    point = RunPosition(
        lineage=1,
        step=0,
        next_gid=1,
        policy_version=0,
        cursor=b"after 0",
        algorithm_state=b"then",
        evaluated_step=0,
        trained=0,
        dropped={"scorer_error": 2},
    )

    assert store.ledger.start_lineage(point) == store.ledger.start_lineage(point) == 5
    position = store.ledger.position()
    assert (position.step, position.next_gid, position.lineage_gid, position.cursor, position.published_step) == (
        0,
        5,
        5,
        b"after 0",
        -1,
    )
    assert position.algorithm_state == b"then"
    assert position.evaluated_step == position.reported_step == 0, "step 1 comes again, of other weights"
    assert position.epoch == epoch > point.epoch, "ranks refuse an epoch that is not above all they have met in"
    assert store.balance() == (2, 0, 2, 0)
    assert position.dropped == {"scorer_error": 2}
    with pytest.raises(LeaseLostError):
        queue.commit(claimed, store.stage(claimed), {(0, DIGEST)})
    with pytest.raises(NotAttestedError):
        queue.claim(1)
    assert store.ledger.sweep(store.rows, 0) == len(trained.rows) + len(group.rows)

    store.admit(1)
    store.publish(position.begun_version + 1, 0, "r.1")
    assert [claim.group.gid for claim in store.worker("r.1").claim(5)] == [5]


def test_a_store_that_lost_its_past_passes_over_the_numbers_given_out_since(store: StoreUnderTest) -> None:
    store.admit(2)
    assert store.ledger.start_lineage(RunPosition(lineage=1, next_gid=7)) == 1_000_007
    store.admit(1)
    assert list(store.ledger.live()) == [1_000_007]


def test_a_batch_of_an_old_lineage_that_was_not_swept_yet_is_not_forgotten_for_one_of_the_same_step(
    store: StoreUnderTest,
) -> None:
    old = store.trained(1)
    store.ledger.start_lineage(RunPosition(lineage=1, policy_version=0))
    store.admit(1)
    store.publish(2, 0, "r.1")
    group = store.commit(store.worker("r.1"), store.worker("r.1").claim(1)[0], 2)
    store.ledger.seal(store.batch(0, [group]))
    store.ledger.commit_step(0, [])
    assert store.ledger.sweep(store.rows, 1) == len(old.rows) + len(group.rows)


def test_the_history_is_drained_to_a_file_and_then_forgotten(store: StoreUnderTest, tmp_path: Path) -> None:
    started = time.time()
    store.trained(1)
    store.admit(1)
    store.ledger.drop(1, "scorer_error", "no\nanswer")
    path = tmp_path / "history.jsonl"
    assert store.ledger.drain("history", path) == 7
    assert store.ledger.drain("history", path) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["gid"], line["event"]) for line in lines] == [
        ("0", "admitted"),
        ("0", "claimed"),
        ("0", "committed"),
        ("0", "sealed"),
        ("0", "trained"),
        ("1", "admitted"),
        ("1", "dropped"),
    ]
    assert lines[1]["token"] == lines[2]["token"] == "r.0-1"
    assert all(started - 1 < line["time_s"] < time.time() + 1 for line in lines)
    assert store.ledger.drain("dead", tmp_path / "dead.jsonl") == 1
    dead = json.loads((tmp_path / "dead.jsonl").read_text())
    del dead["id"], dead["time_s"]
    said = {"gid": "1", "reason": "scorer_error", "error": "no\nanswer", "last_error": ""}
    assert dead == said, "nothing of its prompt, which may show images"


def test_a_reader_without_the_run_sees_the_balance(store: StoreUnderTest) -> None:
    store.committed(1)
    reader = Ledger(store.connect(), store.run)
    assert (reader.ctl, reader.counts().committed) == (0, 1)
    with pytest.raises(FencedError):
        reader.admit(sample_group(1), b"")
