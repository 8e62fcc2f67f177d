"""One rollout replica: an engine, the weights it holds and the gate between what it samples and the world.

Owns the order of a publish on this side: shut the gate, pause, load, probe, and open again only when Resume names what
is held. It is not the pull loop (pull.py) and not the gRPC surface (service.py); both sample through it.

The probe runs in the paused engine, with the gate shut. Only requests that a pause KEEP_CACHE left with their keys and
values run on beside it, and those kept over a sleep for a step as it wakes the engine: they may sample a few tokens
under weights that nobody attested. Nothing of it leaves: a response passes only when every version in its spans was
attested to this engine, and what unattested weights computed is dropped before others are loaded.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rolecall.errors import (
    ChannelBrokenError,
    ConflictError,
    DeadlineError,
    InvalidInputError,
    NotOnThisDeviceError,
    PromptTooLongError,
    RoleCallError,
    StaleEpochError,
    StaleVersionError,
    TornWeightsError,
    UnavailableError,
)
from rolecall.shifts import Post
from rolecall.telemetry.states import StateClock
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.weights.transferred import Transferred
from services.rollout.activity import Activity
from services.rollout.awake import AwakeDeadlines
from services.rollout.gate import Gate
from services.rollout.sampling import MeetingPlace, PauseMode, Probed, RolloutEngine, Sample, SampleRequest, Transfer
from services.rollout.state import HeldWeights, State

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """A sample that may leave the process."""

    sample: Sample
    digests: dict[int, str]
    """Weight digest of each version in the sample's spans."""
    generation_s: float
    """Seconds from submission to the last token, without those in which the engine slept."""
    episode: trajectory_pb2.Episode | None = None
    """What is known of it as an episode, whose sample holds what the environment said, too; None: a single response."""
    segment_starts: tuple[int, ...] = ()
    """Where each segment but the first begins, in the tokens of prompt and sample together."""
    images: tuple[bytes, ...] = ()
    """The distinct images that an episode's environment or agent showed beside the prompt's."""
    shown: tuple[tuple[int, ...], ...] = ()
    """What each segment shows of the prompt's images and those, by index; empty: each shows all of them in order."""


