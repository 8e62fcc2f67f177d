"""The way of new weights to the rollouts: the weight channel's epochs and the transcript of one publish.

    begin     attestations revoked in the store
    open      a new epoch, when the membership changed or the last publish broke the channel
    transfer  Actor.PublishWeights together with every Rollout.ReceiveWeights
    verify    digest, fingerprints by name and probe of every receiver against the actor's
    attest    (version, digest) recorded for those that hold it whole; only then Rollout.Resume

Whoever fails is left out, and the rest never wait for it longer than one deadline and ANSWER_S. Who finished is served
by what arrived; a broken collective fails the innocent too, so then the publish is made again, under a new version and
epoch, without the culprit:

    a receiver that names itself       its connection broke, or its error is not that of a broken collective
    one that does not answer           after the collective was aborted, a receiver that lives answers at once
    the actor's laggards               the ranks with the fewest buckets, when some rank has more

Nobody is left out when none of these tells; MAX_ATTEMPTS bounds that. At the next step boundary everyone alive is asked
again. A member that the fleet loses ends an attempt at once, and so does a trainer. Leaving `publish` (cancelled, or by
an error) aborts the collective in the actor: its call is cancelled.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rolecall.errors import (
    ChannelBrokenError,
    DeadlineError,
    RoleCallError,
    StaleEpochError,
    WeightsMismatchError,
    WorkerLostError,
)
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.telemetry import Metrics
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
from services.controller.recovered import Recovered
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Publishes of one step that may fail while nobody dies, before `publish` fails; deaths are bounded by
controller.stall_timeout_s.
"""

ANSWER_S = 3.0
"""What a receiver that lives may take to answer once the collective is over, or to resume; a bucket's deadline where
that is shorter.
"""

RECEIVER_PATIENCE = 3
"""Bucket deadlines that a receiver waits for its next bucket: the actor may be gathering, or telling which of the other
receivers is late.
"""

