"""RolloutService in gRPC: decode, one call of the replica or the pull loop, encode. Reaches no torch and decides
nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import numpy as np

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import DeadlineError, InvalidInputError, WrongVersionError
from rolecall.rpc.fence import Fence
from rolecall.trajectory import seed_of
from rolecall.v1 import rollout_pb2, rollout_pb2_grpc, training_pb2, weights_pb2
from rolecall.weights.backends import decode_backend
from rolecall.weights.transferred import encode_fingerprints
from rolecall.wire import decode_tensor, encode_tensor
from services.rollout.groups import MixedGroups
from services.rollout.pull import PullLoop
from services.rollout.replica import Replica, Response
from services.rollout.sampling import MeetingPlace, PauseMode, SampleRequest, Transfer
from services.rollout.trajectories import check_sampling, prompt_token_ids, trajectory_meta
from services.rollout.vllm.profiles import EngineProfiles

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = "rolecall.v1.RolloutService"

_PAUSE_MODES = {
    rollout_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    rollout_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    rollout_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    rollout_pb2.PAUSE_MODE_KEEP_CACHE: PauseMode.KEEP_CACHE,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """The servicer of RolloutService: one call of the replica per method."""

    def __init__(
        self,
        replica: Replica,
        pull: PullLoop,
        sampler: MixedGroups,
        tokenizer: ChatTokenizer,
        fence: Fence,
        profiles: EngineProfiles,
        *,
        consumer: str,
        max_groups: int,
        generation_timeout_s: float,
    ) -> None:
        self._replica = replica
        self._pull = pull
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._fence = fence
        self._profiles = profiles
        self._consumer = consumer
        self._max_groups = max_groups
        self._generation_timeout_s = generation_timeout_s
        self._num_calls = 0

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        pinned = request.policy_version if request.HasField("policy_version") else None
        self._replica.require_serving(pinned)
        requests = self._requests(request)
        self._replica.require_room(requests[0].prompt_token_ids, f"prompt {request.id!r}")
        # without us in it, another replica that is asked the same would play in our sessions
        name = f"{request.id}/{self._consumer}/call-{self._num_calls}"
        try:
            async with (
                asyncio.timeout(self._generation_timeout_s),
                aclosing(self._sampler.respond(name, request.prompt, requests)) as sampled,
            ):
                async for index, began, response in sampled:
                    if pinned is not None and response.digests.keys() != {pinned}:
                        raise WrongVersionError(
                            f"{request.id}/{index} was sampled by versions {sorted(response.digests)}, not by "
                            f"{pinned} alone"
                        )
                    yield self._response(request, index, began, response)
        except TimeoutError as error:
            raise DeadlineError(
                f"{request.id} was not sampled within {self._generation_timeout_s:.0f} s (rollout.generation_timeout_s)"
            ) from error

    def _requests(self, request: rollout_pb2.GenerateRequest) -> list[SampleRequest]:
        check_sampling(request.sampling, request.num_responses)
        ids, images = prompt_token_ids(request.prompt), tuple(request.prompt.images)
        self._num_calls += 1
        return [
            SampleRequest(
                f"{request.id}/{i}:call-{self._num_calls}", ids, request.sampling, seed_of(request.seed, 0, i), images
            )
            for i in range(request.num_responses)
        ]

    def _response(
        self, request: rollout_pb2.GenerateRequest, index: int, began: SampleRequest, response: Response
    ) -> rollout_pb2.GenerateResponse:
        meta = trajectory_meta(
            f"{request.id}/{index}", request.prompt, began, response, self._tokenizer, self._consumer
        )
        meta.index = index
        greedy = request.sampling.temperature == 0
        first = b"" if response.episode is None else np.array(began.prompt_token_ids, dtype="<i4").tobytes()
        return rollout_pb2.GenerateResponse(
            meta=meta,
            prompt_token_ids=first,
            response_token_ids=np.array(response.sample.token_ids, dtype="<i4").tobytes(),
            response_logprobs=b"" if greedy else response.sample.logprobs.astype("<f4").tobytes(),
        )

    async def JoinWeightChannel(
        self, request: weights_pb2.JoinWeightChannelRequest, context: Context
    ) -> weights_pb2.JoinWeightChannelResponse:
        await self._fence.check(request.ctl)
        backend = decode_backend(request.backend)
        await self._replica.join(
            MeetingPlace(request.epoch, request.address, request.rank, request.world_size, request.timeout_s, backend)
        )
        return weights_pb2.JoinWeightChannelResponse(num_workers=self._replica.info.num_weight_ranks)

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Context
    ) -> rollout_pb2.ReceiveWeightsResponse:
        await self._fence.check(request.ctl)
        probe = _probe_token_ids(request.probe) if request.HasField("probe") else None
        mode, num_decoded = _pause_mode(request.pause_mode), request.probe.num_decoded
        received, probed = await self._replica.receive(
            Transfer(request.epoch, request.policy_version, mode, request.bucket_timeout_s, probe, num_decoded)
        )
        response = rollout_pb2.ReceiveWeightsResponse(
            fingerprints=encode_fingerprints(received.fingerprints),
            digest=received.digest,
            num_bytes=received.num_bytes,
            transfer_s=received.transfer_s,
        )
        if probed is not None:
            response.probe.CopyFrom(request.probe)
            response.probe.logprobs.CopyFrom(encode_tensor(probed.logprobs))
            response.probe.decoded_logprobs.CopyFrom(encode_tensor(probed.decoded_logprobs))
            response.probe.prefilled_logprobs.CopyFrom(encode_tensor(probed.prefilled_logprobs))
        return response

    async def Pause(self, request: rollout_pb2.PauseRequest, context: Context) -> rollout_pb2.PauseResponse:
        await self._fence.check(request.ctl)
        await self._replica.pause(_pause_mode(request.mode))
        return rollout_pb2.PauseResponse()

    async def Resume(self, request: rollout_pb2.ResumeRequest, context: Context) -> rollout_pb2.ResumeResponse:
        await self._fence.check(request.ctl)
        await self._replica.resume(request.policy_version, request.digest)
        return rollout_pb2.ResumeResponse()

    async def Drain(self, request: rollout_pb2.DrainRequest, context: Context) -> rollout_pb2.DrainResponse:
        await self._fence.check(request.ctl)
        await self._replica.stop_taking()
        finished, released = await self._pull.drain(request.finish_s)
        return rollout_pb2.DrainResponse(num_finished=finished, num_released=released)

    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Context) -> rollout_pb2.SleepResponse:
        await self._fence.check(request.ctl)
        await self._replica.sleep(request.level)
        return rollout_pb2.SleepResponse()

    async def WakeUp(self, request: rollout_pb2.WakeUpRequest, context: Context) -> rollout_pb2.WakeUpResponse:
        await self._fence.check(request.ctl)
        await self._replica.wake_up()
        return rollout_pb2.WakeUpResponse()

    async def Profile(
        self, request: training_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[training_pb2.ProfileResponse]:
        await self._fence.check(request.ctl)
        async with aclosing(self._profiles.record(request)) as told:
            async for response in told:  # bounded: by the caller's deadline
                yield response

    async def GetInfo(
        self, request: rollout_pb2.GetRolloutInfoRequest, context: Context
    ) -> rollout_pb2.GetRolloutInfoResponse:
        held = self._replica.held
        return rollout_pb2.GetRolloutInfoResponse(
            consumer=self._consumer,
            weights_state=rollout_pb2.WeightsState.Value(f"WEIGHTS_STATE_{held.state.name}"),
            policy_version=held.policy_version,
            digest=held.digest,
            num_groups=self._pull.num_groups,
            max_groups=self._max_groups,
            max_model_tokens=self._replica.info.max_model_tokens,
            num_sampled_tokens=self._replica.num_sampled_tokens,
            busy_s=self._replica.busy_s,
            num_weight_ranks=self._replica.info.num_weight_ranks,
            engine_use=self._replica.use,
        )


def _pause_mode(mode: rollout_pb2.PauseMode.ValueType) -> PauseMode:
    if mode not in _PAUSE_MODES:
        raise InvalidInputError(f"pause mode {mode} is not one; send KEEP, KEEP_CACHE, WAIT or ABORT")
    return _PAUSE_MODES[mode]


def _probe_token_ids(probe: weights_pb2.Probe) -> Sequence[int]:
    array = decode_tensor(probe.token_ids, "probe.token_ids")
    if array.dtype != np.int32 or array.ndim != 1 or array.shape[0] < 2:
        raise InvalidInputError(f"probe.token_ids is {array.dtype} {array.shape}; it must be int32 [T], T >= 2")
    ids: list[int] = array.tolist()
    return ids
