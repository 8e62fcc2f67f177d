"""Your own scorer as a RewardService, in ten lines:

    from rolecall.reward import Item, serve

    def score(item: Item) -> float:
        return float(item.ground_truth in item.response_text)

    if __name__ == "__main__":
        reads = ("response_text", "ground_truth")
        sys.exit(serve(score, "127.0.0.1:50070", name="contains", range=(0, 1), reads=reads))

Owns the server: the contract's Describe and Score, health, reflection, TLS and bearer token. What the function returns
is checked before it is sent. A function that hangs is not killed here: its caller stops waiting, and where one call
runs at a time the others wait for it. A coroutine function is awaited in the server's own event loop, and cancelled
when its caller leaves. Our reward service runs functions in killable processes instead.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc

from rolecall import telemetry
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.plugins import is_async
from rolecall.rpc import role_process
from rolecall.rpc.identity import Admission
from rolecall.rpc.listening import rpc_section
from rolecall.rpc.options import MAX_GROUP_BYTES, MAX_MESSAGE_BYTES, REPLICA_AGE_S
from rolecall.rpc.server import Server
from rolecall.rpc.tls import read_token
from rolecall.scoring import scores
from rolecall.scoring.awaited import call_async_batch_scorer, call_async_scorer
from rolecall.scoring.description import component_spec, spec_problem
from rolecall.scoring.exchange import is_large
from rolecall.scoring.items import groups_of
from rolecall.scoring.results import call_batch_scorer, call_scorer
from rolecall.scoring.scores import BatchFunction, Failure, Item, Message, Score, ScoreFunction
from rolecall.settings import RpcSection, TelemetrySection
from rolecall.v1 import reward_pb2, reward_pb2_grpc

__all__ = ["Failure", "Item", "Message", "Score", "ScoreFunction", "serve", "serve_batches"]

logger = logging.getLogger(__name__)

SERVICE_NAME = "rolecall.v1.RewardService"
OVERDUE_S = 60.0
"""Seconds after its caller left in which a function of many may come back unremarked: six times what a scorer has by
default, so that one which is slow seldom is told, and one that hangs within a minute.
"""
NUM_THREADS = 8
"""Threads of one Score call; each takes a share of its items."""
MAX_AWAITED = 64
"""Items that a coroutine function is awaited on at a time, over all calls; further ones wait under their callers'
deadlines.
"""
Field: TypeAlias = Literal[
    "messages", "response_text", "token_ids", "ground_truth", "metadata", "environment_reward", "images"
]
FIELDS: dict[Field, reward_pb2.ScoreField.ValueType] = {
    "messages": reward_pb2.SCORE_FIELD_MESSAGES,
    "response_text": reward_pb2.SCORE_FIELD_RESPONSE_TEXT,
    "token_ids": reward_pb2.SCORE_FIELD_TOKEN_IDS,
    "ground_truth": reward_pb2.SCORE_FIELD_GROUND_TRUTH,
    "metadata": reward_pb2.SCORE_FIELD_METADATA,
    "environment_reward": reward_pb2.SCORE_FIELD_ENVIRONMENT_REWARD,
    "images": reward_pb2.SCORE_FIELD_IMAGES,
}
TEXT_FIELDS: tuple[Field, ...] = tuple(field for field, value in FIELDS.items() if value in scores.TEXT_FIELDS)
Range: TypeAlias = tuple[float | None, float | None]
"""Least and greatest value; None where there is none."""
Results: TypeAlias = list[reward_pb2.ScoreResult]
ScoreMany: TypeAlias = Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[Results]]


def serve(
    function: ScoreFunction,
    address: str = "127.0.0.1:50070",
    *,
    name: str | None = None,
    range: Range = (None, None),
    reads: Sequence[Field] = TEXT_FIELDS,
    components: Mapping[str, Range] | None = None,
    token_rewards: bool = False,
    bearer_token_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
    behind_mesh: bool = False,
) -> int:
    """Serves `function` on `address` until SIGTERM or Ctrl-C; returns the exit code. It is called from several threads
    at a time; an async one is awaited on up to MAX_AWAITED items at a time.

    range, components: where the reward and the named parts of a Score lie; anything outside is answered as an error.
    reads: the fields of an Item that it needs; only these are sent, and images to those alone who name them.
    token_rewards: every Score has them.
    bearer_token_file: refuse callers without this token. certificate_file, key_file: serve TLS; needed beyond loopback,
    unless behind_mesh.
    """
    spec = description(name or function.__name__, range, reads, components or {}, token_rewards, max_items=0)
    scorer = Scorer(spec, one_by_one(function, spec), read_token(bearer_token_file))
    return _run(scorer, address, rpc_section(certificate_file, key_file, behind_mesh))


def serve_batches(
    function: BatchFunction,
    address: str = "127.0.0.1:50070",
    *,
    max_items: int,
    name: str | None = None,
    range: Range = (None, None),
    reads: Sequence[Field] = TEXT_FIELDS,
    components: Mapping[str, Range] | None = None,
    token_rewards: bool = False,
    whole_groups: bool = False,
    bearer_token_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
    behind_mesh: bool = False,
) -> int:
    """Serves a function over up to `max_items` items that returns one answer per item, in order: a reward model. Else
    as `serve`; one call runs at a time. whole_groups: it compares, and is called with one whole group at a time, the
    responses to one prompt, however many they are.
    """
    spec = description(
        name or function.__name__, range, reads, components or {}, token_rewards, max_items, whole_groups=whole_groups
    )
    scorer = Scorer(spec, all_at_once(function, spec), read_token(bearer_token_file))
    return _run(scorer, address, rpc_section(certificate_file, key_file, behind_mesh))


def description(
    name: str,
    reward_range: Range,
    reads: Sequence[Field],
    components: Mapping[str, Range],
    token_rewards: bool,
    max_items: int,
    *,
    whole_groups: bool = False,
) -> reward_pb2.DescribeResponse:
    """The answer to Describe. ConfigError when no caller would accept it."""
    unknown = sorted(set(reads) - FIELDS.keys())
    if unknown:
        raise ConfigError(f"reads names {unknown}; the fields are {sorted(FIELDS)}")
    spec = reward_pb2.DescribeResponse(
        name=name,
        reads=[FIELDS[field] for field in reads],
        reward=component_spec("", *reward_range),
        components=[component_spec(part, *bounds) for part, bounds in components.items()],
        token_rewards=token_rewards,
        max_items=max_items,
        whole_groups=whole_groups,
    )
    problem = spec_problem(spec)
    if problem:
        raise ConfigError(f"scorer {name!r} {problem}")
    return spec


def one_by_one(function: ScoreFunction, spec: reward_pb2.DescribeResponse) -> ScoreMany:
    """Scores items with a function of one item, in up to NUM_THREADS threads. None is begun for a caller who left. One
    that is async is awaited here, on MAX_AWAITED items at a time.
    """
    if is_async(function):
        return _awaited(function, spec)

    def share_of(items: Sequence[reward_pb2.ScoreItem], is_over: threading.Event) -> Results:
        return [call_scorer(function, item, spec) for item in items if not is_over.is_set()]

    async def score(items: Sequence[reward_pb2.ScoreItem]) -> Results:
        num_each = -(-len(items) // NUM_THREADS)
        starts = [start for start, _ in enumerate(items) if start % num_each == 0]
        is_over = threading.Event()
        try:
            shares = await asyncio.gather(
                *(asyncio.to_thread(share_of, items[start : start + num_each], is_over) for start in starts)
            )
        finally:
            is_over.set()
        return [result for share in shares for result in share]

    return score


def _awaited(function: ScoreFunction, spec: reward_pb2.DescribeResponse) -> ScoreMany:
    room = asyncio.Semaphore(MAX_AWAITED)

    async def one(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        async with room:  # bounded: by the deadline of the caller, who may leave
            return await call_async_scorer(function, item, spec)

    async def score(items: Sequence[reward_pb2.ScoreItem]) -> Results:
        return await asyncio.gather(*(one(item) for item in items))

    return score


def all_at_once(function: BatchFunction, spec: reward_pb2.DescribeResponse, overdue_s: float = OVERDUE_S) -> ScoreMany:
    """Scores items with a function of many, one call of it at a time, which a caller who leaves does not end: the one
    thread is the turn, for which calls wait under their callers' deadlines. No group is begun for a caller who left.
    One that is still at work `overdue_s` after its caller left is logged, and its end, too. A function that is async is
    awaited here, one call at a time, and ends when its caller leaves.
    """
    if is_async(function):
        return _awaited_at_once(function, spec)
    thread = ThreadPoolExecutor(1, "scorer")

    def answers_of(items: Sequence[reward_pb2.ScoreItem], is_over: threading.Event) -> Results:
        if not spec.whole_groups:
            return call_batch_scorer(function, items, spec)
        return [
            result
            for places in groups_of(items)
            if not is_over.is_set()
            for result in call_batch_scorer(function, [items[place] for place in places], spec)
        ]

    async def score(items: Sequence[reward_pb2.ScoreItem]) -> Results:
        _require_few(items, spec)
        is_over = threading.Event()
        work = thread.submit(answers_of, items, is_over)
        try:
            return await asyncio.wrap_future(work)  # bounded: by the deadline of the caller, who may leave
        finally:
            is_over.set()
            if not work.done():
                asyncio.get_running_loop().call_later(overdue_s, _tell, work, spec.name, time.monotonic())

    return score


def _awaited_at_once(function: BatchFunction, spec: reward_pb2.DescribeResponse) -> ScoreMany:
    turn = asyncio.Lock()

    async def score(items: Sequence[reward_pb2.ScoreItem]) -> Results:
        _require_few(items, spec)
        units = groups_of(items) if spec.whole_groups else [range(len(items))]
        async with turn:  # bounded: by the deadline of the caller, who may leave
            return [
                result
                for places in units
                for result in await call_async_batch_scorer(function, [items[place] for place in places], spec)
            ]

    return score


def _require_few(items: Sequence[reward_pb2.ScoreItem], spec: reward_pb2.DescribeResponse) -> None:
    if len(items) > spec.max_items and not spec.whole_groups:
        raise InvalidInputError(f"items: {len(items)} are more than max_items {spec.max_items}; send fewer at a time")


def _tell(work: Future[Results], name: str, left_at: float) -> None:
    """Logs that `work`, whose caller left at `left_at`, is still going on, and its end; nothing when it is over."""

    def since_s() -> float:
        return time.monotonic() - left_at

    if work.running():
        logger.warning(
            "scorer %s: a call of the function is still at work %.0f s after its caller left, and all others wait for "
            "it; give what it calls a timeout, or start the scorer again",
            name,
            since_s(),
        )
        work.add_done_callback(
            lambda _: logger.warning("scorer %s: that call came back %.0f s after its caller left", name, since_s())
        )


class Scorer(reward_pb2_grpc.RewardServiceServicer):
    """A RewardService servicer over a user's function."""

    def __init__(self, spec: reward_pb2.DescribeResponse, score: ScoreMany, bearer_token: str | None = None) -> None:
        self.spec = spec
        self._score = score
        self._admission = Admission(bearer_token, f"scorer {spec.name!r}")

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.ScoreResponse:
        """Scores the items; idempotent if the function is. INVALID_ARGUMENT for an empty request, UNAUTHENTICATED
        without the token.
        """
        self._admission.check(context)
        if not request.items:
            raise InvalidInputError("items is empty; send at least one")
        return reward_pb2.ScoreResponse(results=await self._score(request.items))

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.DescribeResponse:
        """Describes the scorer. Idempotent. UNAUTHENTICATED without the token."""
        self._admission.check(context)
        return self.spec


def new_server(scorer: Scorer, address: str, rpc: RpcSection) -> Server:
    """A server of `scorer`, not started: for a process that serves it beside other things. There may be several behind
    one address.
    """
    server = Server(
        rpc,
        address,
        setting="address",
        client_certificates=False,
        max_age_s=REPLICA_AGE_S,
        max_message_bytes=MAX_GROUP_BYTES if is_large(scorer.spec) else MAX_MESSAGE_BYTES,
    )
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, scorer, SERVICE_NAME)
    return server


def _run(scorer: Scorer, address: str, rpc: RpcSection) -> int:
    async def main() -> None:
        server = new_server(scorer, address, rpc)
        bound = await server.start()
        await server.set_serving(True)
        logger.info("scorer %s serves on %s", scorer.spec.name, bound)
        await role_process.serve(server)

    telemetry.configure(TelemetrySection(), "reward", scorer.spec.name)
    return role_process.run(main, f"scorer {scorer.spec.name}")