class Replica:
    """A replica: it samples for whoever asks, and takes weights from the channel. Used from one event loop."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        pause_timeout_s: float,
        load_timeout_s: float,
        keep_timeout_s: float,
        on_serving: Callable[[bool], Awaitable[None]],
        post: Post | None = None,
    ) -> None:
        """`pause_timeout_s` bounds one pause (mode WAIT finishes what runs), `load_timeout_s` one load; requests kept
        over a load are given up when Resume, or the next load, does not come within `keep_timeout_s` of it, or of a
        pause that failed, and at once when the load fails by this replica's own fault. `on_serving` is told whether the
        replica serves. `post`, where the device is shared, is held while the engine is awake, as it is now.
        """
        self._engine = engine
        self._post = post
        self._pause_timeout_s = pause_timeout_s
        self._load_timeout_s = load_timeout_s
        self._keep_timeout_s = keep_timeout_s
        self._keeping: asyncio.Task[None] | None = None
        self._epoch = -1
        self._on_serving = on_serving
        self._changing = asyncio.Lock()
        self._activity = Activity()
        self._deadlines = AwakeDeadlines()
        self._load: asyncio.Task[tuple[Transferred, Probed | None]] | None = None
        self._changes: set[asyncio.Task[None]] = set()
        self._keeps = False
        """Whether the last pause left what was in flight to go on later."""
        self._sampling: set[asyncio.Task[Any]] = set()
        self._given_up: set[asyncio.Task[Any]] = set()
        self.info = engine.info
        self.held = HeldWeights()
        """Asked before anything is served."""
        self.gate = Gate()
        """Everything sampled passes it."""
        self.draining = False
        """Set once by drain(): nothing new is taken."""
        self.num_sampled_tokens = 0
        """Since start."""

    @property
    def busy_s(self) -> float:
        """Seconds the engine had work since start."""
        return self._activity.busy_s

    @property
    def use(self) -> rollout_pb2.EngineUse | None:
        """The use that requests make of the engine; None where it does not say."""
        return self._engine.use

    @property
    def states(self) -> StateClock:
        """Returns what it did with its time."""
        return self._activity.states

    @asynccontextmanager
    async def sampling_group(self, timeout_s: float) -> AsyncIterator[None]:
        """Surrounds the sampling of a group of the run: what is sampled outside it is for whoever called Generate.
        TimeoutError when it takes longer than timeout_s, in which the engine's sleep does not count.
        """
        with self._activity.sampling_group():
            async with self._deadlines.within(timeout_s):
                yield

    @property
    def is_busy(self) -> bool:
        """Whether the engine owes something, so that `num_moves` must grow."""
        return self._activity.owes

    @property
    def has_work(self) -> bool:
        """Whether it owes something, samples a group of the run, or waits for the environment to take one."""
        return self._activity.has_work

    def note_places(self, *, missing: bool) -> None:
        """Notes whether places of an environment are `missing` for groups that the engine could sample."""
        self._activity.waits_for_places = missing

    @property
    def num_moves(self) -> int:
        """Grows whenever the engine moves."""
        return self._engine.num_moves + self._activity.num_answers

    # --- sampling ---------------------------------------------------------------------------------

    def require_room(self, prompt_token_ids: Sequence[int], what: str) -> None:
        """PromptTooLongError when `what` leaves no room for a single token, InvalidInputError when it is empty."""
        if not prompt_token_ids:
            raise InvalidInputError(f"{what} has no prompt tokens")
        if len(prompt_token_ids) >= self.info.max_model_tokens:
            raise PromptTooLongError(
                f"{what} has {len(prompt_token_ids)} prompt tokens; the run's engines take "
                f"{self.info.max_model_tokens} in all, response included (data.max_prompt_tokens and the longest "
                "max_tokens, or as many as the model can)"
            )

    def require_serving(self, policy_version: int | None) -> None:
        """UnavailableError (NotAttestedError before the first attestation) unless new requests are taken now, at
        `policy_version` when one is given.
        """
        self.held.require_attested(policy_version)
        if self.draining or not self.gate.is_open:
            raise UnavailableError("the replica is paused or draining; ask again or ask another")

    async def sample(self, request: SampleRequest) -> Response:
        """One response, once the gate lets it out. Cancelling it aborts the request. Errors as SamplingEngine.sample,
        and NotAttestedError when some token came from weights that were never attested.
        """
        started = self._deadlines.time()
        sample = await self._sample(request)
        generation_s = self._deadlines.time() - started
        self.num_sampled_tokens += len(sample.token_ids)
        await self.gate.wait()  # bounded: by keep_timeout_s, see gate.py
        return Response(sample, self.held.digests(span.policy_version for span in sample.spans), generation_s)

    async def _sample(self, request: SampleRequest) -> Sample:
        task = asyncio.current_task()
        assert task is not None
        self._sampling.add(task)
        self._activity.change(running=1)
        try:
            return await self._engine.sample(request)
        except asyncio.CancelledError:
            if task not in self._given_up:
                raise
            task.uncancel()
            raise UnavailableError(
                f"request {request.request_id} was given up with the engine's weights; ask again"
            ) from None
        finally:
            self._activity.change(running=-1)
            self._sampling.discard(task)
            self._given_up.discard(task)

    async def sample_all(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, Response], None]:
        """(index, response) of each request as it ends. Leaving early, or the first error, aborts the rest."""
        tasks = {asyncio.create_task(self.sample(request)): index for index, request in enumerate(requests)}
        pending = set(tasks)
        try:
            while pending:
                # bounded: by generation_timeout_s of whoever asks
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield tasks[task], task.result()
        finally:
            for task in tasks:
                task.cancel()
            # bounded: they are cancelled, and their waits end with that
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- weights ----------------------------------------------------------------------------------

    async def join(self, place: MeetingPlace) -> None:
        """Takes part in an epoch of the weight channel. Not in line with other changes: a new epoch is what frees a
        load that is stuck in an older one. A caller that leaves does not end it: an engine that hangs goes on owing the
        answer. StaleEpochError, ChannelBrokenError.
        """
        if place.epoch <= self._epoch:
            raise StaleEpochError(f"epoch {place.epoch} is not newer than {self._epoch}, which this replica has seen")
        self._epoch = place.epoch
        await self._seen_to_its_end(self._join(place))

    async def _join(self, place: MeetingPlace) -> None:
        with self._activity.asking():
            await self._engine.join(place)

    async def receive(self, transfer: Transfer) -> tuple[Transferred, Probed | None]:
        """Loads one version; the weights are LOADED after it and nothing is served. Also returns what they say of the
        probe, if there is one.

        A caller that leaves does not interrupt it: half a load would tear the weights for nothing. AsleepError,
        StaleEpochError, StaleVersionError (nothing was touched); TornWeightsError when the load did not finish.
        """
        self.held.check_awake()
        self.held.check_newer(transfer.policy_version)
        if transfer.epoch != self._epoch:
            raise StaleEpochError(
                f"epoch {transfer.epoch} is not the one this replica joined last ({self._epoch}); open it first"
            )
        if transfer.probe_token_ids is not None:
            self.require_room([*transfer.probe_token_ids, *range(transfer.num_decoded)], "the probe")
        if self._load is not None:  # of an older epoch, which joining this one has freed
            await asyncio.wait({self._load}, timeout=transfer.bucket_timeout_s)
            if not self._load.done():
                raise ConflictError("another version is being received; wait for its answer")
        self._load = asyncio.create_task(self._receive(transfer))
        self._load.add_done_callback(_look_at)
        with self._activity.awaiting_load():
            # bounded: by bucket_timeout_s for each bucket, and by the caller's deadline
            return await asyncio.shield(self._load)

    async def _receive(self, transfer: Transfer) -> tuple[Transferred, Probed | None]:
        async with self._changing:  # bounded: each change has a deadline of its own, and the caller has one
            self._stop_keeping()
            await self._pause(transfer.pause_mode)
            self.held.begin(transfer.policy_version)
            try:
                received = await self._received(transfer)
            except (ChannelBrokenError, StaleEpochError, StaleVersionError):
                self.held.untouched()
                self._start_keeping()
                raise
            except Exception as error:  # an edge: an engine raises whatever it likes, and nothing may stay "loading"
                self.held.torn()
                cause = (
                    error.details.get("cause", error.reason)
                    if isinstance(error, RoleCallError)
                    else TornWeightsError.reason
                )
                if cause == ChannelBrokenError.reason:
                    self._start_keeping()  # others are to blame, and the whole weights are on their way again soon
                else:
                    await self._give_up()
                raise TornWeightsError(
                    f"the load of version {transfer.policy_version} did not finish: {error}", cause=cause
                ) from error
            self.held.loaded(received.digest)
            self._start_keeping()
            logger.info(
                "version %d loaded: %.1f MB in %.3f s",
                transfer.policy_version,
                received.num_bytes / 1e6,
                received.transfer_s,
            )
            probe = transfer.probe_token_ids
            return received, None if probe is None else await self._probe(probe, transfer.num_decoded)

    async def _received(self, transfer: Transfer) -> Transferred:
        with self._activity.loading():
            async with asyncio.timeout(self._load_timeout_s):
                return await self._engine.receive(transfer.epoch, transfer.policy_version, transfer.bucket_timeout_s)

    async def _probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        try:
            async with asyncio.timeout(self._pause_timeout_s):
                with self._activity.asking():
                    return await self._engine.probe(token_ids, num_decoded)
        except TimeoutError as error:
            raise DeadlineError(f"the probe took longer than {self._pause_timeout_s:.0f} s") from error

    async def pause(self, mode: PauseMode) -> None:
        """Nothing leaves and nothing is sampled until resume. Idempotent."""
        async with self._changing:  # bounded: each change has a deadline of its own, and the caller has one
            await self._pause(mode)

    async def resume(self, policy_version: int, digest: str) -> None:
        """Serves, if (policy_version, digest) is what the engine holds whole. Idempotent. AsleepError,
        TornWeightsError, WrongVersionError.

        A caller that leaves does not interrupt it: an engine that hangs in it is still seen to owe an answer.
        """
        self.held.check_whole()
        await self._seen_to_its_end(self._resume(policy_version, digest))

    async def _resume(self, policy_version: int, digest: str) -> None:
        async with self._changing:  # bounded: each change has a deadline of its own, and the caller has one
            self.held.attest(policy_version, digest)
            self._stop_keeping()
            with self._activity.asking():
                await self._engine.resume()
            self._activity.change(paused=False)
            await self.gate.open()
            await self._on_serving(not self.draining)  # bounded: sets health in this process

    async def _pause(self, mode: PauseMode) -> None:
        if self.held.state is not State.ATTESTED and mode is not PauseMode.ABORT:
            mode = PauseMode.KEEP  # what weights computed that nobody attested is not gone on from
        await self._on_serving(False)  # bounded: sets health in this process
        try:
            await self.gate.shut()
            self._keeps = mode is not PauseMode.ABORT
            await self._come_to_rest(mode)
        except (DeadlineError, asyncio.CancelledError):
            self._start_keeping()  # the gate stays shut, and perhaps nobody asks again
            raise
        self._activity.change(paused=True)

    async def _come_to_rest(self, mode: PauseMode) -> None:
        try:
            async with asyncio.timeout(self._pause_timeout_s):
                with self._activity.asking():
                    await self._engine.pause(mode)
        except TimeoutError as error:
            raise DeadlineError(
                f"requests in flight did not come to rest within {self._pause_timeout_s:.0f} s; pause with KEEP or "
                "ABORT"
            ) from error

    def _start_keeping(self) -> None:
        self._stop_keeping()
        if not self.held.sleep_level:  # asleep, it keeps for as long as the trainers take
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Gives up what is kept when nobody resumes: held any longer, its groups would be missing in the batch that the
        next publish waits for.
        """
        await asyncio.sleep(self._keep_timeout_s)
        async with self._changing:  # bounded: each change has a deadline of its own, and the caller has one
            logger.warning("no version was attested within %.0f s; kept requests are given up", self._keep_timeout_s)
            await self._give_up()

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    async def _give_up(self) -> None:
        with self._activity.asking():
            await self._engine.pause(PauseMode.ABORT)
        for task in self._sampling:  # requests that came while the engine paused are none that it could have aborted
            self._given_up.add(task)
            task.cancel()
        await self.gate.give_up()

    # --- memory and the end -----------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """Frees GPU memory. Idempotent at one level. Requests that the pause kept go on once the engine serves again,
        and compute their keys and values anew; they are given up where its weights are attested no more: vLLM may have
        to wake as a whole before it can sleep, and would go on with them. A caller that leaves does not interrupt it.

        ConflictError unless paused, AsleepError at another level, NotOnThisDeviceError, InvalidInputError.
        """
        self._require_sleep()
        if level not in self.info.sleep_levels:
            raise InvalidInputError(
                f"level {level} is not one of this engine's: 1 keeps the weights in host memory, 2 drops them, "
                "unless nobody sends them"
            )
        await self._seen_to_its_end(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        async with self._changing:  # bounded: each change has a deadline of its own, and the caller has one
            if self.gate.is_open:
                raise ConflictError("the engine is serving; Pause it before Sleep")
            self._stop_keeping()
            if self.held.sleep_level != level:
                keeps = self._keeps and self.held.state is State.ATTESTED
                self.held.fall_asleep(level)
                if keeps:
                    self._deadlines.stop()
                else:
                    await self._give_up()
            with self._activity.asking():
                await self._engine.sleep(level)
            if self._post is not None:
                self._post.leave()

    async def wake_up(self) -> None:
        """Takes the memory back. Idempotent. A caller that leaves does not interrupt it: the engine would be awake, and
        seem asleep. ConflictError in another side's shift; DeviceFullError.
        """
        self._require_sleep()
        await self._seen_to_its_end(self._wake_up())

    async def _wake_up(self) -> None:
        async with self._changing:  # bounded: each change has a deadline of its own, and the caller has one
            if self.held.sleep_level:
                if self._post is not None and not self._post.take():
                    raise ConflictError(
                        "trainers or references are on the device; wake the engine when they have left it"
                    )
                with self._activity.asking():
                    await self._engine.wake_up()
                self.held.wake()
                self._deadlines.go_on()
                self._start_keeping()

    async def _seen_to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        changing = asyncio.create_task(change)
        self._changes.add(changing)
        changing.add_done_callback(self._changes.discard)
        changing.add_done_callback(_look_at)
        await asyncio.shield(changing)  # bounded: as what is inside

    def _require_sleep(self) -> None:
        if not self.info.sleep_levels:
            raise NotOnThisDeviceError("sleep and wake-up free GPU memory; give it GPUs and set rollout.sleep_mode")

    async def stop_taking(self) -> None:
        """Takes nothing new from now on; what runs goes on. Idempotent."""
        self.draining = True
        await self._on_serving(False)  # bounded: sets health in this process


def _look_at(work: "asyncio.Task[Any]") -> None:
    """The caller may have left; then the failure is said here."""
    if not work.cancelled() and work.exception() is not None:
        logger.warning("a change of weights failed: %s", work.exception())
