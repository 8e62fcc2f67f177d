"""Rules of how much one request may hold."""

import grpc

from rolecall.conformance.check import Status, Verdict, failed, passed, said, skipped, unless
from rolecall.conformance.reward.answers import blame
from rolecall.conformance.reward.contract import ANSWERS, CONTRACT
from rolecall.conformance.reward.pool import PICTURE, with_response
from rolecall.conformance.reward.session import RewardSession
from rolecall.rpc.options import MAX_MESSAGE_BYTES
from rolecall.scoring.exchange import only
from rolecall.v1 import reward_pb2

UNLIMITED_ITEMS = 256
"""Items of one request that a service without a limit of its own must take."""
MOST_ITEMS = 4096
"""A larger limit is not tried out."""
REQUEST_BYTES = 4 * 2**20
"""Size of a large request; that of a large group is the largest message that callers send."""
SPARE_BYTES, SPARE_ITEM_BYTES = 2**16, 2**10
"""What else travels in a request, and in each of its items, beside responses."""
NUM_LARGE_ITEMS = 16


@CONTRACT.rule(
    "request.empty",
    "ScoreRequest.items",
    "A request without any is refused with INVALID_ARGUMENT, or gets no results.",
    ANSWERS,
)
async def empty_request(session: RewardSession) -> Verdict:
    """Sends a request without items."""
    try:
        response = await session.score([])
    except grpc.aio.AioRpcError as error:
        is_refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return passed("INVALID_ARGUMENT") if is_refused else failed(said(error))
    return unless(f"{len(response.results)} results to no item" if response.results else None, "no results")


@CONTRACT.rule("max_items.taken", "DescribeResponse.max_items", "That many are scored.", ANSWERS)
async def max_items_taken(session: RewardSession) -> Verdict:
    """Sends as many items as it says it takes; UNLIMITED_ITEMS where it names no limit."""
    num = session.spec.max_items or UNLIMITED_ITEMS
    if num > MOST_ITEMS:
        return skipped(f"{num} items in one request are not tried out")
    items = [only(item, session.spec) for item in session.pool.copies(num)]
    return unless(blame(session, items, await session.score(items)), f"{num} items")


@CONTRACT.rule(
    "max_items.above",
    "DescribeResponse.max_items",
    "A request of more is refused with INVALID_ARGUMENT or scored whole, never in part.",
    (*ANSWERS, "max_items.taken"),
)
async def above_max_items(session: RewardSession) -> Verdict:
    """Sends one item more than it says it takes."""
    num = session.spec.max_items + 1
    if not session.spec.max_items:
        return skipped("it names no limit")
    if num > MOST_ITEMS:
        return skipped(f"{num} items in one request are not tried out")
    items = [only(item, session.spec) for item in session.pool.copies(num)]
    try:
        response = await session.score(items)
    except grpc.aio.AioRpcError as error:
        is_refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return passed("INVALID_ARGUMENT") if is_refused else failed(said(error))
    return unless(blame(session, items, response), f"{num} items scored")


@CONTRACT.rule(
    "calls.bytes",
    "RewardService",
    "Requests of up to 4 MiB, gRPC's own limit, are read, and of up to 16 MiB where DescribeResponse.whole_groups, or "
    "where it reads images.",
    ANSWERS,
)
async def large_request(session: RewardSession) -> Verdict:
    """Sends a few items with responses of 256 KiB, as large a request as they make; to a service that takes whole
    groups a group as large as a request may be, and to one that reads images an image. One that is not done in time was
    read all the same.
    """
    requests = []
    if reward_pb2.SCORE_FIELD_RESPONSE_TEXT in session.spec.reads:
        requests.append(_large_responses(session))
    if reward_pb2.SCORE_FIELD_IMAGES in session.spec.reads:
        requests.append([_large_image(session)])
    if not requests:
        return skipped("it reads neither response_text nor images, so its requests are small")
    verdicts = [await _read(session, items) for items in requests]
    broken = (verdict for verdict in verdicts if verdict.status is Status.FAILED)
    return next(broken, passed("; ".join(verdict.seen for verdict in verdicts)))


def _large_responses(session: RewardSession) -> list[reward_pb2.ScoreItem]:
    """Items with as long responses as a request holds; one group where the service takes whole ones."""
    num = min(session.spec.max_items or NUM_LARGE_ITEMS, NUM_LARGE_ITEMS)
    whole = session.spec.whole_groups
    size = (MAX_MESSAGE_BYTES - SPARE_BYTES) // num if whole else (REQUEST_BYTES - SPARE_BYTES) // NUM_LARGE_ITEMS
    text = "word " * ((size - SPARE_ITEM_BYTES) // 5)
    items = [only(with_response(item, item.id, text, 1), session.spec) for item in session.pool.copies(num, "large")]
    for item in items:
        item.group = "large" if whole else item.group
    return items


def _large_image(session: RewardSession) -> reward_pb2.ScoreItem:
    """An item with as large an image as a message holds: what stands behind the end of a PNG is not looked at."""
    (item,) = session.pool.copies(1, "large")
    item = only(item, session.spec)
    item.images[:] = [PICTURE + bytes(MAX_MESSAGE_BYTES - SPARE_BYTES)]
    return item


async def _read(session: RewardSession, items: list[reward_pb2.ScoreItem]) -> Verdict:
    num_bytes = reward_pb2.ScoreRequest(items=items).ByteSize()
    try:
        await session.score(items)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return failed(f"{num_bytes:,} bytes: {said(error)}")
        return passed(f"{num_bytes:,} bytes, not scored within {session.options.timeout_s:g} s")
    return passed(f"{num_bytes:,} bytes")
