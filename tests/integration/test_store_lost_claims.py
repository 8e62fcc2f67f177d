"""Groups whose worker is lost, against a real server: zombies, poison prompts, suspects in quarters, reaping."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.errors import (
    LeaseLostError,
    NotAttestedError,
)
from rolecall.store.ledger import PENDING_COUNT
from rolecall.store.prompts import Claim
from tests.fixtures_store import DIGEST, StoreUnderTest


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


def test_a_poison_prompt_is_found_in_four_kills_and_takes_nobody_with_it(store: StoreUnderTest) -> None:
    """Group 7 of 32 kills every worker that holds it: 32 are in hand then, 8, 2 and at last it alone."""
    store.admit(40)
    in_hand: list[list[int]] = []
    while not (over := store.ledger.reap([])):
        worker = f"r.{len(in_hand)}"
        store.publish(len(in_hand), 0, worker)
        queue, held = store.worker(worker), list[Claim]()
        while claims := queue.claim(32 - len(held)):
            held += claims
        in_hand.append([claim.group.gid for claim in held])
        if 7 in in_hand[-1]:
            store.ledger.expel(worker, 3, error="signal 9")
        else:
            for claim in held:
                store.commit(queue, claim)
    assert [len(gids) for gids in in_hand if 7 in gids] == [32, 8, 2, 1]
    assert over == [(7, f"r.{len(in_hand) - 1}: signal 9")]
    assert store.ledger.drop(7, "poison", "killed 4 workers")
    assert store.ledger.reap([]) == []
    assert store.balance() == (40, 0, 1, 39)


@pytest.mark.parametrize("in_company", [1, 4])
def test_three_preemptions_in_a_row_cost_a_healthy_group_nothing(store: StoreUnderTest, in_company: int) -> None:
    store.admit(in_company)
    for version in range(3):
        store.publish(version, 0, f"r.{version}")
        assert store.worker(f"r.{version}").claim(in_company)[0].group.gid == 0
        assert store.ledger.expel(f"r.{version}", max_deliveries=3, error="silent for 5 s") == []
    store.publish(3, 0, "r.3")
    queue = store.worker("r.3")
    for _ in range(in_company):
        (claim,) = queue.claim(in_company)
        store.commit(queue, claim, 3)
    assert store.balance() == (in_company, 0, 0, in_company)


def test_deaths_and_failures_of_its_own_are_counted_apart(store: StoreUnderTest) -> None:
    store.admit(1)
    for version in range(5):
        store.publish(version, 0, f"r.{version}")
        queue = store.worker(f"r.{version}")
        claim = queue.claim(1)[0]
        if version % 2:
            queue.abandon(claim, "it failed", max_deliveries=3)
        else:
            store.ledger.expel(f"r.{version}", max_deliveries=3)
        assert store.ledger.reap([]) == []
    store.publish(5, 0, "r.5")
    store.worker("r.5").abandon(store.worker("r.5").claim(1)[0], "it failed", max_deliveries=3)
    assert store.ledger.reap([]) == [(0, "r.5: it failed")]


def test_a_group_whose_generation_failed_is_abandoned_at_once_and_keeps_the_error(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    store.admit(1)
    store.publish(0, 0, "r.0", "r.1")
    first = store.worker("r.0").claim(1)[0]
    assert store.worker("r.0").abandon(first, "CUDA out of memory", max_deliveries=2)
    assert not store.worker("r.0").abandon(first, "CUDA out of memory", max_deliveries=2), (
        "a lost answer counts nothing twice"
    )
    assert store.ledger.reap([]) == []
    second = store.worker("r.1").claim(1)[0]
    assert second.deliveries == 2
    assert store.worker("r.1").abandon(second, "sampled NaN", max_deliveries=2)
    assert store.ledger.reap([]) == [(0, "r.1: sampled NaN")]
    store.ledger.drop(0, "over_delivered", "given to a rollout 2 times")
    store.ledger.drain("dead", tmp_path / "dead.jsonl")
    dead = json.loads((tmp_path / "dead.jsonl").read_text())
    assert (dead["error"], dead["last_error"]) == ("given to a rollout 2 times", "r.1: sampled NaN")


def test_the_last_error_that_is_known_outlives_a_silent_death(store: StoreUnderTest) -> None:
    store.admit(1)
    store.publish(0, 0, "r.0", "r.1")
    store.worker("r.0").abandon(store.worker("r.0").claim(1)[0], "sampled NaN")
    store.worker("r.1").claim(1)
    assert store.ledger.expel("r.1", max_deliveries=1) == []
    store.publish(1, 0, "r.2")
    store.worker("r.2").claim(1)
    assert store.ledger.expel("r.2", max_deliveries=1) == [(0, "r.0: sampled NaN")]


def test_groups_that_died_together_are_handed_out_in_quarters_to_several_workers(store: StoreUnderTest) -> None:
    store.admit(10)
    store.publish(0, 0, "r.0", "r.1", "r.2", "r.3")
    store.worker("r.0").claim(8)
    store.ledger.expel("r.0")
    busy = store.worker("r.1")
    first = busy.claim(5)
    assert [(claim.group.gid, claim.deliveries, claim.max_in_hand) for claim in first] == [(0, 2, 2), (1, 2, 2)]
    assert busy.claim(5) == [], "nothing else may be at risk beside them"
    assert [claim.group.gid for claim in store.worker("r.2").claim(5)] == [2, 3], "another worker need not wait"
    store.commit(busy, first[0])
    assert [claim.group.gid for claim in busy.claim(5)] == [4]
    assert [claim.group.gid for claim in store.worker("r.3").claim(1)] == [5]
    assert [claim.group.gid for claim in store.worker("r.3").claim(3)] == [6]


def test_a_worker_that_holds_more_than_a_suspect_may_be_beside_gets_new_groups(store: StoreUnderTest) -> None:
    store.admit(8)
    store.publish(0, 0, "r.0", "r.1")
    holds = store.worker("r.1").claim(2)
    store.worker("r.0").claim(4)
    store.ledger.expel("r.0")
    new = store.worker("r.1").claim(9)
    assert [(claim.group.gid, claim.max_in_hand) for claim in new] == [(6, 0), (7, 0)]
    assert store.worker("r.1").release([*holds, *new]) == 4
    assert [claim.group.gid for claim in store.worker("r.1").claim(9)] == [0, 1, 6, 7], (
        "the oldest first, and no suspect beside them"
    )


def test_a_failure_of_its_own_makes_no_suspect(store: StoreUnderTest) -> None:
    store.admit(3)
    queue = store.attested("r.0")
    queue.abandon(queue.claim(1)[0], "not sampled within 600 s", max_deliveries=3)
    assert [(claim.group.gid, claim.deliveries, claim.max_in_hand) for claim in queue.claim(9)] == [
        (0, 2, 0),
        (1, 1, 0),
        (2, 1, 0),
    ]


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
    seen = store.ledger.pending()
    time.sleep(0.05)
    assert queue.renew([kept]) == []
    before, after = ({entry.entry_id: entry.renewed_at_s for entry in look} for look in (seen, store.ledger.pending()))
    assert after[forgotten.entry_id] == before[forgotten.entry_id]
    assert 0.04 <= after[kept.entry_id] - before[kept.entry_id] < 60  # slept .05 s; the store counts milliseconds
    assert [(entry.consumer, entry.delivery) for entry in seen] == [("r.0", 1), ("r.0", 1)]
    store.ledger.reap(seen)  # of which one was renewed meanwhile
    assert queue.renew([forgotten, kept]) == [forgotten]
    store.commit(queue, kept)
    assert [(claim.group.gid, claim.deliveries) for claim in queue.claim(1)] == [(0, 2)]


def test_what_was_claimed_anew_since_the_look_is_not_reaped(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    queue.release(queue.claim(1))
    queue.claim(1)
    store.ledger.reap([replace(entry, delivery=1) for entry in store.ledger.pending()])
    assert [entry.delivery for entry in store.ledger.pending()] == [2]


def test_all_entries_in_workers_hands_are_listed_whatever_lies_before_them(store: StoreUnderTest) -> None:
    """More than one page of them, the oldest given back."""
    store.admit(1)
    store.publish(0, 0, "r.0")
    prompts, more = f"{{rl:{store.run}}}:prompts", 2 * PENDING_COUNT + 5
    store.connection.pipeline([("XADD", prompts, "*", "gid", 1, "group", b"", "traceparent", "") for _ in range(more)])
    store.connection.command(
        "XREADGROUP", "GROUP", "rollout", "~free", "COUNT", PENDING_COUNT + 2, "STREAMS", prompts, ">"
    )
    store.connection.command("XREADGROUP", "GROUP", "rollout", "r.0", "COUNT", more, "STREAMS", prompts, ">")
    pending = store.ledger.pending()
    assert (len(pending), {entry.consumer for entry in pending}) == (more + 1 - PENDING_COUNT - 2, {"r.0"})
    assert len({entry.entry_id for entry in pending}) == len(pending)
