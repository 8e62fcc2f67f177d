"""Calling a RewardService and not believing it blindly. The controller uses it towards the reward service, and that
towards external ones.

Owns: Describe once per connection and that its answer stays the same, and the limit of calls under way. What one
request and its answer hold is exchange.py's, when a call may be made peer.py's, what is attempted again retries.py's.
Every item ends as a Score or a Failure, never as a made-up number. Knows nothing of how a reward is used.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence

import grpc
import numpy as np

from rolecall.errors import DeadlineError, RateLimitedError, RoleCallError, ScorerError
from rolecall.rpc import deadlines
from rolecall.rpc.channel import open_channel
from rolecall.rpc.options import MAX_GROUP_BYTES
from rolecall.rpc.tls import token_of
from rolecall.scoring.description import change_of, spec_gaps, spec_problem
from rolecall.scoring.exchange import believed, cut, drop_undeclared, only
from rolecall.scoring.joint import JointCalls
from rolecall.scoring.peer import Peer
from rolecall.scoring.retries import Retries
from rolecall.scoring.scores import Failure, Outcome
from rolecall.settings import (
    FEW_CALLS,
    AlgorithmSection,
    ControllerSection,
    ExternalScorer,
    PassAtKAdvantage,
    RewardSection,
    RpcSection,
    taken_names,
)
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2, reward_pb2_grpc

logger = logging.getLogger(__name__)

CAUSE_TIMEOUT_S = 2.0
"""Deadline of the call that asks why nobody answered; a connection that fails says so at once."""

_IDEMPOTENT = ("rolecall.v1.RewardService/Score", "rolecall.v1.RewardService/Describe")
"""Repeated by gRPC, at once and on another replica, when one of our own service dies in a call. Towards others the
attempts are counted (reward.proto), and retries.py alone makes them.
"""


class RewardClient:
    """A client of one scorer behind one channel. Safe for concurrent use; the caller closes the channel."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        name: str,
        address: str,
        timeout_s: float,
        max_attempts: int,
        max_calls: int = FEW_CALLS,
        is_foreign: bool = False,
        hedge_after_s: float | None = None,
        is_joint: bool = False,
        is_whole: bool = False,
        loads: bool = False,
    ) -> None:
        """`name` and `address` name the scorer in messages; `timeout_s` is the deadline of one call and `max_attempts`
        the tries per call and per item. max_calls: bound on the requests under way; further ones wait, within their
        caller's deadline. is_foreign: somebody else wrote it, so that gaps in its description are told.
        hedge_after_s: a Score call that takes longer is made a second time, and whichever answers first counts.
        is_joint: what waits may go together (joint.py); ids must then be unique among all that is scored.
        is_whole: it is the run's reward and not a component of it, so that its components are metrics of their own.
        loads: the run starts its server, which loads a model.
        """
        self._stub = reward_pb2_grpc.RewardServiceStub(channel)
        self._name = name
        self._address = address
        self._timeout_s = timeout_s
        self._is_foreign = is_foreign
        self._is_whole = is_whole
        self._spec: reward_pb2.DescribeResponse | None = None
        self._first: reward_pb2.DescribeResponse | None = None
        """What it said first; what gives its numbers their meaning must not change after that."""
        self.described: reward_pb2.DescribeResponse | None = None
        """The newest description that means the same as the first; None before there is one."""
        self._told_change: str | None = None
        self._asking: asyncio.Task[reward_pb2.DescribeResponse] | None = None
        self._calls = asyncio.Semaphore(max_calls)
        self._peer = Peer(name=name, address=address, timeout_s=timeout_s, hedge_after_s=hedge_after_s, loads=loads)
        self._retries = Retries(max_attempts, ScorerMeter(name), self._takes_whole_groups)
        self._once = JointCalls(self._attempt, max_calls, timeout_s).score if is_joint else self._attempt

    @property
    def trouble(self) -> str:
        """The reason why it gives no scores at present: its name, its address, the last error. Empty once it answered
        again.
        """
        return self._peer.trouble

    async def describe(self) -> reward_pb2.DescribeResponse:
        """Returns what the scorer says it is; asked again after a call or an answer that failed. ScorerError when the
        description is unusable or another than before, else what the call raises.
        """
        if self._spec is not None:
            return self._spec
        if self._asking is None:
            # One question for everyone who waits, bound to no single caller's deadline: an absent scorer costs its
            # timeout once, not once per call.
            with deadlines.without_deadline():
                self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)  # bounded: by the deadlines of the wait and the Describe call in it

    def forget(self) -> None:
        """Has the next `describe` ask again."""
        self._spec = None

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """One outcome per item, in the items' order; ids must be unique. Failures of the scorer or of the connection
        are outcomes, not exceptions.
        """
        return await self._retries.outcomes(self._once, items)

    def _takes_whole_groups(self) -> bool:
        return self._first is not None and self._first.whole_groups

    async def _ask(self) -> reward_pb2.DescribeResponse:
        try:
            spec = await self._description()
        except RoleCallError as error:
            self._peer.is_unknown(error)
            raise
        self._peer.is_known()
        problem = spec_problem(spec) or (taken_problem(spec) if self._is_whole else None)
        if problem:
            raise ScorerError(f"scorer {self._name!r} {problem}")
        if self._first is None and self._is_foreign:
            for gap in spec_gaps(spec):
                logger.warning(
                    "scorer %r at %s %s; correct what Describe answers, if it is not meant so",
                    self._name,
                    self._address,
                    gap,
                )
        self._first = self._first or spec
        change = change_of(self._first, spec)
        if change:
            if change != self._told_change:
                logger.warning("scorer %r at %s changed %s and is not believed", self._name, self._address, change)
            self._told_change = change
            raise ScorerError(
                f"scorer {self._name!r} changed {change} within the run; put it back, or stop the run and resume it "
                "with the new one"
            )
        return spec

    async def _description(self) -> reward_pb2.DescribeResponse:
        question, started = reward_pb2.DescribeRequest(), time.monotonic()
        try:
            return (
                await self._peer.within_limit(
                    lambda: self._stub.Describe(question, timeout=self._timeout_s, wait_for_ready=True)
                )
            )[0]
        except DeadlineError:
            if time.monotonic() - started < 0.9 * self._timeout_s:
                raise  # it is the scorer's own word
            # What a connection fails of (nobody listens, an untrusted certificate) is told to calls alone that do not
            # wait for it.
            return (await self._peer.within_limit(lambda: self._stub.Describe(question, timeout=CAUSE_TIMEOUT_S)))[0]

    def _asked(self, task: "asyncio.Task[reward_pb2.DescribeResponse]") -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is None:
            self._spec = self.described = task.result()

    async def _attempt(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        away = self._peer.away()
        if away is not None:
            return [self._peer.failure(away)] * len(items)
        try:
            spec = await self.describe()
        except RoleCallError as error:
            return [self._peer.has_failed(error)] * len(items)
        # messages of their own: what they are made of is not kept, for it may be large
        requests = [reward_pb2.ScoreRequest(items=part) for part in cut([only(item, spec) for item in items], spec)]
        scored = await asyncio.gather(*(self._call(request, spec) for request in requests))
        by_id = {
            item.id: outcome
            for request, outcomes in zip(requests, scored, strict=True)
            for item, outcome in zip(request.items, outcomes, strict=True)
        }
        return [by_id[item.id] for item in items]

    async def _call(self, request: reward_pb2.ScoreRequest, spec: reward_pb2.DescribeResponse) -> list[Outcome]:
        async with self._calls:  # bounded: what is inside has timeout_s, and admission bounds how many wait
            try:
                response, called_at = await self._peer.within_limit(
                    lambda: self._peer.hedged(lambda: self._stub.Score(request, timeout=self._timeout_s))
                )
                if self._is_whole and not self._is_foreign and drop_undeclared(response, spec):
                    self.forget()  # a shadow has come back since, or another replica has seen it
                outcomes = believed(response, request.items, spec, self._name)
            except RoleCallError as error:
                if not isinstance(error, RateLimitedError):
                    self.forget()  # perhaps another process answers there now
                failure = self._peer.has_failed(error)
                self._peer.is_silent(failure)
                return [failure] * len(request.items)
        self._peer.has_scored(outcomes, called_at)
        if ScorerError.reason in {outcome.code for outcome in outcomes if isinstance(outcome, Failure)}:
            self.forget()  # perhaps it describes itself otherwise now
        return outcomes


def taken_problem(spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns why the description cannot be that of a run's whole reward; None when it can."""
    taken = taken_names(component.name for component in spec.components)
    return (
        f"declares the components {taken}, and metrics of the whole reward are called so (reward/NAME, eval/SET/NAME); "
        "rename them there, or name it under reward.components, where its components get a prefix"
        if taken
        else None
    )


def algorithm_problem(algorithm: AlgorithmSection, spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns why `algorithm` cannot go by what the description's scorer gives; None when it can. What the settings
    tell of scorers of their own was checked with them.
    """
    component, given = algorithm.filters.component, sorted(each.name for each in spec.components)
    if component is not None and component not in given:
        return (
            f"algorithm.filters.component {component!r}: the reward has no component of that name, it has {given}; "
            "name one of them, or remove it"
        )
    advantage, clip_min, reward = algorithm.advantage, algorithm.shaping.clip_min, spec.reward
    if advantage.kind == "gdpo" and spec.token_rewards:
        return (
            "algorithm.advantage gdpo reads the reward's components, which the token_rewards that the scorer gives do "
            "not reach; use another estimator, or a scorer without them"
        )
    if advantage.kind == "maxrl" and reward.HasField("min") and reward.min < 0 and (clip_min is None or clip_min < 0):
        return (
            f"algorithm.advantage maxrl divides by the group's mean reward, which may be {reward.min:g} by what the "
            "scorer says of it; set algorithm.shaping.clip_min: 0, or use another estimator"
        )
    highest = reward.max if reward.HasField("max") and not spec.token_rewards else math.inf
    # in float32, as rewards are: weights such as .01, .29 and .7 make 1 there
    if isinstance(advantage, PassAtKAdvantage) and np.float32(highest) < advantage.solved_at:
        return (
            f"algorithm.advantage pass_at_k takes a response for right from {advantage.solved_at:g} on, and the scorer "
            f"says {highest:g} at most; raise the weights under reward.components, or use another estimator"
        )
    return None


def open_client(section: RewardSection, address: str, rpc: RpcSection) -> tuple[RewardClient, grpc.aio.Channel]:
    """The controller's client of the run's reward service at `address`, and the channel to close after it. ConfigError
    for an unreadable token or roots.
    """
    token, ours = token_of(section.bearer_token_file), bool(section.components)
    channel = open_channel(
        address,
        rpc,
        idempotent=_IDEMPOTENT if ours else (),
        tls=True if section.tls else None,
        bearer_token=token,
        ca_file=None if section.ca_file == "system" else section.ca_file,
        ours=ours,
        max_message_bytes=MAX_GROUP_BYTES,
    )
    client = RewardClient(
        channel,
        name="reward",
        address=address,
        timeout_s=section.timeout_s,
        max_attempts=section.max_attempts,
        max_calls=ControllerSection.max_score_calls if ours else FEW_CALLS,
        is_foreign=not ours,
        is_joint=True,
        is_whole=True,
    )
    return client, channel


def open_external(
    name: str, scorer: ExternalScorer, rpc: RpcSection, *, timeout_s: float, max_attempts: int
) -> tuple[RewardClient, grpc.aio.Channel]:
    """A client of the external scorer that is the component `name`, and the channel to close after it."""
    token = token_of(scorer.bearer_token_file)
    channel = open_channel(
        scorer.address,
        rpc,
        tls=scorer.tls,
        bearer_token=token,
        ca_file=None if scorer.ca_file == "system" else scorer.ca_file,
        ours=False,
        max_message_bytes=MAX_GROUP_BYTES,
    )
    client = RewardClient(
        channel,
        name=name,
        address=scorer.address,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        max_calls=scorer.max_calls,
        is_foreign=scorer.server is None,  # a reward model of the run's gives logits, which have no range
        hedge_after_s=scorer.hedge_after_s,
        loads=scorer.server is not None,
    )
    return client, channel
