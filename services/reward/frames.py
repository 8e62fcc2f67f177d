"""The bytes between the service and a worker process: length-prefixed frames over pipes, never a pickle.

    frame     = u32 length of payload, u16 component, payload             (little-endian)
    to worker   first a setup frame (component 0, a WorkerSetup as JSON), then a frame per task: component, ScoreRequest
    to service  first a ready frame (component 0, a WorkerReady as JSON), then a ScoreResponse per task, in order

A task is one item, a batch or a group. Answers come one by one and in order, so the task being worked on is always the
first unanswered one: that is what a deadline or a death is blamed on.
"""

import struct
from collections.abc import Iterator

from rolecall.rpc.options import MAX_GROUP_BYTES
from rolecall.settings import Section

HEADER = struct.Struct("<IH")
MAX_PAYLOAD_BYTES = MAX_GROUP_BYTES
"""A longer frame is not one of ours, for a task is part of a request: the other side is broken."""


class WorkerReady(Section):
    """The first message of a worker to the pool."""

    problem: str = ""
    """Why it cannot work; empty when it can."""
    awaited: tuple[str, ...] = ()
    """Components that await several items at the same time."""


def frame(payload: bytes, component: int = 0) -> bytes:
    """Returns `payload` as a frame."""
    return HEADER.pack(len(payload), component) + payload


class FrameBuffer:
    """Cuts a byte stream into frames. Holds at most one partial frame and what was fed with it."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Adds `data`; yields (component, payload) of every frame now complete. ValueError on a length beyond
        MAX_PAYLOAD_BYTES.
        """
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= HEADER.size:
            length, component = HEADER.unpack_from(self._bytes, start)
            if length > MAX_PAYLOAD_BYTES:
                raise ValueError(f"a frame claims {length} bytes; the most is {MAX_PAYLOAD_BYTES}")
            end = start + HEADER.size + length
            if len(self._bytes) < end:
                break
            yield component, bytes(self._bytes[start + HEADER.size : end])
            start = end
        del self._bytes[:start]