_PAUSE_MODES = {
    "keep": rollout_pb2.PAUSE_MODE_KEEP,
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


class PolicyPublisher:
    """Publishes the actor's weights to the fleet in one life of the loop, one publish at a time."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        threads: StoreThreads,
        fleet: Fleet,
        actor: ActorServiceStub,
        probe: weights_pb2.Probe,
        recovered: Recovered,
    ) -> None:
        """`probe`: what make_probe gives."""
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._fleet = fleet
        self._actor = actor
        self._epoch: Epoch | None = None
        self._probe = probe
        self._answer_s = min(ANSWER_S, settings.weights.bucket_timeout_s)
        self._ctl = recovered.ctl
        self._policy_version = recovered.policy_version
        self._published_step = recovered.position.published_step
        self._step_of_version = dict(recovered.step_of_version)

    @property
    def policy_version(self) -> int:
        """Highest version ever announced."""
        return self._policy_version

    @property
    def published_step(self) -> int:
        """Steps behind the weights that the fleet holds; -1 before the first publish."""
        return self._published_step

    @property
    def step_of_version(self) -> Mapping[int, int]:
        """Steps behind the weights of each published version."""
        return self._step_of_version

    def nobody_serves(self) -> bool:
        """Whether rollouts live and none of them holds the current version, attested."""
        rollouts = self._fleet.rollouts()
        return bool(rollouts) and all(rollout.policy_version != self._policy_version for rollout in rollouts)

    def holds(self, step: int) -> bool:
        """Whether rollouts live and every one of them serves the current version, which is of `step`."""
        rollouts = self._fleet.rollouts()
        return (
            bool(rollouts)
            and self._published_step == step
            and all(rollout.policy_version == self._policy_version for rollout in rollouts)
        )

    async def publish(self, step: int) -> Metrics:
        """Brings the weights after `step` steps to every living rollout, attests them and lets the rollouts serve.

        WorkerLostError when no rollout took them, or a trainer died; DeadlineError after controller.stall_timeout_s;
        the actor's own failures are raised as they are.
        """
        excluded: set[str] = set()
        num_failed, causes = 0, "none is alive"
        give_up_at = time.monotonic() + self._settings.controller.stall_timeout_s
        while num_failed < MAX_ATTEMPTS:
            await self._fleet.wait_for_rollouts(1, give_up_at - time.monotonic())
            members = [rollout for rollout in self._fleet.rollouts() if rollout.consumer not in excluded]
            # they may be dying, or late: asked again until one takes the weights or the fleet gives them up
            if not members:
                excluded.clear()
                await asyncio.sleep(self._settings.controller.heartbeat_s)
                continue
            try:
                async with asyncio.timeout(
                    min(self._settings.weights.publish_timeout_s, give_up_at - time.monotonic())
                ):
                    return await self._attempt(step, members)
            except AttemptFailed as failed:
                causes = str(failed)
                logger.warning(
                    "publish of step %d failed, trying again without %s: %s",
                    step,
                    sorted(failed.culprits) or "anyone less",
                    failed,
                )
                excluded |= failed.culprits
                num_failed += not failed.is_death
            except TimeoutError as error:
                names = ", ".join(rollout.consumer for rollout in members)
                raise DeadlineError(
                    f"publishing step {step} to {names} took longer than weights.publish_timeout_s"
                ) from error
        raise WorkerLostError(f"no rollout took the weights of step {step}: {causes}")

    async def _attempt(self, step: int, members: Sequence[Rollout]) -> Metrics:
        """One publish, for as long as all members and the trainers live."""
        epoch, self._epoch = self._epoch, None
        work = asyncio.create_task(self._publish_once(step, members, epoch))
        death = asyncio.create_task(self._fleet.until_lost(members))
        trainer = asyncio.create_task(self._fleet.trainer_lost())
        try:
            await asyncio.wait(
                {work, death, trainer}, return_when=asyncio.FIRST_COMPLETED
            )  # bounded: by publish, which gives it publish_timeout_s
            if work.done():
                return work.result()
            if trainer.done():
                trainer.result()
            gone = death.result()
            raise AttemptFailed(gone, gone)
        finally:
            await cancelled(work, death, trainer)

    async def _publish_once(self, step: int, members: Sequence[Rollout], epoch: Epoch | None) -> Metrics:
        started = time.monotonic()
        version = await self._begin(step)
        if self._settings.rollout.pause_mode == "wait":
            # Finishing what runs may take longer than a bucket's deadline, which runs once the transfer has begun.
            pause = rollout_pb2.PauseRequest(ctl=self._ctl, mode=rollout_pb2.PAUSE_MODE_WAIT)
            await self._all(
                members, lambda rollout: rollout.stub.Pause(pause, timeout=self._settings.weights.publish_timeout_s)
            )
        if (
            epoch is None
            or epoch.consumers != tuple(rollout.consumer for rollout in members)
            or epoch.root != self._fleet.actors()
        ):
            epoch = await self._open_epoch(members)
        sent, received = await self._transfer(epoch, members, step, version)
        failures = self._verify(sent, received)
        holders = [rollout for rollout in members if rollout.consumer not in failures]
        if not holders or any(is_collateral(error) for error in failures.values()):
            raise AttemptFailed.of({**received, **failures})
        self._step_of_version[version] = step
        await self._threads.call(
            self._ledger.attest, version, step, sent.digest, [rollout.consumer for rollout in holders]
        )
        failures |= await self._resume(holders, version, sent.digest)
        if len(failures) == len(members):
            raise AttemptFailed(failures, failures)
        for consumer, error in failures.items():
            logger.warning("%s is left out of version %d until the next publish: %s", consumer, version, error)
        self._published_step = step
        self._epoch = None if failures else epoch
        return _metrics(sent, version, time.monotonic() - started, len(failures))

    async def _begin(self, step: int) -> int:
        """Revokes every attestation; the new version. Those given up before are expelled first: a late expulsion would
        revoke what this publish attests.
        """
        await self._fleet.settled()
        self._policy_version += 1
        await self._threads.call(self._ledger.begin_publish, self._policy_version, step)
        self._fleet.revoke()
        return self._policy_version

    async def _open_epoch(self, members: Sequence[Rollout]) -> Epoch:
        number, root = await self._threads.call(self._ledger.next_epoch), self._fleet.actors()
        ranks = [rollout.consumer for rollout in members for _ in range(rollout.join.num_weight_ranks)]
        world_size = 1 + len(ranks)
        timeout_s = self._settings.weights.meeting_timeout_s(world_size)
        on_gpus = all(rollout.join.on_gpus for rollout in members)
        request = weights_pb2.OpenWeightChannelRequest(
            ctl=self._ctl, epoch=number, world_size=world_size, timeout_s=timeout_s, receivers_on_gpus=on_gpus
        )
        opened = await self._actor.OpenWeightChannel(request, timeout=timeout_s)

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
        calls = {
            rollout.consumer: call(rollout.stub.Resume(request, timeout=2 * self._answer_s)) for rollout in holders
        }
        try:
            failures = failures_of(await answers(calls, self._answer_s))
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


def _metrics(sent: actor_pb2.PublishWeightsResponse, version: int, time_s: float, num_left_out: int) -> Metrics:
    metrics = Metrics()
    metrics.max("publish/time_s", time_s)
    metrics.max("publish/transfer_s", sent.transfer_s)
    metrics.max("publish/num_bytes", sent.num_bytes)
    metrics.max("publish/wire_bytes", sent.wire_bytes)
    metrics.max("publish/mb_per_s", sent.num_bytes / max(sent.transfer_s, 1e-9) / 1e6)
    metrics.max("publish/policy_version", version)
    metrics.max("publish/left_out", num_left_out)
    return metrics
