"""The rollouts' scripts against a real server: leases, fences, zombies, hand-overs."""

import json
import threading
import time
from pathlib import Path

import pytest

from rolecall.errors import InvalidInputError, LeaseLostError, NotAttestedError, WrongVersionError
from rolecall.store.position import GroupState
from rolecall.v1.trajectory_pb2 import CommittedGroup
from tests.fixtures_store import DIGEST, StoreUnderTest


def test_only_a_worker_attested_at_the_current_version_may_claim(store: StoreUnderTest) -> None:
    store.admit(1)
    with pytest.raises(NotAttestedError):
        store.worker("r.0").claim(1)
    store.publish(0, 0, "r.0")
    store.publish(1, 0, "r.1")
    with pytest.raises(NotAttestedError):
        store.worker("r.0").claim(1)
    claim = store.worker("r.1").claim(1)[0]
    assert (claim.token, claim.deliveries, claim.group.gid) == ("r.1-1", 1, 0)


def test_claims_come_oldest_first_and_no_two_workers_get_the_same(store: StoreUnderTest) -> None:
    store.admit(5)
    store.publish(0, 0, "r.0", "r.1")
    first, second = store.worker("r.0").claim(3), store.worker("r.1").claim(9)
    assert [claim.group.gid for claim in first + second] == [0, 1, 2, 3, 4]
    assert store.worker("r.0").claim(1) == []
    assert store.worker("r.0").claim(0) == []
    counts = store.ledger.counts()
    assert (counts.queued, counts.generating) == (0, 5)


def test_the_trace_of_the_admission_travels_with_the_claim(store: StoreUnderTest) -> None:
    store.admit(1)
    assert store.attested("r.0").claim(1)[0].traceparent == ""


def test_a_claim_whose_answer_was_lost_is_answered_again(store: StoreUnderTest) -> None:
    store.admit(4)
    store.attested("r.0")
    prefix = f"{{rl:{store.run}}}:"
    first = store.connection.script("claim", [prefix], ["r.0", 2, 7])
    assert store.connection.script("claim", [prefix], ["r.0", 2, 7]) == first
    assert store.ledger.counts().generating == 2
    other = store.connection.script("claim", [prefix], ["r.0", 2, 8])
    assert {entry[0] for entry in other[2]}.isdisjoint({entry[0] for entry in first[2]})


def test_a_claim_that_the_network_kept_back_claims_nothing_for_nobody(store: StoreUnderTest) -> None:
    store.admit(3)
    store.attested("r.0")
    prefix = f"{{rl:{store.run}}}:"
    store.connection.script("claim", [prefix], ["r.0", 1, 7])
    store.connection.script("claim", [prefix], ["r.0", 1, 8])
    assert store.connection.script("claim", [prefix], ["r.0", 1, 7])[2] == []
    assert store.ledger.counts().generating == 2


def test_waiting_ends_with_new_work_and_after_its_timeout(store: StoreUnderTest) -> None:
    queue = store.attested("r.0")
    assert queue.claim(1) == []
    started = time.monotonic()
    assert not queue.wait(0.1)
    assert time.monotonic() - started > 0.05
    admission = threading.Timer(0.1, store.admit, [1])
    admission.start()
    assert queue.wait(5)
    admission.join(5)
    assert len(queue.claim(1)) == 1


def test_a_wait_sees_work_that_came_between_the_claim_and_it(store: StoreUnderTest) -> None:
    queue = store.attested("r.0")
    assert queue.claim(1) == []
    store.admit(1)
    assert queue.wait(1)


