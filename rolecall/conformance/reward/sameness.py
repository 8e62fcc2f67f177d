"""Rules of the same item asked again: callers repeat calls, and cut and order items as they like."""

import asyncio
from collections.abc import Mapping

import numpy as np

from rolecall.conformance.check import Verdict, skipped, unless
from rolecall.conformance.reward.contract import ANSWERS, CONTRACT
from rolecall.conformance.reward.pool import with_id
from rolecall.conformance.reward.session import RewardSession
from rolecall.scoring.exchange import only
from rolecall.v1 import reward_pb2
from rolecall.wire import Array

NUM_ROUNDS = 4
"""Rounds of calls that are under way at once, each with other batches."""
NEEDS = (*ANSWERS, "score.repeated")
"""Rules without which no two scores can be compared."""

Results = Mapping[str, reward_pb2.ScoreResult]


def difference(before: Results, after: Results, tolerance: float) -> str | None:
    """The first item whose two results are not the same; None when all are. A failure that may pass proves nothing."""
    for item_id, second in after.items():
        first = before.get(item_id)
        if first is None or (_may_pass(first) or _may_pass(second)):
            continue
        if not _is_same(first, second, tolerance):
            return f"item {item_id} first got {_short(first)}, then {_short(second)}"
    missing = sorted(before.keys() - after.keys())
    return f"no result for item {missing[0]}" if missing else None


@CONTRACT.rule("score.repeated", "RewardService.Score", "Items that are sent again get the same scores.", ANSWERS)
async def repeated(session: RewardSession) -> Verdict:
    """Sends the same requests again."""
    again = await session.results(session.chunks(session.pool.items))
    return unless(difference(await session.first_results(), again, session.options.tolerance))


@CONTRACT.rule("score.order", "RewardService.Score", "The order of the items changes no score.", NEEDS)
async def order(session: RewardSession) -> Verdict:
    """Sends the items of each request the other way round."""
    chunks = session.chunks(session.pool.items)
    if len(chunks[0]) == 1:
        return skipped("it takes one item at a time")
    reversed_ = await session.results([chunk[::-1] for chunk in chunks])
    return unless(difference(await session.first_results(), reversed_, session.options.tolerance))


@CONTRACT.rule(
    "score.batches", "RewardService.Score", "What else is in the request changes no score.", (*NEEDS, "score.order")
)
async def batches(session: RewardSession) -> Verdict:
    """Sends each item alone, then with others than before."""
    items = [only(item, session.spec) for item in session.pool.items]
    largest = len(session.chunks(items)[0])
    if largest == 1:
        return skipped("it takes one item at a time")
    first, seen = await session.first_results(), []
    for size in (1, min(5, largest)):
        after = await session.results([items[start : start + size] for start in range(0, len(items), size)])
        problem = difference(first, after, session.options.tolerance)
        if problem:
            return unless(f"{size} at a time: {problem}")
        seen.append(str(size))
    return unless(None, f"{' and '.join(seen)} at a time")


@CONTRACT.rule(
    "score.concurrent",
    "RewardService.Score",
    "Other calls under way change no score.",
    (*NEEDS, "score.order", "score.batches"),
)
async def concurrent(session: RewardSession) -> Verdict:
    """Has many calls under way at once, each with other items."""
    items = [only(item, session.spec) for item in session.pool.items]
    first, num_calls = await session.first_results(), 0
    for number in range(NUM_ROUNDS):
        size = min(number + 1, len(session.chunks(items)[0]))
        calls = [items[start : start + size] for start in range(0, len(items), size)]
        responses = await asyncio.gather(*(session.score(call) for call in calls))
        for call, response in zip(calls, responses, strict=True):
            after = {result.id: result for result in response.results}
            problem = difference({item.id: first[item.id] for item in call}, after, session.options.tolerance)
            if problem:
                return unless(f"{len(calls)} calls at once: {problem}")
        num_calls += len(calls)
    return unless(None, f"{num_calls} calls")


@CONTRACT.rule("item.id", "ScoreItem.id", "It changes no score.", NEEDS)
async def other_id(session: RewardSession) -> Verdict:
    """Sends the same items under other ids, then under those of each other."""
    items, first = session.pool.items, await session.first_results()
    ids = {
        "other ids": [f"other/{place}" for place, _ in enumerate(items)],
        "ids of other items": [item.id for item in (*items[1:], *items[:1])],
    }
    for what, names in ids.items():
        renamed = dict(zip(names, items, strict=True))
        after = await session.results(session.chunks([with_id(item, name) for name, item in renamed.items()]))
        before = {name: first[item.id] for name, item in renamed.items()}
        problem = difference(before, after, session.options.tolerance)
        if problem:
            return unless(f"under {what}: {problem}")
    return unless(None)


def _may_pass(result: reward_pb2.ScoreResult) -> bool:
    return result.WhichOneof("outcome") == "error" and result.error.retryable


def _is_same(first: reward_pb2.ScoreResult, second: reward_pb2.ScoreResult, tolerance: float) -> bool:
    kind = first.WhichOneof("outcome")
    if kind != second.WhichOneof("outcome"):
        return False
    if kind == "error":
        return first.error.code == second.error.code
    one, other = first.reward, second.reward
    if one.components.keys() != other.components.keys() or one.answer != other.answer:
        return False
    return _are_close(_numbers(one), _numbers(other), tolerance) and (
        one.token_rewards.data == other.token_rewards.data
        or _are_close(_floats(one.token_rewards.data), _floats(other.token_rewards.data), tolerance)
    )


def _are_close(first: Array, second: Array, tolerance: float) -> bool:
    return first.shape == second.shape and np.allclose(second, first, rtol=tolerance, atol=tolerance, equal_nan=True)


def _numbers(reward: reward_pb2.Reward) -> Array:
    return np.asarray([reward.value, *(reward.components[name] for name in sorted(reward.components))])


def _floats(data: bytes) -> Array:
    return np.frombuffer(data[: len(data) // 4 * 4], "<f4")


def _short(result: reward_pb2.ScoreResult) -> str:
    if result.WhichOneof("outcome") == "error":
        return f"the error {result.error.code}"
    reward = result.reward
    parts = ", ".join(f"{name} {part:g}" for name, part in sorted(reward.components.items()))
    answer = f", answer {reward.answer[:40]!r}" if reward.HasField("answer") else ""
    return f"{reward.value!r}{f' ({parts})' if parts else ''}{answer}"
