"""Profile of a rollout as its caller sees it: the engine's next steps are recorded once. No torch, no gRPC."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from rolecall.errors import ConflictError, InvalidInputError, UnavailableError
from rolecall.training.serving.profiles import WAITING_S
from rolecall.v1.training_pb2 import ProfileRequest, ProfileResponse, StepProfile
from services.rollout.sampling import SamplingEngine
from services.rollout.state import HeldWeights

MAX_STEPS = 100
"""Most steps of one request, and so the bound on a trace."""


class EngineProfiles:
    """The requests to one engine, one at a time. Used on the event loop only."""

    def __init__(self, engine: SamplingEngine, held: HeldWeights, folder: Path, worker: str) -> None:
        """Traces are `<folder>/<worker>-version<policy version>-rank<rank>.json.gz`."""
        self._engine = engine
        self._held = held
        self._folder = folder
        self._worker = worker
        self._recording: asyncio.Task[StepProfile] | None = None
        self._ends = False

    async def record(self, request: ProfileRequest) -> AsyncGenerator[ProfileResponse, None]:
        """Yields what was recorded, and until then that it still waits. InvalidInputError, ConflictError while another
        request is under way, UnavailableError when this role ends.
        """
        if not 1 <= request.num_steps <= MAX_STEPS:
            raise InvalidInputError(f"num_steps is {request.num_steps}; record 1 to {MAX_STEPS} steps of an engine")
        if self._recording is not None:
            raise ConflictError("another profile of this role is under way; wait for it or end it, then ask again")
        recording = self._recording = asyncio.create_task(self._recorded(request.num_steps))
        if self._ends:
            recording.cancel()
        try:
            while not recording.done():
                await asyncio.wait([recording], timeout=WAITING_S)
                if not recording.done():
                    yield ProfileResponse()
            if recording.cancelled():
                raise UnavailableError("this role ends; there is no trace of steps that it had not made")
            yield ProfileResponse(profile=recording.result())
        finally:
            recording.cancel()
            try:
                await asyncio.wait([recording])  # bounded: by the engine's answer, or its end
                if not recording.cancelled():
                    recording.exception()  # its caller has it, or has left
            finally:
                self._recording = None

    async def _recorded(self, num_steps: int) -> StepProfile:
        version = self._held.policy_version
        path = self._folder / f"{self._worker}-version{version}"
        traces = await self._engine.record(num_steps, str(path))
        return StepProfile(step=version, num_passes=num_steps, traces=traces)

    def end(self) -> None:
        """This role ends: the caller who waits is told."""
        self._ends = True
        if self._recording is not None:
            self._recording.cancel()
