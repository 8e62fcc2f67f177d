"""The rollouts' scripts against a real server: claims, leases, fences, commits, hand-overs."""

import threading
import time

import pytest

from rolecall.errors import (
    InvalidInputError,
    LeaseLostError,
    NotAttestedError,
    StoreUnavailableError,
    WrongVersionError,
)
from rolecall.store.connection import Connection
from rolecall.store.position import GroupState
from rolecall.store.prompts import PromptQueue
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
    for first in range(0, 200_000, 20_000):
        bounds = [word for number in range(first, first + 20_000) for word in (f"{number}-7", "8")]
        store.connection.command("HSET", f"{{rl:{store.run}}}:suspects", *bounds)
    assert quickest_s() < 20 * before_s  # to read them all takes a hundred times as long
