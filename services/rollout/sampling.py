"""The seams of a rollout: `SamplingEngine` samples, `EngineWeights` takes in new weights. Knows no gRPC server, no
store and no torch.

`engine.py` implements both over vLLM; `scripted.py` is the small in-process twin. One engine serves one replica; all
calls come from one event loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from rolecall.settings import WeightBackend
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.v1.training_pb2 import RankTrace
from rolecall.weights.transferred import Transferred
from rolecall.wire import Array


class PauseMode(Enum):
    """The fate of requests in flight at a pause."""

    KEEP = "keep"
    """Frozen; they go on after resume, on whatever weights are held then, which compute their keys and values again."""
    KEEP_CACHE = "keep_cache"
    """Frozen with their keys and values, from which they go on after resume."""
    WAIT = "wait"
    """Finished first, but for those that gave way in a full cache: they go on as with KEEP."""
    ABORT = "abort"
    """Ended at once; their sample() raises UnavailableError."""


@dataclass(frozen=True)
class EngineInfo:
    """The facts that are fixed while an engine lives."""

    max_model_tokens: int
    """Longest prompt + response."""
    num_weight_ranks: int
    """Ranks it takes in the weight channel."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a response by the model's own configuration."""
    sleep_levels: tuple[int, ...]
    """Levels it can sleep at; empty: sleep and wake_up do not exist."""


@dataclass(frozen=True)
class SampleRequest:
    """A request for one response to a prompt."""

    request_id: str
    """Unique among requests in flight."""
    prompt_token_ids: Sequence[int]
    sampling: trajectory_pb2.SamplingParams
    seed: int
    """63 bits; unused when temperature is 0."""
    images: Sequence[bytes] = ()
    """Files of the images that the prompt shows, in the order in which their tokens stand in it."""


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by the weights of `policy_version`."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One finished response, stop token included; or an episode's tokens after its first prompt."""

    token_ids: tuple[int, ...]
    """Ids of the response's tokens, at least one."""
    logprobs: Array
    """float32 [n]: the sampler's, temperature applied; zeros when greedy, and of tokens that were not sampled."""
    spans: tuple[VersionSpan, ...]
    """Cover what was sampled, of a response all of it, in order, without overlap."""
    finish_reason: trajectory_pb2.FinishReason.ValueType
    """STOP or LENGTH; an aborted response is an error instead."""
    routing: Array | None = None
    """uint8 [prompt + n, W]: the experts that every token was sent to, the last one's a copy of those before it
    (rolecall/data/model/mixture.py); None unless the engine was started to say it.
    """


@dataclass(frozen=True)
class MeetingPlace:
    """The place where the ranks of an epoch of the weight channel meet, and how."""

    epoch: int
    address: str
    """host:port of the actor's rendezvous."""
    rank: int
    """Rank of the engine's first worker, >= 1."""
    world_size: int
    timeout_s: float
    backend: WeightBackend


@dataclass(frozen=True)
class Transfer:
    """A version that is about to arrive, and how it is taken in."""

    epoch: int
    policy_version: int
    pause_mode: PauseMode
    bucket_timeout_s: float
    probe_token_ids: Sequence[int] | None
    """Tokens to run on the loaded weights; None: no probe."""
    num_decoded: int = 0
    """Tokens to sample after them."""


@dataclass(frozen=True)
class Probed:
    """The answer of an engine to a probe of T tokens, at temperature 1, and to D tokens that it samples after them."""

    logprobs: Array
    """float32 [T]: logprobs[t] of token t given those before it; index 0 is 0."""
    decoded_logprobs: Array
    """float32 [D], as the decode steps that sampled them gave them."""
    prefilled_logprobs: Array
    """float32 [D], as one prefill of all T + D tokens gives them: other kernels, and no captured graph."""


class SamplingEngine(Protocol):
    """Samples tokens. Knows nothing of attestation: what it returns may not leave the process before the replica says
    so.
    """

    @property
    def info(self) -> EngineInfo:
        """The facts that are fixed while an engine lives."""

    @property
    def num_moves(self) -> int:
        """Grows with whatever shows that the engine moves: tokens, answers. It stands still in a hung engine, and may
        in an idle one.
        """

    @property
    def use(self) -> rollout_pb2.EngineUse | None:
        """The use that requests make of it; None of an engine that does not say it."""

    async def sample(self, request: SampleRequest) -> Sample:
        """One response; waits while paused. Cancelling it aborts the request. UnavailableError when a pause aborted it;
        GenerationError when the engine failed on it; WorkerLostError when the engine is gone for good.
        """

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        """Returns what the weights say of `token_ids` and of `num_decoded` tokens more. Called while paused, and paused
        when it returns: nothing else is begun, and only requests go on that a pause KEEP_CACHE left with their keys and
        values. Takes the memory that it needs.
        """

    async def record(self, num_passes: int, path: str) -> list[RankTrace]:
        """Returns the traces of its next `num_passes` passes, one of each of its ranks, in files whose names begin with
        `path`. Waits for passes to come. Cancelling it records nothing more.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is computed any more. What was computed of a prefix is given to nobody later; KEEP_CACHE
        leaves it to whoever began with it. New requests wait. Idempotent.
        """

    async def resume(self) -> None:
        """Goes on. Idempotent."""


class EngineWeights(Protocol):
    """Takes in new weights and gives memory back. Called while paused only, except for join and close."""

    async def join(self, place: MeetingPlace) -> None:
        """All ranks of this engine take part in an epoch of the weight channel. Aborts an older epoch, also one a
        receive is stuck in. StaleEpochError, ChannelBrokenError; NotOnThisDeviceError for a backend that its device
        cannot do.
        """

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        """Loads one version over the channel of `epoch`, which was joined, and checks that every parameter was covered.

        StaleEpochError, StaleVersionError, ChannelBrokenError before anything was touched; after any other error the
        weights are torn.
        """

    async def sleep(self, level: int) -> None:
        """Level 1 keeps the weights in host memory, level 2 drops them; requests that were kept stay so. Only at the
        levels of `info`; again at the same one does nothing.
        """

    async def wake_up(self) -> None:
        """Takes the weights' memory back, and by the next probe or resume all of it. DeviceFullError, and nothing is
        taken, when the device has too little.
        """

    async def close(self) -> None:
        """Ends the engine and its processes within seconds."""


class RolloutEngine(SamplingEngine, EngineWeights, Protocol):
    """The engine that a replica needs: both seams in one object."""
