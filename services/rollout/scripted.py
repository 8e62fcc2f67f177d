"""A small deterministic RolloutEngine in this process: the twin of vLLM for tests and for trying a pipeline without a
model.

A response's tokens follow from (prompt, its images, seed, version) by a hash, so that two versions differ and a
repetition does not. Token by token it yields to the event loop, so that requests can be paused, kept over a load and
aborted as in the real engine. Weights are never received: each join or receive answers what the next entry of its
script says.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rolecall.data.model.mixture import Mixture
from rolecall.errors import RoleCallError, UnavailableError
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.v1.training_pb2 import RankTrace
from rolecall.weights.transferred import Transferred
from rolecall.wire import Array
from services.rollout.sampling import (
    EngineInfo,
    MeetingPlace,
    PauseMode,
    Probed,
    Sample,
    SampleRequest,
    VersionSpan,
)

POLL_S = 0.002
"""Seconds between two looks at whether a held response may grow."""


@dataclass
class Running:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False


class ScriptedEngine:
    """A RolloutEngine that samples by a script, without a model."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        eos_token_id: int = 2,
        max_model_tokens: int = 64,
        token_s: float = 0.0,
        sleep_levels: tuple[int, ...] = (),
        mixture: Mixture | None = None,
    ) -> None:
        """Each token takes `token_s` seconds. About one token in eight is the end token. With `mixture` samples say
        experts, which follow from the token and the version.
        """
        self._mixture = mixture
        self._vocab_size = vocab_size
        self._token_s = token_s
        self._version = -1
        self._running: dict[str, Running] = {}
        self._may_run = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._info = EngineInfo(
            max_model_tokens=max_model_tokens,
            num_weight_ranks=1,
            eos_token_ids=(eos_token_id,),
            sleep_levels=sleep_levels,
        )
        self.pauses: list[PauseMode] = []
        """The modes of its pauses, in order."""
        self.joined: list[int] = []
        """Epochs joined, in order."""
        self.failures: deque[Exception] = deque()
        """Errors that the next receives answer, one each; past them, receives succeed."""
        self.hold = False
        """Whether responses grow only by step()."""
        self._steps = 0
        self._num_moves = 0
        self.frozen = False
        """Whether the engine hangs: nothing that is asked of it ends, and nothing moves."""
        self.sample_failures: dict[str, RoleCallError] = {}
        """Errors by request id."""

    @property
    def info(self) -> EngineInfo:
        """The facts that are fixed while the engine lives."""
        return self._info

    @property
    def num_moves(self) -> int:
        """Implements SamplingEngine.num_moves."""
        return self._num_moves

    @property
    def use(self) -> rollout_pb2.EngineUse | None:
        """Implements SamplingEngine.use: it has no cache to say anything of."""
        return None

    @property
    def num_running(self) -> int:
        """Requests in flight, kept ones included."""
        return len(self._running)

    @property
    def running(self) -> Collection[Running]:
        """Requests in flight, each as far as it has come."""
        return self._running.values()

    async def sample(self, request: SampleRequest) -> Sample:
        """Implements SamplingEngine.sample."""
        running = self._running[request.request_id] = Running()
        self._idle.clear()
        try:
            return await self._sample(request, running)
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()

    async def _sample(self, request: SampleRequest, running: Running) -> Sample:
        room = self._info.max_model_tokens - len(request.prompt_token_ids)
        stops = {*self._info.eos_token_ids, *request.sampling.stop_token_ids}
        reason = trajectory_pb2.FINISH_REASON_LENGTH
        while (
            len(running.tokens) < min(room, request.sampling.max_tokens)
            and reason == trajectory_pb2.FINISH_REASON_LENGTH
        ):
            await asyncio.sleep(self._token_s)
            await self._turn(running)
            if running.aborted:
                raise UnavailableError(f"request {request.request_id} was aborted by a pause; ask again")
            if request.request_id in self.sample_failures:
                raise self.sample_failures[request.request_id]
            token, logprob = self._next(request, len(running.tokens))
            running.tokens.append(token)
            self._num_moves += 1
            running.logprobs.append(logprob)
            running.versions.append(self._version)
            if token in stops:
                reason = trajectory_pb2.FINISH_REASON_STOP
        greedy = request.sampling.temperature == 0
        logprobs = np.array(running.logprobs, dtype=np.float32) * (0.0 if greedy else 1.0)
        routing = None if self._mixture is None else self._routing(request, running, self._mixture)
        spans = tuple(_spans(running.versions))
        return Sample(tuple(running.tokens), logprobs.astype(np.float32), spans, reason, routing)

    async def _turn(self, running: Running) -> None:
        """Returns when the next token may be sampled."""
        await self._may_run.wait()  # bounded: by whoever asks, as in engine.py
        await self._thawed()
        while not running.aborted and (
            (self.hold and len(running.tokens) >= self._steps) or not self._may_run.is_set()
        ):
            self._num_moves += not self.frozen  # a response that is held does not hang
            await asyncio.sleep(POLL_S)

    def step(self, num_tokens: int) -> None:
        """Lets held responses grow to `num_tokens`."""
        self._steps = num_tokens

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        seed = 0 if request.sampling.temperature == 0 else request.seed
        text = f"{list(request.prompt_token_ids)}/{seed}/{self._version}/{position}".encode()
        shown = b"".join(request.images)
        draw = int.from_bytes(hashlib.blake2b(text + shown, digest_size=4).digest(), "little")
        token = self._info.eos_token_ids[0] if draw % 8 == 0 else 3 + draw % (self._vocab_size - 3)
        return token, -1.0 - (draw % 1000) / 1000

    def _routing(self, request: SampleRequest, running: Running, mixture: Mixture) -> Array:
        """Routes a token to as many neighbouring experts as a token takes, from one that its id and version name."""
        ids_T = np.array([*request.prompt_token_ids, *running.tokens])[:-1]
        versions_T = np.full(len(ids_T), running.versions[0])
        versions_T[len(request.prompt_token_ids) :] = running.versions[:-1]
        layers_L, places_k = np.arange(mixture.num_layers), np.arange(mixture.num_chosen)
        first_TL = (ids_T + versions_T)[:, None] + layers_L
        encoded = mixture.encode((first_TL[:, :, None] + places_k) % mixture.num_experts)
        return np.concatenate([encoded, encoded[-1:]])

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        """Implements SamplingEngine.probe: -(version + 1) / 8 at every token but the first."""
        await self._thawed()
        logprobs = np.full(len(token_ids), -(self._version + 1) / 8, dtype=np.float32)
        logprobs[0] = 0.0
        return probed(logprobs, num_decoded)

    async def record(self, num_passes: int, path: str) -> list[RankTrace]:
        """Implements SamplingEngine.record: it has no operators to see."""
        wanted = self._num_moves + num_passes
        while self._num_moves < wanted:
            await asyncio.sleep(POLL_S)
        return [RankTrace(failure="a scripted engine has no operators")]

    async def pause(self, mode: PauseMode) -> None:
        """Implements SamplingEngine.pause."""
        self.pauses.append(mode)
        await self._thawed()
        if mode is PauseMode.WAIT and self._may_run.is_set():
            await self._idle.wait()  # bounded: by whoever asks, as in engine.py
        if mode is PauseMode.ABORT:
            for running in self._running.values():
                running.aborted = True
            self._may_run.set()
            await self._idle.wait()  # bounded: by whoever asks, as in engine.py
        self._may_run.clear()

    async def resume(self) -> None:
        """Implements SamplingEngine.resume."""
        await self._thawed()
        self._may_run.set()

    async def join(self, place: MeetingPlace) -> None:
        """Implements EngineWeights.join."""
        await self._thawed()
        self.joined.append(place.epoch)

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        """Implements EngineWeights.receive: takes the version on, or fails as the script says."""
        await asyncio.sleep(self._token_s)
        await self._thawed()
        if self.failures:
            raise self.failures.popleft()
        self._version = policy_version
        return Transferred({"model.weight": policy_version}, digest_of(policy_version), 8, 8, transfer_s=0.001)

    async def sleep(self, level: int) -> None:
        """Implements EngineWeights.sleep."""
        await self.pause(PauseMode.KEEP)

    async def wake_up(self) -> None:
        """Implements EngineWeights.wake_up."""

    async def close(self) -> None:
        """Does nothing: there is no process to end."""

    async def _thawed(self) -> None:
        while self.frozen:
            await asyncio.sleep(POLL_S)


def probed(logprobs: Array, num_decoded: int) -> Probed:
    """Returns what an engine says whose decode steps agree with its prefill."""
    return Probed(logprobs, np.full(num_decoded, -1.0, np.float32), np.full(num_decoded, -1.0, np.float32))


def digest_of(policy_version: int) -> str:
    """Digest of the scripted weights of a version."""
    return hashlib.sha256(str(policy_version).encode()).hexdigest()


def _spans(versions: Iterable[int]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].policy_version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(VersionSpan(version, position, position + 1))
    return spans
