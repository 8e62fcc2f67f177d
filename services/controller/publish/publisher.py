"""The way of new weights to the rollouts: the weight channel's epochs and the transcript of one publish.

    begin     attestations revoked in the store
    open      a new epoch, when the membership changed or the last publish broke the channel
    deliver   transfer, verify, attest, resume: delivery.py

Whoever fails is left out, and the rest never wait for it longer than one deadline and ANSWER_S. Who finished is served
by what arrived; a broken collective fails the innocent too, so then the publish is made again, under a new version and
epoch, without the culprit:

    a receiver that names itself       its connection broke, or its error is not that of a broken collective
    one that does not answer           after the collective was aborted, a receiver that lives answers at once
    the actor's laggards               the ranks with the fewest buckets, when some rank has more

Nobody is left out when none of these tells; MAX_ATTEMPTS bounds that. At the next step boundary everyone alive is asked
again. A member that the fleet loses ends an attempt at once, and so does a trainer. Leaving `publish` (cancelled, or by
an error) aborts the collective in the actor: its call is cancelled.

Between two publishes `catch_up` brings the version that stands to rollouts that joined after it: nothing is revoked,
and those that serve go on. joiners.py says when.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rolecall.errors import DeadlineError, WorkerLostError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.telemetry import Metrics
from rolecall.v1 import actor_pb2
from services.controller.fleet.liveness import Rollout
from services.controller.fleet.members import Fleet
from services.controller.publish.delivery import Delivery, Epoch
from services.controller.publish.receivers import AttemptFailed, cancelled
from services.controller.recovered import Recovered
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Publishes of one step that may fail while nobody dies, before `publish` fails; deaths are bounded by
controller.stall_timeout_s.
"""


