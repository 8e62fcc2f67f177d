"""Items under way are scored once, whoever leaves and comes again."""

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from rolecall.rpc import deadlines
from rolecall.v1 import reward_pb2
from services.reward import underway
from services.reward.underway import Underway

Items = Sequence[reward_pb2.ScoreItem]


class Slow:
    """A scorer that answers when `may_end` is set."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.deadlines: list[float | None] = []
        self.may_end = asyncio.Event()
        self.num_cancelled = 0

    async def score(self, items: Items) -> list[str]:
        self.calls.append([item.id for item in items])
        self.deadlines.append(deadlines.remaining_s())
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [f"score of {item.id}" for item in items]


def items(*ids: str, text: str = "") -> list[reward_pb2.ScoreItem]:
    return [reward_pb2.ScoreItem(id=id, response_text=text) for id in ids]


def together(items: Items) -> list[range]:
    return [range(len(items))] if items else []


async def left(under_way: Underway[str], asked: Items) -> None:
    """Asks for `asked` and does not wait for it."""
    asking = asyncio.create_task(under_way.outcomes(asked))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_who_comes_again_waits_for_what_goes_on_and_only_the_rest_is_begun() -> None:
    slow = Slow()
    under_way = Underway(slow.score, together)
    deadlines.inherit(1.0)
    await left(under_way, items("a", "b"))
    asking = asyncio.create_task(under_way.outcomes(items("c", "b", "a")))
    await asyncio.sleep(0)
    slow.may_end.set()
    assert await asking == ["score of c", "score of b", "score of a"]
    assert slow.calls == [["a", "b"], ["c"]]
    assert slow.deadlines == [None, None], "the first caller's deadline is not the second's"
    assert await under_way.outcomes(items("a")) == ["score of a"]
    assert slow.calls[2:] == [["a"]], "what was given to somebody is begun anew"


async def test_other_items_of_the_same_name_are_others() -> None:
    slow = Slow()
    under_way = Underway(slow.score, together)
    await left(under_way, items("a"))
    slow.may_end.set()
    await under_way.outcomes(items("a", text="other"))
    assert slow.calls == [["a"], ["a"]]


async def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    calls: list[int] = []

    async def fail(items: Items) -> list[str]:
        calls.append(len(items))
        await asyncio.sleep(0)
        raise RuntimeError("broken")

    under_way = Underway(fail, together)
    found = await asyncio.gather(*(under_way.outcomes(items("a")) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in found] == ["broken"] * 2
    assert calls == [1]
    with pytest.raises(RuntimeError):
        await under_way.outcomes(items("a"))
    assert calls == [1, 1]


async def test_a_unit_that_hangs_holds_up_no_other_of_its_call_when_that_comes_alone() -> None:
    slow, quick = Slow(), Slow()
    quick.may_end.set()

    async def score(items: Items) -> list[str]:
        return await (slow if items[0].id == "hangs" else quick).score(items)

    under_way = Underway(score, lambda items: [[place] for place in range(len(items))])
    await left(under_way, items("hangs", "a", "b"))
    async with asyncio.timeout(10):
        assert await under_way.outcomes(items("b", "a")) == ["score of b", "score of a"]
    assert quick.calls == [["a"], ["b"]]
    assert await under_way.outcomes([]) == []
    under_way.close()


async def test_what_was_given_to_one_and_begun_anew_is_not_taken_away_by_another() -> None:
    first, second, slow = Slow(), Slow(), Slow()
    turns = iter((first, second))

    async def score(items: Items) -> list[str]:
        return await (slow if items[0].id == "slow" else next(turns)).score(items)

    under_way = Underway(score, lambda items: [[place] for place in range(len(items))])
    waits_for_both = asyncio.create_task(under_way.outcomes(items("k", "slow")))
    waits_for_one = asyncio.create_task(under_way.outcomes(items("k")))
    await asyncio.sleep(0)
    first.may_end.set()
    assert await waits_for_one == ["score of k"]
    again = asyncio.create_task(under_way.outcomes(items("k")))
    await asyncio.sleep(0)
    slow.may_end.set()
    assert await waits_for_both == ["score of k", "score of slow"]
    and_again = asyncio.create_task(under_way.outcomes(items("k")))
    await asyncio.sleep(0)
    second.may_end.set()
    assert await again == await and_again == ["score of k"]
    assert second.calls == [["k"]]


async def test_what_nobody_comes_back_for_is_dropped() -> None:
    slow = Slow()
    under_way = Underway(slow.score, together)
    with patch.object(underway, "LINGER_S", 0.01):
        await left(under_way, items("a", "b"))
        async with asyncio.timeout(10):
            while not slow.num_cancelled:
                await asyncio.sleep(0.01)
    assert not under_way._places
    await left(under_way, items("a"))
    under_way.close()
    await asyncio.sleep(0)
    assert slow.num_cancelled == 2
