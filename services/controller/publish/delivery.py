"""One version of the weights on its way to some rollouts: an epoch of the weight channel, transfer, verification, and
who serves it then.

    open      the actor opens an epoch, and every receiver joins it
    transfer  Actor.PublishWeights together with every Rollout.ReceiveWeights
    verify    digest, fingerprints by name and probe of every receiver against the actor's
    attest    (version, digest) recorded for those that hold it whole; only then Rollout.Resume

Owns no version and no choice of receivers: publisher.py says what goes to whom, and what follows from a failure.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rolecall.errors import ChannelBrokenError, RoleCallError, StaleEpochError, WeightsMismatchError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.v1 import actor_pb2, rollout_pb2, weights_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from services.controller.fleet.liveness import Rollout
from services.controller.fleet.members import Fleet
from services.controller.publish.probe import difference
from services.controller.publish.receivers import (
    AttemptFailed,
    Outcomes,
    answers,
    call,
    cancelled,
    failure,
    failures_of,
    is_collateral,
    laggards_of,
    names_itself,
)
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
"""What a receiver that lives may take to answer once the collective is over; a bucket's deadline where that is shorter.
"""

RECEIVER_PATIENCE = 3
"""Bucket deadlines that a receiver waits for its next bucket: the actor may be gathering, or telling which of the other
receivers is late.
"""

_PAUSE_MODES = {
    "keep": rollout_pb2.PAUSE_MODE_KEEP,
    "keep_cache": rollout_pb2.PAUSE_MODE_KEEP_CACHE,
    "wait": rollout_pb2.PAUSE_MODE_WAIT,
    "abort": rollout_pb2.PAUSE_MODE_ABORT,
}

T = TypeVar("T")


@dataclass(frozen=True)
class Epoch:
    """An open weight channel: its number and its receivers in order of rank."""

    number: int
    consumers: tuple[str, ...]
    ranks: Mapping[int, str]
    """Receiver by rank; one of several ranks appears several times."""
    root: tuple[str, ...]
    """The actor's process that opened it: its next one knows nothing of it."""


