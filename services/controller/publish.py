"""How new weights reach the rollouts: the weight channel's epochs and the transcript of one publish.

    begin     attestations revoked in the store
    open      a new epoch, when the membership changed or the last publish broke the channel
    transfer  Actor.PublishWeights together with every Rollout.ReceiveWeights
    verify    digest, fingerprints by name and probe of every receiver against the actor's
    attest    (version, digest) recorded; only then Rollout.Resume

A receiver that fails leaves the epoch and the publish is made again, under a new version, with the rest; at the next step boundary it is asked again, and
so are workers that joined meanwhile. A broken collective fails every receiver, the innocent too, so ChannelBroken and Torn alone exclude nobody the first time.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rolecall.errors import ChannelBrokenError, DeadlineError, RoleCallError, TornWeightsError, WeightsMismatchError, WorkerLostError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.telemetry import Metrics
from rolecall.v1 import actor_pb2, rollout_pb2, weights_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.wire import decode_tensor, encode_tensor
from services.controller.fleet import Fleet, Rollout
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Publishes of one step before the run fails."""

MAX_PROBE_TOKENS = 64
"""Long enough for attention to matter, short enough to cost one small prefill. Fewer where the run's longest trajectory is shorter."""

_PAUSE_MODES = {"keep": rollout_pb2.PAUSE_MODE_KEEP, "wait": rollout_pb2.PAUSE_MODE_WAIT, "abort": rollout_pb2.PAUSE_MODE_ABORT}

T = TypeVar("T")


@dataclass(frozen=True)
class Epoch:
    """An open weight channel: its number and its receivers in order of rank."""

    number: int
    consumers: tuple[str, ...]


class _ReceiversFailed(Exception):
    """Some receivers failed; the others may go on without them."""

    def __init__(self, failures: dict[str, RoleCallError]) -> None:
        super().__init__("; ".join(f"{consumer}: {error}" for consumer, error in failures.items()))
        self.failures = failures


class PolicyPublisher:
    """Publishes the actor's weights to the fleet, one publish at a time."""

    def __init__(self, settings: RunSettings, ledger: Ledger, threads: StoreThreads, fleet: Fleet, actor: ActorServiceStub, vocab_size: int) -> None:
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._fleet = fleet
        self._actor = actor
        self._epoch: Epoch | None = None
        self._probe = make_probe(settings, vocab_size)
        self.ctl = 0
        """Set once the run is locked."""
        self.policy_version = -1
        """Highest version ever announced."""
        self.published_step = -1
        """Last step the fleet holds."""
        self.step_of_version: dict[int, int] = {}
        """Steps applied in the weights of each published version."""

    def nobody_serves(self) -> bool:
        """Whether rollouts live and none of them holds the current version, attested."""
        rollouts = self._fleet.rollouts()
        return bool(rollouts) and all(rollout.policy_version != self.policy_version for rollout in rollouts)

    async def publish(self, step: int) -> Metrics:
        """Brings the weights after `step` steps to every living rollout, attests them and lets the rollouts serve.

        WorkerLostError when no rollout took them in MAX_ATTEMPTS; the actor's own failures are raised as they are."""
        excluded: set[str] = set()
        collateral: Counter[str] = Counter()
        causes = "none is alive"
        for _ in range(MAX_ATTEMPTS):
            await self._fleet.wait_for_rollouts(1, self._settings.controller.stall_timeout_s)
            members = [rollout for rollout in self._fleet.rollouts() if rollout.consumer not in excluded]
            if not members:
                break
            try:
                async with asyncio.timeout(self._settings.weights.publish_timeout_s):
                    return await self._publish_once(step, members)
            except _ReceiversFailed as failed:
                causes = str(failed)
                logger.warning("publish of step %d failed, trying again without the culprits: %s", step, failed)
                self._epoch = None
                for consumer, error in failed.failures.items():
                    collateral[consumer] += 1
                    if not isinstance(error, ChannelBrokenError | TornWeightsError) or collateral[consumer] > 1:
                        excluded.add(consumer)
            except TimeoutError as error:
                names = ", ".join(rollout.consumer for rollout in members)
                raise DeadlineError(f"publishing step {step} to {names} took longer than weights.publish_timeout_s") from error
        raise WorkerLostError(f"no rollout took the weights of step {step}: {causes}")

    async def _publish_once(self, step: int, members: Sequence[Rollout]) -> Metrics:
        started = time.monotonic()
        self.policy_version += 1
        version = self.policy_version
        await self._threads.call(self._ledger.begin_publish, version, step)
        for rollout in self._fleet.rollouts():
            rollout.policy_version = -1
        if self._settings.rollout.pause_mode == "wait":
            # Finishing what runs may take longer than a bucket's deadline, which runs once the transfer has begun.
            pause = rollout_pb2.PauseRequest(ctl=self.ctl, mode=rollout_pb2.PAUSE_MODE_WAIT)
            await _each(members, [rollout.stub.Pause(pause, timeout=self._settings.weights.publish_timeout_s) for rollout in members])
        epoch = await self._open_epoch(members)
        sent, received = await self._transfer(epoch, members, step, version)
        self._verify(sent, received)
        self.step_of_version[version] = step
        await self._threads.call(self._ledger.attest, version, step, sent.digest, epoch.consumers)
        resume = rollout_pb2.ResumeRequest(ctl=self.ctl, policy_version=version, digest=sent.digest)
        await _each(members, [rollout.stub.Resume(resume) for rollout in members])
        for rollout in members:
            rollout.policy_version = version
        self.published_step = step
        metrics = Metrics()
        metrics.max("publish/time_s", time.monotonic() - started)
        metrics.max("publish/transfer_s", sent.transfer_s)
        metrics.max("publish/num_bytes", sent.num_bytes)
        metrics.max("publish/mb_per_s", sent.num_bytes / max(sent.transfer_s, 1e-9) / 1e6)
        metrics.max("publish/policy_version", version)
        return metrics

    async def _open_epoch(self, members: Sequence[Rollout]) -> Epoch:
        consumers = tuple(rollout.consumer for rollout in members)
        if self._epoch is not None and self._epoch.consumers == consumers:
            return self._epoch
        timeout_s = self._settings.weights.open_timeout_s
        number = await self._threads.call(self._ledger.next_epoch)
        world_size = 1 + sum(rollout.join.num_weight_ranks for rollout in members)
        request = weights_pb2.OpenWeightChannelRequest(ctl=self.ctl, epoch=number, world_size=world_size, timeout_s=timeout_s)
        address = (await self._actor.OpenWeightChannel(request, timeout=timeout_s)).address
        calls, rank = [], 1
        for rollout in members:
            place = weights_pb2.JoinWeightChannelRequest(ctl=self.ctl, epoch=number, address=address, rank=rank, world_size=world_size, timeout_s=timeout_s)
            calls.append(rollout.stub.OpenWeightChannel(place, timeout=timeout_s + 5))
            rank += rollout.join.num_weight_ranks
        await _each(members, calls)
        self._epoch = Epoch(number, consumers)
        return self._epoch

    async def _transfer(
        self, epoch: Epoch, members: Sequence[Rollout], step: int, version: int
    ) -> tuple[actor_pb2.PublishWeightsResponse, dict[str, rollout_pb2.ReceiveWeightsResponse]]:
        weights = self._settings.weights
        receive = rollout_pb2.ReceiveWeightsRequest(
            ctl=self.ctl,
            epoch=epoch.number,
            policy_version=version,
            pause_mode=_PAUSE_MODES[self._settings.rollout.pause_mode],
            bucket_timeout_s=weights.bucket_timeout_s,
            probe=self._probe,
        )
        send = actor_pb2.PublishWeightsRequest(
            ctl=self.ctl, epoch=epoch.number, step=step, policy_version=version, bucket_timeout_s=weights.bucket_timeout_s, probe=self._probe
        )
        timeout_s = weights.publish_timeout_s
        sending = asyncio.ensure_future(_await(self._actor.PublishWeights(send, timeout=timeout_s)))
        receiving = asyncio.ensure_future(_each(members, [rollout.stub.ReceiveWeights(receive, timeout=timeout_s) for rollout in members]))
        try:
            await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_EXCEPTION)
            if sending.done() and isinstance(sending.exception(), ChannelBrokenError):
                # A receiver broke it and will say so itself, at the latest when its own bucket times out.
                await asyncio.wait([receiving], timeout=weights.bucket_timeout_s + 5)
            if receiving.done():
                answers = receiving.result()
                return await sending, dict(zip(epoch.consumers, answers, strict=True))
            return sending.result(), {}
        finally:
            sending.cancel()
            receiving.cancel()

    def _verify(self, sent: actor_pb2.PublishWeightsResponse, received: dict[str, rollout_pb2.ReceiveWeightsResponse]) -> None:
        bound = self._settings.weights.probe_tolerance
        failures: dict[str, RoleCallError] = {}
        for consumer, answer in received.items():
            problem = difference(sent, answer, exact=self._settings.model.dtype == "float32", tolerance=bound)
            if problem is not None:
                failures[consumer] = WeightsMismatchError(f"{consumer} did not load what was sent: {problem}")
        if failures:
            raise _ReceiversFailed(failures)