class PolicyPublisher:
    """Publishes the actor's weights to the fleet in one life of the loop, one publish at a time."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        threads: StoreThreads,
        fleet: Fleet,
        delivery: Delivery,
        recovered: Recovered,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._fleet = fleet
        self._delivery = delivery
        self._epoch: Epoch | None = None
        self._policy_version = recovered.policy_version
        self._published_step = recovered.position.published_step
        self._step_of_version = dict(recovered.step_of_version)
        self._asked: set[str] = set()
        """Who was asked to take the current version; whoever did not is asked to take the next: it may have spent this
        one.
        """

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

    def joiners(self) -> list[Rollout]:
        """Returns the living rollouts that lack the current version, which others serve, and were not asked to take it;
        none when nobody serves it.
        """
        if self.nobody_serves():
            return []
        return [
            rollout
            for rollout in self._fleet.rollouts()
            if rollout.policy_version != self._policy_version and rollout.consumer not in self._asked
        ]

    def holds(self, step: int) -> bool:
        """Whether rollouts live and every one of them serves the current version, which is of `step`."""
        rollouts = self._fleet.rollouts()
        return (
            bool(rollouts)
            and self._published_step == step
            and all(rollout.policy_version == self._policy_version for rollout in rollouts)
        )

    async def publish(self, step: int, is_ending: Callable[[], bool] = lambda: False) -> Metrics:
        """Brings the weights after `step` steps to every living rollout, attests them and lets the rollouts serve. Does
        nothing when no rollout lives and the run `is_ending`: whoever resumes it publishes again.

        WorkerLostError when no rollout took them, or a trainer died; DeadlineError after controller.stall_timeout_s;
        the actor's own failures are raised as they are.
        """
        excluded: set[str] = set()
        num_failed, causes = 0, "none is alive"
        give_up_at = time.monotonic() + self._settings.controller.stall_timeout_s
        while num_failed < MAX_ATTEMPTS:
            if not await self._some_live(give_up_at, is_ending):
                return Metrics()
            living = self._fleet.rollouts()
            members = [rollout for rollout in living if rollout.consumer not in excluded]
            # they may be dying, or late: asked again until one takes the weights or the fleet gives them up
            if not members:
                excluded.clear()
                await asyncio.sleep(self._settings.controller.heartbeat_s)
                continue
            publish_s, left_s = self._settings.weights.publish_timeout_s, give_up_at - time.monotonic()
            try:
                async with asyncio.timeout(min(publish_s, left_s)):
                    metrics = await self._attempt(members, self._publish_once(step, members))
                    metrics.sum("publish/left_out", len(living) - len(members))
                    return metrics
            except AttemptFailed as failed:
                causes = str(failed)
                again = f"without {sorted(failed.culprits)}" if failed.culprits else "with the same"
                logger.warning("publish of step %d failed, trying again %s: %s", step, again, failed)
                excluded |= failed.culprits
                num_failed += not failed.is_death
            except TimeoutError as error:
                names = ", ".join(rollout.consumer for rollout in members)
                ended_by = "weights.publish_timeout_s" if publish_s <= left_s else "controller.stall_timeout_s"
                raise DeadlineError(f"publishing step {step} to {names} took longer than {ended_by}") from error
        raise WorkerLostError(f"no rollout took the weights of step {step}: {causes}")

    async def _some_live(self, give_up_at: float, is_ending: Callable[[], bool]) -> bool:
        """Whether a rollout lives, once one does or the run is to end. DeadlineError at `give_up_at`."""
        joining = asyncio.create_task(self._fleet.wait_for_rollouts(1, give_up_at - time.monotonic()))
        try:
            while not joining.done() and not is_ending():
                await asyncio.wait({joining}, timeout=self._settings.controller.heartbeat_s)
            if joining.done():
                joining.result()
                return True  # if it has gone since, another is waited for
            return bool(self._fleet.rollouts())
        finally:
            await cancelled(joining)

    async def catch_up(self, members: Sequence[Rollout]) -> Metrics:
        """Brings the current version, which others serve, to `members`, attests it and lets them serve.

        They have an epoch of their own, so that nobody else takes part; it ends the one before, and the next publish
        opens one for all. The actor must not have trained since. AttemptFailed when none of them took it; any
        RoleCallError of the actor's, DeadlineError after weights.publish_timeout_s. Whoever has begun the version and
        is left without is asked again by the next publish.
        """
        try:
            async with asyncio.timeout(self._settings.weights.publish_timeout_s):
                return await self._attempt(members, self._catch_up_once(members))
        except TimeoutError as error:
            raise DeadlineError("sending the current weights took longer than weights.publish_timeout_s") from error

    async def _attempt(self, members: Sequence[Rollout], attempt: Coroutine[Any, Any, Metrics]) -> Metrics:
        """One attempt to deliver weights, for as long as all members and the trainers live."""
        work = asyncio.create_task(attempt)
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

    async def _publish_once(self, step: int, members: Sequence[Rollout]) -> Metrics:
        epoch, self._epoch = self._epoch, None
        started = time.monotonic()
        version = await self._begin(step)
        self._asked = {rollout.consumer for rollout in members}
        await self._delivery.finish_requests(members)
        if (
            epoch is None
            or epoch.consumers != tuple(rollout.consumer for rollout in members)
            or epoch.root != self._fleet.actors()
        ):
            epoch = await self._delivery.open_epoch(members)
        self._step_of_version[version] = step  # before anybody samples from it
        sent, failures = await self._delivery.deliver(epoch, members, step, version)
        self._published_step = step
        self._epoch = None if failures else epoch
        return _metrics(sent, version, time.monotonic() - started, len(failures))

    async def _catch_up_once(self, members: Sequence[Rollout]) -> Metrics:
        self._epoch = None
        started = time.monotonic()
        await self._fleet.settled()  # as in _begin
        try:
            epoch = await self._delivery.open_epoch(members)
        except AttemptFailed as failed:
            self._asked |= failed.culprits  # the others have not begun the version, and are asked again
            raise
        self._asked |= {rollout.consumer for rollout in members}
        _, failures = await self._delivery.deliver(epoch, members, self._published_step, self._policy_version)
        metrics = Metrics()
        metrics.sum("publish/caught_up", len(members) - len(failures))
        metrics.max("publish/catch_up_s", time.monotonic() - started)
        return metrics

    async def _begin(self, step: int) -> int:
        """Revokes every attestation; the new version. Those given up before are expelled first: a late expulsion would
        revoke what this publish attests.
        """
        await self._fleet.settled()
        self._policy_version += 1
        await self._threads.call(self._ledger.begin_publish, self._policy_version, step)
        self._fleet.revoke()
        return self._policy_version


def _metrics(sent: actor_pb2.PublishWeightsResponse, version: int, time_s: float, num_left_out: int) -> Metrics:
    metrics = Metrics()
    metrics.max("publish/time_s", time_s)
    metrics.max("publish/transfer_s", sent.transfer_s)
    metrics.max("publish/num_bytes", sent.num_bytes)
    metrics.max("publish/wire_bytes", sent.wire_bytes)
    metrics.max("publish/mb_per_s", sent.num_bytes / max(sent.transfer_s, 1e-9) / 1e6)
    metrics.max("publish/policy_version", version)
    metrics.sum("publish/left_out", num_left_out)
    return metrics
