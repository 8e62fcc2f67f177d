"""The sampling engine of a chaos run, whose weights arrive over sockets."""

import time
from collections.abc import Sequence

from rolecall.weights.transferred import Transferred
from services.rollout.sampling import MeetingPlace, Probed, Sample, SampleRequest
from tests.chaos.channel import SocketReceiver
from tests.chaos.wiring import Hook
from tests.twins.device import EngineMemory, TwinDevice
from tests.twins.engine import DigestEngine
from tests.twins.weights import digest_of, fingerprints_of

TOKEN_S = 0.008


class ChaosEngine(DigestEngine):
    """A rollout engine that samples by the weights it really received."""

    def __init__(self, hook: Hook, max_model_tokens: int, device: TwinDevice | None = None) -> None:
        super().__init__(max_model_tokens, TOKEN_S, sleep_levels=(1, 2) if device is not None else ())
        self._hook = hook
        self._memory = EngineMemory(device)
        self._channel = SocketReceiver()

    async def sample(self, request: SampleRequest) -> Sample:
        self._hook.at("sample:start")
        sample = await super().sample(request)
        self._hook.at("sample:end")
        return sample

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        if position == 3:
            self._hook.at("sample:middle")
        return super()._next(request, position)

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        self._hook.at("receive:probe")
        self._memory.take_cache()
        return await super().probe(token_ids, num_decoded)

    async def resume(self) -> None:
        self._hook.at("resume")
        self._memory.take_cache()
        await super().resume()

    async def sleep(self, level: int) -> None:
        self._hook.at("sleep:start")
        await super().sleep(level)
        self._memory.sleep()
        self._hook.at("sleep:end")

    async def wake_up(self) -> None:
        self._hook.at("wake:start")
        self._memory.wake_up()
        self._hook.at("wake:end")

    async def join(self, place: MeetingPlace) -> None:
        self._hook.at("join:start")
        await self._channel.join(place.epoch, place.address, place.rank, place.timeout_s)
        self.joined.append(place.epoch)
        self._hook.at("join:met")

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        self._hook.at("receive:start")
        started = time.monotonic()
        weights = await self._channel.receive(epoch, policy_version, bucket_timeout_s, self._hook.at)
        self._version, self.digest = policy_version, digest_of(weights)
        self._hook.at("receive:loaded")
        taken_s = time.monotonic() - started
        return Transferred(fingerprints_of(weights), self.digest, weights.nbytes, weights.nbytes, taken_s)