async def _await(call: Awaitable[T]) -> T:
    return await call


async def _each(members: Sequence[Rollout], calls: Sequence[Awaitable[T]]) -> list[T]:
    """All answers in order, or _ReceiversFailed with every failure."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failures = {rollout.consumer: outcome for rollout, outcome in zip(members, outcomes, strict=True) if isinstance(outcome, RoleCallError)}
    if failures:
        raise _ReceiversFailed(failures)
    answers: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        answers.append(outcome)
    return answers


def make_probe(settings: RunSettings, vocab_size: int) -> weights_pb2.Probe:
    """Token ids drawn uniformly from the vocabulary: no text, so that no part of the embedding is favoured."""
    num_tokens = min(MAX_PROBE_TOKENS, settings.data.max_prompt_tokens + settings.sampling.max_tokens - 1)
    ids = np.random.default_rng(settings.run.seed).integers(0, vocab_size, num_tokens, dtype=np.int32)
    return weights_pb2.Probe(token_ids=encode_tensor(ids))


def difference(sent: actor_pb2.PublishWeightsResponse, received: rollout_pb2.ReceiveWeightsResponse, *, exact: bool, tolerance: float | None) -> str | None:
    """What is wrong with a receiver's report, or None.

    `exact`: float32 weights, whose probe may differ by 1e-4 at most; else bfloat16, by 0.05 in the mean. `tolerance` replaces the bound."""
    theirs = {item.name: item.value for item in received.fingerprints}
    ours = {item.name: item.value for item in sent.fingerprints}
    wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if wrong:
        return f"{len(wrong)} of {len(ours)} tensors differ, the first is {wrong[0]}"
    if sent.digest != received.digest:
        return f"digest {received.digest[:12]} is not {sent.digest[:12]} although all fingerprints agree: names, dtypes or shapes differ"
    gap = np.abs(decode_tensor(sent.probe.logprobs, "the actor's probe") - decode_tensor(received.probe.logprobs, "the rollout's probe"))
    measured, bound = (float(gap.max()), tolerance or 1e-4) if exact else (float(gap.mean()), tolerance or 0.05)
    if not measured <= bound:
        return f"probe logprobs differ by {measured:.2e}, more than {bound:.2e}: the tensors arrived but the engine computes with others"
    return None
