"""Claims by the places of environments: a group whose environment has none is passed over, waits for whoever has some,
and keeps nobody from what was admitted behind it.
"""

from rolecall.store import scripts
from tests.fixtures_store import DIGEST, StoreUnderTest

MOVE = """for _, pending in ipairs(redis.call('XPENDING', KEYS[1], 'rollout', '-', '+', 100)) do
  redis.call('XCLAIM', KEYS[1], 'rollout', '~free', 0, pending[1], 'JUSTID')
end"""
"""Puts all that waits in the one list of an earlier release."""


def test_groups_of_an_environment_without_places_keep_nobody_from_those_behind_them(store: StoreUnderTest) -> None:
    store.admit(2, environment="game")
    store.admit(2)
    store.admit(2, environment="tools")
    queue, other = store.attested("r.0"), store.worker("r.1")
    store.publish(1, 0, "r.0", "r.1")
    claims = queue.claim(3, {"game": 0, "tools": 1})
    assert [claim.group.gid for claim in claims] == [2, 3, 4]
    assert queue.claim(3, {"game": 0, "tools": 0}) == []
    assert queue.is_short_of_places
    assert store.ledger.counts().queued == 3, "what is passed over waits as what was released"
    taken = other.claim(1, {"game": 2})
    assert [(claim.group.gid, claim.deliveries) for claim in taken] == [(0, 1)], "nothing is counted against it"
    assert [claim.group.gid for claim in queue.claim(3)] == [1, 5], "places that are not named have no bound"
    assert queue.claim(3, {"game": 0}) == []
    assert not queue.is_short_of_places, "no group waits for one"


def test_what_is_passed_over_time_and_again_is_no_dead_letter(store: StoreUnderTest) -> None:
    store.admit(1, environment="game")
    queue = store.attested("r.0")
    for _ in range(5):
        assert queue.claim(1, {"game": 0}) == []
    for deliveries in (1, 2):
        (claim,) = queue.claim(1, {"game": 1})
        assert claim.deliveries == deliveries
        queue.abandon(claim, "it failed", max_deliveries=3)
    (claim,) = queue.claim(1, {"game": 1})
    assert queue.commit(claim, store.stage(claim), {(0, DIGEST)})
    assert store.balance() == (1, 0, 0, 1)
    assert not store.connection.command("EXISTS", f"{{rl:{store.run}}}:played"), "it is forgotten with the group"


def test_more_than_a_page_of_waiting_groups_hides_none_behind_them(store: StoreUnderTest) -> None:
    store.admit(1100, environment="game")
    queue = store.attested("r.0")
    assert queue.claim(8, {"game": 0}) == []
    store.admit(1, environment="tools")
    assert queue.claim(8, {"game": 0, "tools": 0}) == []
    (claim,) = queue.claim(8, {"game": 0, "tools": 1})
    assert claim.group.gid == 1100


def test_a_call_of_the_store_passes_over_so_many_and_a_claim_goes_on_behind_them(store: StoreUnderTest) -> None:
    store.admit(450, environment="game")
    store.admit(2, environment="tools")
    store.admit(300, environment="game")
    queue = store.attested("r.0")

    def called(number: int) -> tuple[int, int]:
        arguments = ("r.0", 8, number, "game", 0, "tools", 0)
        answer = scripts.check(store.connection.script("claim", scripts.ledger_keys(store.run), arguments), store.run)
        waiting = store.connection.command("XPENDING", f"{{rl:{store.run}}}:prompts", "rollout")["pending"]
        return waiting, answer.values[-1]

    assert [called(number) for number in (1, 2)] == [(200, 2), (400, 2)]
    assert called(2) == (400, 0), "a repeated call does nothing twice"
    claims = queue.claim(8, {"game": 0, "tools": 1})
    assert [claim.group.gid for claim in claims] == [450]
    assert queue.claim(8, {"game": 0, "tools": 0}) == []
    assert queue.is_short_of_places
    assert store.ledger.counts().queued == 751
    assert [claim.group.gid for claim in queue.claim(2, {"game": 2, "tools": 0})] == [0, 1]


def test_groups_that_an_earlier_release_let_wait_in_one_list_are_handed_out_in_order(store: StoreUnderTest) -> None:
    store.admit(2, environment="game")
    store.admit(1)
    store.admit(2, environment="tools")
    store.publish(0, 0, "r.0", "r.1")
    queue, other = store.worker("r.0"), store.worker("r.1")
    queue.release(queue.claim(5))
    store.connection.command("EVAL", MOVE, 1, f"{{rl:{store.run}}}:prompts")
    assert [claim.group.gid for claim in other.claim(3, {"game": 0, "tools": 1})] == [2, 3]
    assert store.ledger.counts().queued == 3
    assert [(claim.group.gid, claim.deliveries) for claim in queue.claim(5)] == [(0, 1), (1, 1), (4, 1)]
    assert store.balance() == (5, 0, 0, 5)


def test_what_is_released_waits_with_its_kind_and_is_taken_in_the_order_of_admission(store: StoreUnderTest) -> None:
    for environment in ("tools", "", "game", "tools", ""):
        store.admit(1, environment=environment)
    store.publish(0, 0, "r.0", "r.1")
    queue, other = store.worker("r.0"), store.worker("r.1")
    queue.release(queue.claim(5))
    assert [claim.group.gid for claim in other.claim(3, {"tools": 1})] == [0, 1, 2]
    assert [claim.group.gid for claim in other.claim(1, {"tools": 0})] == [4]
    assert store.ledger.counts().generating == 4
    assert [claim.group.gid for claim in queue.claim(5, {"": 0})] == [3]


def test_environments_that_share_places_are_counted_together(store: StoreUnderTest) -> None:
    for environment in ("short", "long", "", "short"):
        store.admit(1, environment=environment)
    queue = store.attested("r.0")
    assert [claim.group.gid for claim in queue.claim(4, {"long,short": 2})] == [0, 1, 2]
    assert queue.claim(4, {"long,short": 0}) == []
    assert queue.is_short_of_places
    assert [claim.group.gid for claim in queue.claim(4, {"long,short": 1})] == [3]
