"""Items that lose workers: when they are blamed, and when they are tried again."""

from rolecall.v1 import reward_pb2
from services.reward.losses import LAPSE_S, MAX_KEPT, Losses, key_of


def test_one_thing_that_befalls_all_workers_counts_once_for_equal_items_of_a_call() -> None:
    losses, call, another = Losses(), 7, 8
    assert [losses.note(b"a", call, "TIMEOUT", "") for _ in range(4)] == [1, 1, 1, 1]
    assert losses.note(b"a", another, "TIMEOUT", "") == 2
    losses.forget(b"a")
    assert not losses
    assert losses.note(b"a", call, "TIMEOUT", "") == 1


def test_blame_lapses_and_one_more_loss_brings_it_back() -> None:
    now = 0.0
    losses = Losses(lambda: now)
    for call in range(3):
        losses.note(b"a", call, "TIMEOUT", "")
    assert losses.recent(b"a") is not None
    now = LAPSE_S + 1
    assert losses.recent(b"a") is None
    assert losses.note(b"a", 3, "TIMEOUT", "") == 4
    assert losses.recent(b"a") is not None


def test_the_oldest_are_forgotten() -> None:
    losses = Losses()
    for number in range(MAX_KEPT + 1):
        losses.note(number.to_bytes(4, "big"), number, "TIMEOUT", "")
    assert losses.recent((0).to_bytes(4, "big")) is None
    assert losses.recent((1).to_bytes(4, "big")) is not None


def test_a_key_is_of_what_is_scored_and_not_of_its_name() -> None:
    first, second = (reward_pb2.ScoreItem(id=id, group=id, response_text="a") for id in ("1", "2"))
    assert key_of(0, [first]) == key_of(0, [second]) != key_of(1, [first])
    second.response_text = "b"
    assert key_of(0, [first]) != key_of(0, [second])
