"""Rules of odd items: none of them fails a call, and what cannot be scored gets an error, never a number."""

from google.protobuf import json_format

from rolecall.conformance.check import Verdict, failed, passed, skipped, unless
from rolecall.conformance.reward.answers import blame
from rolecall.conformance.reward.contract import ANSWERS, CONTRACT
from rolecall.conformance.reward.pool import LONG_TOKENS, with_id, with_response
from rolecall.conformance.reward.sameness import NEEDS, difference
from rolecall.conformance.reward.session import Items, RewardSession
from rolecall.v1 import reward_pb2

UNICODE = (
    "\U0001f469\u200d\U0001f52c \U0001f1f3\U0001f1f1 \u0635\u0641\u0631 \u05d0\u05e4\u05e1",
    "e\u0301 \u00e9 \u212b \ufb01 \u1e9e \u0130",
    "\u6570\u5b66 \U00020bb7 \u220f \U0001d7d9",
    "\x00 \x1b[31m \x7f \u202e \ufeff \uffff \U0010ffff",
    "\r\n\t\u2028\u0085",
)
"""Responses in other scripts, and of characters that are seldom meant."""
UNKNOWN = {
    "rolecall_conformance": {"nested": [1, None, {"deep": True}], "text": "\u6570", "large": "x" * 4096},
    "none": None,
}
"""Metadata that no scorer knows."""


@CONTRACT.rule("item.empty", "ScoreItem.response_text", "An empty one gets a result.", ANSWERS)
async def empty(session: RewardSession) -> Verdict:
    """Sends empty responses beside others."""
    odd = [with_response(item, f"empty/{i}", "", 1) for i, item in enumerate(session.pool.items[:3])]
    return await _get_results(session, odd)


@CONTRACT.rule("item.unicode", "ScoreItem.response_text", "So does one of any Unicode", ANSWERS)
async def in_unicode(session: RewardSession) -> Verdict:
    """Sends responses in many scripts, and of control characters."""
    item = session.pool.items[0]
    return await _get_results(
        session, [with_response(item, f"unicode/{i}", text, len(text)) for i, text in enumerate(UNICODE)]
    )


@CONTRACT.rule("item.long", "ScoreItem.response_text", "and one of 32,768 tokens.", ANSWERS)
async def long(session: RewardSession) -> Verdict:
    """Sends a response of 32,768 words and token ids."""
    text = " ".join(f"w{i % 1000}" for i in range(LONG_TOKENS))
    return await _get_results(session, [with_response(session.pool.items[0], "long", text, LONG_TOKENS)])


@CONTRACT.rule(
    "item.ground_truth",
    "ScoreItem.ground_truth",
    "A scorer whose scores depend on it then answers a ScoreError.",
    NEEDS,
)
async def without_truth(session: RewardSession) -> Verdict:
    """Finds out by two ground truths whether scores depend on it, then leaves it out."""
    if reward_pb2.SCORE_FIELD_GROUND_TRUTH not in session.spec.reads:
        return skipped("it does not read ground_truth")
    given = session.pool.items
    right = [_with_truth(item, f"truth/{i}", item.response_text or "42") for i, item in enumerate(given)]
    wrong = [_with_truth(item, f"truth/{i}", "rolecall: another answer") for i, item in enumerate(given)]
    before, after = [await session.results(session.chunks(items)) for items in (right, wrong)]
    depends = difference(before, after, session.options.tolerance) is not None
    bare = [_with_truth(item, f"bare/{i}", "") for i, item in enumerate(given)]
    verdict = await _get_results(session, bare)
    results = await session.results(session.chunks(bare))
    scored = [result for result in results.values() if result.WhichOneof("outcome") == "reward"]
    if depends and scored:
        return failed(
            f"its scores depend on the ground truth, and item {scored[0].id} without one got {scored[0].reward.value:g}"
        )
    return verdict


@CONTRACT.rule("item.metadata", "ScoreItem.metadata", "Those that a scorer does not know change no score.", NEEDS)
async def unknown_metadata(session: RewardSession) -> Verdict:
    """Adds nested and empty fields of names that nobody knows."""
    if reward_pb2.SCORE_FIELD_METADATA not in session.spec.reads:
        return skipped("it does not read metadata")
    odd = [with_id(item, item.id) for item in session.pool.items]
    for item in odd:
        json_format.ParseDict(json_format.MessageToDict(item.metadata) | UNKNOWN, item.metadata)
    after = await session.results(session.chunks(odd))
    return unless(difference(await session.first_results(), after, session.options.tolerance))


@CONTRACT.rule(
    "item.token_ids", "ScoreItem.response_token_ids", "Bytes that are not whole ids get a ScoreError.", ANSWERS
)
async def torn_token_ids(session: RewardSession) -> Verdict:
    """Cuts the last byte off the ids."""
    if reward_pb2.SCORE_FIELD_TOKEN_IDS not in session.spec.reads:
        return skipped("it does not read token ids")
    torn = with_id(session.pool.items[0], "torn")
    torn.response_token_ids = torn.response_token_ids[:-1]
    result = (await session.results(session.chunks([torn])))["torn"]
    if result.WhichOneof("outcome") == "error":
        return passed(result.error.code)
    return failed(f"{len(torn.response_token_ids)} bytes of ids got the reward {result.reward.value:g}")


async def _get_results(session: RewardSession, odd: Items) -> Verdict:
    """Sends odd items beside two of the pool; passed when the call does not fail and the answers are well formed."""
    errors: set[str] = set()
    for chunk in session.chunks([*session.pool.items[:1], *odd, *session.pool.items[1:2]]):
        response = await session.score(chunk)
        problem = blame(session, chunk, response)
        if problem:
            return failed(problem)
        errors |= {result.error.code for result in response.results if result.WhichOneof("outcome") == "error"}
    return passed(f"errors {', '.join(sorted(errors))}" if errors else "scored")


def _with_truth(item: reward_pb2.ScoreItem, item_id: str, truth: str) -> reward_pb2.ScoreItem:
    copy = with_id(item, item_id)
    copy.ground_truth = truth
    return copy
