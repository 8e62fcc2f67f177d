"""Profile as its caller sees it: the steps that begin next are recorded, and each is told once it is applied. No torch,
no gRPC.

At most one request at a time, which lives as long as its caller waits: when the caller leaves, no further step is
recorded. What a step records, and where, is rolecall/training/step/recorder.py's.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rolecall.errors import ConflictError, InvalidInputError, UnavailableError
from rolecall.v1.training_pb2 import ProfileRequest, ProfileResponse, StepProfile

MAX_STEPS = 10
"""Most steps of one request, and so the bound on what waits for its caller."""
WAITING_S = 2.0
"""Seconds between two messages that only show that the request still waits: a stream on which nothing moves for long
may be cut by gRPC, or by a proxy on the way.
"""


@dataclass
class _Request:
    num_left: int
    told: "asyncio.Queue[StepProfile | None]"
    """The steps recorded, for the caller; None: this role ends."""


class Profiles:
    """The requests to one trainer. Used on the event loop only."""

    def __init__(self) -> None:
        self._request: _Request | None = None
        self._ends = False

    async def record(self, request: ProfileRequest) -> AsyncIterator[ProfileResponse]:
        """Yields each step after it was recorded and applied, and between them that it still waits. InvalidInputError,
        ConflictError while another request is under way, UnavailableError when this role ends.
        """
        if not 1 <= request.num_steps <= MAX_STEPS:
            raise InvalidInputError(f"num_steps is {request.num_steps}; record 1 to {MAX_STEPS} steps")
        if self._request is not None:
            raise ConflictError("another profile of this role is under way; wait for it or end it, then ask again")
        mine = self._request = _Request(request.num_steps, asyncio.Queue(MAX_STEPS + 1))
        try:
            if self._ends:
                mine.told.put_nowait(None)
            num_told = 0
            while num_told < request.num_steps:
                try:
                    async with asyncio.timeout(WAITING_S):
                        told = await mine.told.get()
                except TimeoutError:
                    yield ProfileResponse()
                    continue
                if told is None:
                    raise UnavailableError("this role ends; there is no trace of a step that it had not applied")
                yield ProfileResponse(profile=told)
                num_told += 1
        finally:
            self._request = None

    def begin(self) -> StepProfile | None:
        """A step begins: what it fills in where it is to be recorded, and None where it is not."""
        request = self._request
        return StepProfile() if request is not None and request.num_left else None

    def applied(self, profile: StepProfile | None) -> None:
        """A step was applied, with what `begin` gave it filled in."""
        request = self._request
        if profile is not None and request is not None and request.num_left:
            request.num_left -= 1
            request.told.put_nowait(profile)

    def end(self) -> None:
        """No further step begins: the caller who waits for one is told."""
        self._ends = True
        if self._request is not None:
            self._request.told.put_nowait(None)