def test_a_commit_makes_the_group_exist_once(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    claim = queue.claim(1)[0]
    group = store.stage(claim)
    assert queue.commit(claim, group, {(0, DIGEST)})
    assert not queue.commit(claim, group, {(0, DIGEST)})
    assert [item.gid for _, item in store.ledger.read_committed("0", 10, 0)] == [0]
    assert store.ledger.live() == {0: GroupState.COMMITTED}
    assert queue.renew([claim]) == [claim]
    assert queue.release([claim]) == 0


def test_tokens_of_weights_that_were_never_attested_are_refused(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    claim = queue.claim(1)[0]
    group = store.stage(claim)
    for spans in ({(0, "other")}, {(0, DIGEST), (1, DIGEST)}):
        with pytest.raises(WrongVersionError):
            queue.commit(claim, group, spans)
    assert store.ledger.live() == {0: GroupState.ADMITTED}
    assert queue.commit(claim, group, {(0, DIGEST)})


def test_a_group_that_spans_two_attested_versions_is_committed(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    claim = queue.claim(1)[0]
    store.publish(1, 1, "r.0")
    assert queue.commit(claim, store.stage(claim), {(0, DIGEST), (1, DIGEST)})


def test_a_commit_must_carry_all_rows_under_the_claims_own_token(store: StoreUnderTest) -> None:
    store.admit(2)
    queue = store.attested("r.0")
    claim, other = queue.claim(2)
    group = store.stage(claim)
    for wrong in (CommittedGroup(gid=0, rows=group.rows[:1]), CommittedGroup(gid=1, rows=group.rows)):
        with pytest.raises(InvalidInputError):
            queue.commit(claim, wrong, {(0, DIGEST)})
    with pytest.raises(InvalidInputError):
        queue.commit(claim, store.stage(other), {(0, DIGEST)})


def test_released_groups_are_claimed_first_and_the_delivery_does_not_count(store: StoreUnderTest) -> None:
    store.admit(3)
    store.publish(0, 0, "r.0", "r.1")
    first = store.worker("r.0").claim(2)
    assert store.worker("r.0").release(first[1:]) == 1
    assert store.worker("r.0").release(first[1:]) == 0
    counts = store.ledger.counts()
    assert (counts.queued, counts.generating) == (2, 1)
    again = store.worker("r.1").claim(2)
    assert [(claim.group.gid, claim.deliveries) for claim in again] == [(1, 1), (2, 1)]
    assert again[0].token == "r.1-2", "the fence grows although the delivery does not count"


def test_a_worker_that_claims_what_it_released_gets_another_token(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    first = queue.claim(1)[0]
    queue.release([first])
    second = queue.claim(1)[0]
    assert first.token != second.token
    assert queue.renew([first, second]) == [first]
    assert queue.release([first]) == 0
    with pytest.raises(LeaseLostError):
        queue.commit(first, store.stage(first), {(0, DIGEST)})
    assert queue.commit(second, store.stage(second), {(0, DIGEST)})


def test_an_expelled_worker_is_a_zombie_to_every_script(store: StoreUnderTest) -> None:
    store.admit(2)
    store.publish(0, 0, "r.0", "r.1")
    zombie = store.worker("r.0")
    claims = zombie.claim(2)
    assert store.ledger.expel("r.0") == []
    assert store.ledger.expel("r.0") == []
    with pytest.raises(NotAttestedError):
        zombie.claim(1)
    assert zombie.renew(claims) == claims
    with pytest.raises(LeaseLostError):
        zombie.commit(claims[0], store.stage(claims[0]), {(0, DIGEST)})
    again = store.worker("r.1").claim(2)
    assert [(claim.group.gid, claim.deliveries) for claim in again] == [(0, 2)]
    assert zombie.renew(claims) == claims, "a renewal must not steal the entry back"
    assert zombie.release(claims) == 0
    assert store.worker("r.1").commit(again[0], store.stage(again[0]), {(0, DIGEST)})
    with pytest.raises(LeaseLostError):
        zombie.commit(claims[0], store.stage(claims[0]), {(0, DIGEST)})
    assert store.balance() == (2, 0, 0, 2)


def test_rows_of_a_zombie_are_rows_nobody_reads(store: StoreUnderTest) -> None:
    store.admit(1)
    store.publish(0, 0, "r.0", "r.1")
    late = store.worker("r.0").claim(1)[0]
    store.ledger.expel("r.0")
    claim = store.worker("r.1").claim(1)[0]
    group = store.commit(store.worker("r.1"), claim)
    stale = store.stage(late)
    assert {row.token for row in stale.rows}.isdisjoint({row.token for row in group.rows})
    assert [row.token for row in store.ledger.read_committed("0", 1, 0)[0][1].rows] == ["r.1-2", "r.1-2"]


def test_an_expelled_worker_may_be_attested_again(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    queue.claim(1)
    store.ledger.expel("r.0")
    store.publish(1, 0, "r.0")
    assert queue.claim(1)[0].token == "r.0-2"


def test_a_group_that_kills_its_workers_is_held_back_to_be_dropped(store: StoreUnderTest) -> None:
    store.admit(2)
    store.publish(0, 0, "r.0", "r.1", "r.2")
    store.worker("r.0").claim(1)
    assert store.ledger.expel("r.0", max_deliveries=2) == []
    store.worker("r.1").claim(1)
    assert store.ledger.expel("r.1", max_deliveries=2, error="signal 11") == [(0, "r.1: signal 11")]
    assert store.ledger.overdelivered() == [(0, "r.1: signal 11")]
    assert [claim.group.gid for claim in store.worker("r.2").claim(5)] == [1]
    assert store.ledger.drop(0, "poison", "killed 2 workers")
    assert store.ledger.overdelivered() == []
    assert store.balance() == (2, 0, 1, 1)


def test_a_group_whose_generation_failed_is_abandoned_at_once_and_keeps_the_error(store: StoreUnderTest, tmp_path: Path) -> None:
    store.admit(1)
    store.publish(0, 0, "r.0", "r.1")
    first = store.worker("r.0").claim(1)[0]
    assert store.worker("r.0").abandon(first, "CUDA out of memory", max_deliveries=2)
    assert not store.worker("r.0").abandon(first, "CUDA out of memory", max_deliveries=2), "a lost answer counts nothing twice"
    assert store.ledger.overdelivered() == []
    second = store.worker("r.1").claim(1)[0]
    assert second.deliveries == 2
    assert store.worker("r.1").abandon(second, "sampled NaN", max_deliveries=2)
    assert store.ledger.overdelivered() == [(0, "r.1: sampled NaN")]
    store.ledger.drop(0, "over_delivered", "given to a rollout 2 times")
    store.ledger.drain("dead", tmp_path / "dead.jsonl")
    dead = json.loads((tmp_path / "dead.jsonl").read_text())
    assert (dead["error"], dead["last_error"]) == ("given to a rollout 2 times", "r.1: sampled NaN")


def test_the_last_error_that_is_known_outlives_a_silent_death(store: StoreUnderTest) -> None:
    store.admit(1)
    store.publish(0, 0, "r.0", "r.1")
    store.worker("r.0").abandon(store.worker("r.0").claim(1)[0], "sampled NaN")
    store.worker("r.1").claim(1)
    assert store.ledger.expel("r.1", max_deliveries=2) == [(0, "r.0: sampled NaN")]


def test_a_group_delivered_before_is_handed_out_alone(store: StoreUnderTest) -> None:
    store.admit(4)
    store.publish(0, 0, "r.0", "r.1", "r.2")
    store.worker("r.0").claim(2)
    store.ledger.expel("r.0")
    busy = store.worker("r.1")
    suspect = busy.claim(5)
    assert [(claim.group.gid, claim.deliveries) for claim in suspect] == [(0, 2)]
    assert busy.claim(5) == [], "nothing else may be at risk beside it"
    store.commit(busy, suspect[0])
    other = store.worker("r.2")
    new = store.worker("r.2").claim(1)
    assert [claim.group.gid for claim in new] == [1], "an idle worker takes the suspect first"
    assert [claim.group.gid for claim in busy.claim(5)] == [2, 3]
    other.release(new)
    assert busy.claim(5) == [], "a worker that holds others must not take it"
    assert [claim.group.gid for claim in other.claim(5)] == [1]


def test_deliveries_that_ended_in_a_failed_publish_do_not_make_poison(store: StoreUnderTest) -> None:
    store.admit(1)
    for version in range(4):
        store.publish(version, 0, f"r.{version}")
        claim = store.worker(f"r.{version}").claim(1)[0]
        assert claim.deliveries == 1
        assert store.ledger.expel(f"r.{version}", max_deliveries=2, excused=True) == []


def test_an_unrenewed_entry_is_reaped_from_a_living_worker(store: StoreUnderTest) -> None:
    store.admit(2)
    queue = store.attested("r.0")
    forgotten, kept = queue.claim(2)
    time.sleep(0.3)
    assert queue.renew([kept]) == []
    idle = {entry.entry_id: entry.idle_s for entry in store.ledger.pending()}
    assert idle[kept.entry_id] <= idle[forgotten.entry_id] - 0.3
    assert [(entry.consumer, entry.delivery) for entry in store.ledger.pending()] == [("r.0", 1), ("r.0", 1)]
    store.ledger.reap("r.0", forgotten.entry_id)
    store.ledger.reap("r.1", kept.entry_id)
    assert queue.renew([forgotten, kept]) == [forgotten]
    store.commit(queue, kept)
    assert [(claim.group.gid, claim.deliveries) for claim in queue.claim(1)] == [(0, 2)]


def test_a_renewal_neither_counts_as_delivery_nor_changes_the_token(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    claim = queue.claim(1)[0]
    for _ in range(3):
        assert queue.renew([claim]) == []
    assert store.ledger.pending()[0].delivery == 1
    assert queue.commit(claim, store.stage(claim), {(0, DIGEST)})


def test_many_workers_at_once_own_disjoint_groups(store: StoreUnderTest) -> None:
    store.admit(60)
    consumers = [f"r.{i}" for i in range(4)]
    store.publish(0, 0, *consumers)
    owned: dict[str, list[int]] = {}

    def pull(consumer: str) -> None:
        queue, gids = store.worker(consumer), []
        while claims := queue.claim(3):
            gids += [claim.group.gid for claim in claims]
            for claim in claims:
                store.commit(queue, claim)
        owned[consumer] = gids

    threads = [threading.Thread(target=pull, args=[consumer]) for consumer in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(gid for gids in owned.values() for gid in gids) == list(range(60))
    assert store.balance() == (60, 0, 0, 60)
    assert sorted(group.gid for _, group in store.ledger.read_committed("0", 100, 0)) == list(range(60))
