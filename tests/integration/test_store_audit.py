"""The audit against a real server: it passes what is right, live and half drained, and sees what is planted."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.errors import InvalidInputError
from rolecall.store.audit import Report, audit
from rolecall.store.position import RunPosition
from rolecall.v1.trajectory_pb2 import CommittedGroup
from tests.fixtures_store import DIGEST, StoreUnderTest


def audited(store: StoreUnderTest, folder: Path) -> Report:
    return audit(store.connection, store.run, folder)


def busy_run(store: StoreUnderTest) -> None:
    """Ten groups: 0-2 trained, 3 sealed, 4 committed, 5 dropped after its commit, 6 dropped before, 7 claimed, 8 given
    back by a dead worker, 9 queued.
    """
    store.admit(10)
    store.publish(0, 0, "r.0", "r.1")
    queue = store.worker("r.0")
    committed = [store.commit(queue, claim) for claim in queue.claim(6)]
    store.ledger.seal(store.batch(0, committed[:3], "b0"))
    store.ledger.commit_step(0, [])
    store.ledger.seal(store.batch(1, committed[3:4], "b1"))
    store.ledger.note_scored([(4, 0.5), (5, 0.5)])
    store.ledger.drop(5, "without_signal")
    store.ledger.drop(6, "over_delivered", "killed its workers")
    assert [claim.group.gid for claim in queue.claim(1)] == [7]
    assert [claim.group.gid for claim in store.worker("r.1").claim(1)] == [8]
    store.ledger.expel("r.1", error="it did not answer")


def test_a_run_in_full_swing_balances(store: StoreUnderTest, tmp_path: Path) -> None:
    busy_run(store)
    report = audited(store, tmp_path)
    assert report.problems == ()
    assert dict(report.live) == {"queued": 2, "generating": 1, "committed": 1, "sealed": 1}
    assert (report.position.admitted, report.position.trained, dict(report.position.dropped), report.num_live) == (
        10,
        3,
        {"without_signal": 1, "over_delivered": 1},
        5,
    )
    assert (report.rows.needed, report.rows.garbage, report.rows.staged) == (10, 2, 0)


def test_a_run_that_never_began_balances(store: StoreUnderTest, tmp_path: Path) -> None:
    assert audited(store, tmp_path).problems == ()


def test_what_was_drained_counts_once_also_when_a_crash_drained_it_twice(store: StoreUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    store.admit(2)
    store.ledger.drain("history", path)
    whole = path.read_text()
    busy_run_of_two = store.attested("r.0")
    store.commit(busy_run_of_two, busy_run_of_two.claim(1)[0])
    path.write_text(whole + whole)
    assert audited(store, tmp_path).problems == ()
    assert audited(store, tmp_path).num_events == 4
    path.write_text(whole + whole[: len(whole) // 2 + 5])
    assert audited(store, tmp_path).problems == (), (
        "a line that is being written is still in the stream, or was written before"
    )
    store.ledger.drain("history", path)
    lines = path.read_text().splitlines()
    assert all(json.loads(line)["event"] for line in lines), (
        "a line that a crash left unfinished is cut off before the next is written"
    )
    assert audited(store, tmp_path).problems == ()


def test_a_drain_whose_deletion_was_lost_is_no_second_training(store: StoreUnderTest, tmp_path: Path) -> None:
    store.trained(2)
    stream = f"{{rl:{store.run}}}:history"
    before = store.connection.command("XRANGE", stream, "-", "+")
    store.ledger.drain("history", tmp_path / "history.jsonl")
    store.connection.command("DEL", stream)
    for entry, fields in before:
        store.connection.command("XADD", stream, entry, *(text for pair in fields.items() for text in pair))
    report = audited(store, tmp_path)
    assert (report.problems, report.num_events) == ((), len(before))


def test_a_new_lineage_undoes_what_came_after_its_checkpoint(store: StoreUnderTest, tmp_path: Path) -> None:
    busy_run(store)
    point = store.ledger.position()
    store.ledger.seal(store.batch(1, [group for _, group in store.ledger.read_committed("0", 1, 0)], "b1"))
    store.ledger.commit_step(1, [])
    store.ledger.drop(4, "without_signal")
    store.ledger.drain("history", tmp_path / "history.jsonl")
    store.ledger.start_lineage(
        RunPosition(
            lineage=1,
            step=point.step,
            next_gid=point.next_gid,
            policy_version=0,
            trained=point.trained,
            dropped=point.dropped,
        )
    )
    report = audited(store, tmp_path)
    assert report.problems == ()
    assert (report.num_undone, report.position.trained, report.position.num_dropped, report.num_live) == (5, 3, 2, 0)
    assert report.rows.garbage == 12
    store.admit(2)
    store.publish(report.position.begun_version + 1, 1, "r.2")
    store.commit(store.worker("r.2"), store.worker("r.2").claim(1)[0], report.position.begun_version + 1)
    assert audited(store, tmp_path).problems == ()


def test_a_lineage_from_a_checkpoint_that_the_history_does_not_know_is_seen(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    store.ledger.start_lineage(RunPosition(lineage=1, step=2, next_gid=4, trained=4, dropped={"late": 1}))
    assert any(
        "lineage 1 began from a checkpoint with 4 trained and 1 dropped, of which the history knows 0 and 0" in text
        for text in audited(store, tmp_path).problems
    )


def test_an_audit_beside_a_living_run_finds_nothing(store: StoreUnderTest, tmp_path: Path) -> None:
    done = threading.Event()

    def live() -> None:
        store.publish(0, 0, "r.0")
        for step in range(30):
            store.admit(4)
            queue = store.worker("r.0")
            groups = [store.commit(queue, claim) for claim in queue.claim(4)]
            store.ledger.seal(store.batch(step, groups[:2], f"b{step}"))
            store.ledger.commit_step(step, [])
            for group in groups[2:]:
                store.ledger.drop(group.gid, "without_signal")
                store.rows.delete(group.rows)
            store.ledger.drain("history", tmp_path / "history.jsonl")
            if step % 3 == 0:
                store.ledger.sweep(store.rows, step)
        done.set()

    running = threading.Thread(target=live)
    running.start()
    audits = 0
    while not done.is_set():
        assert audited(store, tmp_path).problems == ()
        audits += 1
    running.join(60)
    assert audits > 1
    assert audited(store, tmp_path).position.trained == 60


def key(store: StoreUnderTest, name: str) -> str:
    return f"{{rl:{store.run}}}:{name}"


def trained_twice(store: StoreUnderTest) -> None:
    store.connection.command("XADD", key(store, "history"), "*", "gid", 1, "event", "trained", "step", 0)


def trained_without_seal(store: StoreUnderTest) -> None:
    store.connection.command("XADD", key(store, "history"), "*", "gid", 4, "event", "trained", "step", 1)


def lost(store: StoreUnderTest) -> None:
    store.connection.command("ZREM", key(store, "live"), 9)


def uncounted(store: StoreUnderTest) -> None:
    store.connection.command("HINCRBY", key(store, "run"), "trained", -1)


def dropped_and_still_live(store: StoreUnderTest) -> None:
    store.connection.command("ZADD", key(store, "live"), 6, 6)


def committed_by_a_zombie(store: StoreUnderTest) -> None:
    store.connection.command(
        "XADD", key(store, "history"), "*", "gid", 8, "event", "committed", "token", "r.1-1", "versions", "0"
    )


def one_token_twice(store: StoreUnderTest) -> None:
    store.connection.command("XADD", key(store, "history"), "*", "gid", 8, "event", "claimed", "token", "r.1-1")


def claimed_while_held(store: StoreUnderTest) -> None:
    store.connection.command("XADD", key(store, "history"), "*", "gid", 7, "event", "claimed", "token", "r.1-9")


def entry_twice(store: StoreUnderTest) -> None:
    store.connection.command("XADD", key(store, "trajectories"), "*", "gid", 4, "group", "")


def consumer_deleted_first(store: StoreUnderTest) -> None:
    store.connection.command("XGROUP", "DELCONSUMER", key(store, "prompts"), "rollout", "r.0")


def held_by_a_stranger(store: StoreUnderTest) -> None:
    store.connection.command("DEL", key(store, "w:r.0"))


def row_gone(store: StoreUnderTest) -> None:
    committed = [group for _, group in store.ledger.read_committed("0", 10, 0)]
    store.rows.delete(list(committed[0].rows)[:1])


def row_of_nobody(store: StoreUnderTest) -> None:
    store.connection.command("HSET", f"{{rl:{store.run}:0}}:row:5/0:r.9-1", "meta", "")


def group_of_nobody(store: StoreUnderTest) -> None:
    store.connection.command("HSET", key(store, "g:2"), "state", "admitted", "batch", "77")


def batch_gone(store: StoreUnderTest) -> None:
    store.connection.command("DEL", key(store, "batch:0"))


def never_admitted(store: StoreUnderTest) -> None:
    store.connection.command("HINCRBY", key(store, "run"), "next_gid", 1)


PLANTED: dict[Callable[[StoreUnderTest], None], str] = {
    trained_twice: "trained twice: 1",
    trained_without_seal: "trained although committed: 4",
    lost: "lost: live in the history, gone from the ledger: 9",
    uncounted: "the ledger does not balance: 10 admitted, but 2 trained + 2 dropped + 5 live = 9",
    dropped_and_still_live: "live in the ledger although dropped: 6",
    committed_by_a_zombie: "committed by a worker that did not hold it: 8 (r.1-1)",
    one_token_twice: "claimed twice under one token: 8 (r.1-1)",
    claimed_while_held: "claimed while another held it: 7 (r.1-9)",
    entry_twice: "entries of trajectories that belong to no group there: 4",
    consumer_deleted_first: "handed out and in nobody's hands: 7",
    held_by_a_stranger: "hold groups without an attestation: r.0",
    row_gone: "rows that are needed and gone: 3/0",
    row_of_nobody: "rows that belong to nobody and never expire: 5/0:r.9-1",
    group_of_nobody: "groups that are neither live nor in a batch that is kept: 2",
    batch_gone: "batches that are neither kept nor freed: 0",
    never_admitted: "never admitted, though below the next gid: 10",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_audit_sees_a_planted_violation(
    store: StoreUnderTest, tmp_path: Path, plant: Callable[[StoreUnderTest], None]
) -> None:
    busy_run(store)
    assert audited(store, tmp_path).problems == ()
    plant(store)
    found = audited(store, tmp_path).problems
    assert any(text.startswith(PLANTED[plant]) for text in found), found


def test_rows_of_greedy_responses_are_kept_and_deleted_with_their_groups(store: StoreUnderTest, tmp_path: Path) -> None:
    """Groups 0 trained, 1 dropped, 2 committed: of each a greedy row beside its two."""
    store.admit(3, greedy_response=True)
    queue = store.attested("r.0")
    groups = [store.commit(queue, claim) for claim in queue.claim(3)]
    store.ledger.seal(store.batch(0, groups[:1]))
    store.ledger.commit_step(0, [])
    store.ledger.drop(1, "without_signal")
    report = audited(store, tmp_path)
    assert (report.problems, report.rows.needed, report.rows.garbage) == ((), 6, 3)
    assert store.ledger.sweep(store.rows, 0) == 3
    assert (
        audited(store, tmp_path).problems,
        len(store.rows.read([groups[0].greedy_row, groups[2].greedy_row], ["token_ids"])),
    ) == ((), 2)
    assert store.ledger.sweep(store.rows, 1) == 3
    report = audited(store, tmp_path)
    assert (report.problems, report.rows.needed, report.rows.garbage) == ((), 3, 0)
    store.rows.delete([groups[2].greedy_row])
    assert audited(store, tmp_path).problems == ("rows that are needed and gone: 2/2",)


def test_a_group_that_wants_a_greedy_response_is_not_committed_without_it(store: StoreUnderTest) -> None:
    store.admit(2, greedy_response=True)
    queue = store.attested("r.0")
    claim, other = queue.claim(2)
    group = store.stage(claim)
    without = CommittedGroup(gid=group.gid, rows=group.rows)
    foreign = CommittedGroup(gid=group.gid, rows=group.rows, greedy_row=store.stage(other).greedy_row)
    foreign.greedy_row.token = "r.1-1"
    for wrong in (without, foreign):
        with pytest.raises(InvalidInputError, match="needs 2 rows and a greedy one"):
            queue.commit(claim, wrong, {(0, DIGEST)})
    assert queue.commit(claim, group, {(0, DIGEST)})
