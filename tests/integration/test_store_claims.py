"""The rollouts' scripts against a real server: leases, fences, zombies, hand-overs."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.errors import (
    InvalidInputError,
    LeaseLostError,
    NotAttestedError,
    StoreUnavailableError,
    WrongVersionError,
)
from rolecall.store.connection import Connection
from rolecall.store.ledger import PENDING_COUNT
from rolecall.store.position import GroupState
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.v1.trajectory_pb2 import CommittedGroup
from tests.fixtures_store import DIGEST, ForgetfulRedis, StoreUnderTest


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


def test_nothing_is_given_out_on_a_server_before_the_controller_has_confirmed_it(store: StoreUnderTest) -> None:
    store.admit(1)
    queue = store.attested("r.0")
    store.connection.command("HSET", f"{{rl:{store.run}}}:run", "server", "another")
    with pytest.raises(NotAttestedError, match="not confirmed the ledger on this server"):
        queue.claim(1)
    store.ledger.beat()
    assert [claim.group.gid for claim in queue.claim(1)] == [0]


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


def test_what_was_claimed_before_an_outage_is_in_hand_after_it(store: StoreUnderTest) -> None:
    """The server acts, and its answer is lost for as long as the client asks: nobody would renew what nobody knows to
    hold.
    """
    store.admit(5)
    store.publish(0, 0, "r.0")
    assert store.section.url is not None
    client = ForgetfulRedis.from_url(store.section.url.get_secret_value(), protocol=2)
    assert isinstance(client, ForgetfulRedis)
    queue = PromptQueue(Connection(client, retry_s=0.0), store.run, "r.0")
    assert [claim.group.gid for claim in queue.claim(1)] == [0]
    client.lose = 1
    with pytest.raises(StoreUnavailableError):
        queue.claim(2)
    assert [entry.delivery for entry in store.ledger.pending()] == [1, 1, 1]
    store.ledger.begin_publish(1, 1)
    with pytest.raises(NotAttestedError):
        queue.claim(3)
    store.ledger.attest(1, 1, DIGEST, ["r.0"])
    assert [(claim.group.gid, claim.token) for claim in queue.claim(3)] == [(1, "r.0-1"), (2, "r.0-1")]
    assert [claim.group.gid for claim in queue.claim(2)] == [3, 4]
    client.close()


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
    admission.join(30)
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
    assert 0.05 <= after[kept.entry_id] - before[kept.entry_id] < 60
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


def test_a_claim_costs_the_same_however_many_groups_lost_their_worker(store: StoreUnderTest) -> None:
    """When half of a large fleet dies, everybody who is left asks once a second, and the store answers one at a
    time.
    """
    store.admit(1)
    worker = store.attested("r.0")

    def quickest_s() -> float:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            worker.claim(8)
            times.append(time.perf_counter() - began)
        return min(times)

    before_s = quickest_s()
    bounds = [word for number in range(20_000) for word in (f"{number}-7", "8")]
    store.connection.command("HSET", f"{{rl:{store.run}}}:suspects", *bounds)
    assert quickest_s() < 5 * before_s