class Delivery:
    """The way of weights to receivers, in one life of the loop."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        threads: StoreThreads,
        fleet: Fleet,
        actor: ActorServiceStub,
        probe: weights_pb2.Probe,
        ctl: int,
    ) -> None:
        """`probe`: what make_probe gives; `ctl`: this controller's fencing number."""
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._fleet = fleet
        self._actor = actor
        self._probe = probe
        self._ctl = ctl
        self._answer_s = min(ANSWER_S, settings.weights.bucket_timeout_s)

    async def finish_requests(self, members: Sequence[Rollout]) -> None:
        """Returns once `members` have finished what they sample, where rollout.pause_mode asks for that: it may take
        longer than a bucket's deadline, which runs once the transfer has begun. AttemptFailed.
        """
        if self._settings.rollout.pause_mode == "wait":
            pause = rollout_pb2.PauseRequest(ctl=self._ctl, mode=rollout_pb2.PAUSE_MODE_WAIT)
            await self._all(
                members, lambda rollout: rollout.stub.Pause(pause, timeout=self._settings.weights.publish_timeout_s)
            )

    async def open_epoch(self, members: Sequence[Rollout]) -> Epoch:
        """Opens an epoch whose receivers are `members`; the actor ends the one before. AttemptFailed."""
        number, root = await self._threads.call(self._ledger.next_epoch), self._fleet.actors()
        ranks = [rollout.consumer for rollout in members for _ in range(rollout.join.num_weight_ranks)]
        world_size = 1 + len(ranks)
        timeout_s = self._settings.weights.meeting_timeout_s(world_size)
        on_gpus = all(rollout.join.on_gpus for rollout in members)
        request = weights_pb2.OpenWeightChannelRequest(
            ctl=self._ctl, epoch=number, world_size=world_size, timeout_s=timeout_s, receivers_on_gpus=on_gpus
        )
        # in shifts the actor's ranks open it together, once all have left what they were sending
        answer_s = self._settings.weights.publish_timeout_s if self._settings.takes_shifts else timeout_s
        opened = await self._actor.OpenWeightChannel(request, timeout=answer_s)

        def meet(rollout: Rollout) -> Awaitable[weights_pb2.JoinWeightChannelResponse]:
            rank = 1 + ranks.index(rollout.consumer)
            place = weights_pb2.JoinWeightChannelRequest(
                ctl=self._ctl,
                epoch=number,
                address=opened.address,
                rank=rank,
                world_size=world_size,
                timeout_s=timeout_s,
                backend=opened.backend,
            )
            return rollout.stub.JoinWeightChannel(place, timeout=timeout_s + 2 * self._answer_s)

        await self._all(members, meet)
        return Epoch(number, tuple(rollout.consumer for rollout in members), dict(enumerate(ranks, start=1)), root)

    async def deliver(
        self, epoch: Epoch, members: Sequence[Rollout], step: int, version: int
    ) -> tuple[actor_pb2.PublishWeightsResponse, dict[str, RoleCallError]]:
        """Transfers, verifies, attests and lets serve. Returns what the actor sent, and who is left out and why.
        AttemptFailed when the collective broke or nobody serves.
        """
        sent, received = await self._transfer(epoch, members, step, version)
        failures = self._verify(sent, received)
        holders = [rollout for rollout in members if rollout.consumer not in failures]
        if not holders or any(is_collateral(error) for error in failures.values()):
            raise AttemptFailed.of({**received, **failures})
        await self._threads.call(
            self._ledger.attest, version, step, sent.digest, [rollout.consumer for rollout in holders]
        )
        failures |= await self._resume(holders, version, sent.digest)
        if len(failures) == len(members):
            raise AttemptFailed(failures, failures)
        for consumer, error in failures.items():
            logger.warning("%s is left out of version %d until the next publish: %s", consumer, version, error)
        return sent, failures

    async def _transfer(
        self, epoch: Epoch, members: Sequence[Rollout], step: int, version: int
    ) -> tuple[actor_pb2.PublishWeightsResponse, Outcomes[rollout_pb2.ReceiveWeightsResponse]]:
        """Returns what the actor sent, and what each receiver reports. AttemptFailed when the collective broke."""
        weights = self._settings.weights
        receive = rollout_pb2.ReceiveWeightsRequest(
            ctl=self._ctl,
            epoch=epoch.number,
            policy_version=version,
            pause_mode=_PAUSE_MODES[self._settings.rollout.pause_mode],
            bucket_timeout_s=RECEIVER_PATIENCE * weights.bucket_timeout_s,
            probe=self._probe,
        )
        send = actor_pb2.PublishWeightsRequest(
            ctl=self._ctl,
            epoch=epoch.number,
            step=step,
            policy_version=version,
            bucket_timeout_s=weights.bucket_timeout_s,
            probe=self._probe,
        )
        sending = call(self._actor.PublishWeights(send, timeout=weights.publish_timeout_s))
        receiving = {
            rollout.consumer: call(rollout.stub.ReceiveWeights(receive, timeout=weights.publish_timeout_s))
            for rollout in members
        }
        try:
            while not sending.done() and not any(failure(task) for task in receiving.values()):
                # bounded: the calls have publish_timeout_s
                await asyncio.wait(
                    {task for task in (sending, *receiving.values()) if not task.done()},
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if not sending.done() and not any(names_itself(task) for task in receiving.values()):
                # a receiver felt the break first; the actor knows who is behind
                await asyncio.wait({sending}, timeout=self._answer_s)
            if sending.done() and not isinstance(sending.exception(), ChannelBrokenError | StaleEpochError):
                # All buckets are out: what is left to each receiver is to load the last one and to run the probe.
                return sending.result(), await answers(receiving, weights.bucket_timeout_s)
            broken = sending.exception() if sending.done() else None
            await cancelled(sending)
            raise AttemptFailed.of(await self._last_answers(receiving), laggards_of(broken, epoch.ranks))
        finally:
            await cancelled(sending, *receiving.values())

    def _verify(
        self, sent: actor_pb2.PublishWeightsResponse, received: Outcomes[rollout_pb2.ReceiveWeightsResponse]
    ) -> dict[str, RoleCallError]:
        """Receivers that do not hold what was sent, and why."""
        bound = self._settings.weights.probe_tolerance
        failures = failures_of(received)
        for consumer, answer in received.items():
            if not isinstance(answer, RoleCallError):
                problem = difference(sent, answer, exact=self._settings.model.dtype == "float32", tolerance=bound)
                if problem is not None:
                    failures[consumer] = WeightsMismatchError(f"{consumer} did not load what was sent: {problem}")
        return failures

    async def _resume(self, holders: Sequence[Rollout], version: int, digest: str) -> dict[str, RoleCallError]:
        """Lets them serve. Who does not answer may serve or not, and is attested in the store: it is expelled, so that
        what it holds goes to others.
        """
        request = rollout_pb2.ResumeRequest(ctl=self._ctl, policy_version=version, digest=digest)
        timeout_s = self._settings.weights.bucket_timeout_s  # who is slow to go on, or to take its memory back, is well
        calls = {rollout.consumer: call(rollout.stub.Resume(request, timeout=timeout_s)) for rollout in holders}
        try:
            failures = failures_of(await answers(calls, timeout_s))
        finally:
            await cancelled(*calls.values())
        for rollout in holders:
            error = failures.get(rollout.consumer)
            if error is None:
                self._fleet.attest(rollout, version)
            else:
                await self._threads.call(
                    self._ledger.expel, rollout.consumer, 0, True, error=f"it did not resume: {error.message}"
                )
        return failures

    async def _all(self, members: Sequence[Rollout], ask: Callable[[Rollout], Awaitable[T]]) -> None:
        """Returns when everyone has answered. AttemptFailed when somebody cannot."""
        tasks = {rollout.consumer: call(ask(rollout)) for rollout in members}
        try:
            await asyncio.wait(
                tasks.values(), return_when=asyncio.FIRST_EXCEPTION
            )  # bounded: each is a call, and a call has a deadline
            if any(failure(task) for task in tasks.values()):
                raise AttemptFailed.of(await self._last_answers(tasks))
        finally:
            await cancelled(*tasks.values())

    async def _last_answers(self, tasks: "Mapping[str, asyncio.Task[T]]") -> Outcomes[T]:
        """Collects what receivers answer once the collective is over; when one has named itself already, nobody else
        need be waited for.
        """
        return await answers(tasks, 0 if any(names_itself(task) for task in tasks.values()) else self._answer_s)
