"""The facts of one transfer as one side saw it, on which the actor and every rollout must agree. Needs no torch.

`Transferred` is their one carrier inside a process; between processes they are the fields of PublishWeightsResponse and
ReceiveWeightsResponse.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.v1 import weights_pb2


@dataclass(frozen=True)
class Transferred:
    """The weights that one side of a transfer sent or received, by their fingerprints."""

    fingerprints: Mapping[str, int]
    """Unsigned 64-bit, by Hugging Face name, in the order sent."""
    digest: str
    """Hex digest over names, dtypes, shapes and fingerprints."""
    num_bytes: int
    """Bytes of the buckets, whole."""
    wire_bytes: int
    """Bytes that travelled to each receiver: fewer with deltas."""
    transfer_s: float
    """Seconds from the first bucket to the last; at a receiver, to the last tensor loaded."""


def encode_fingerprints(fingerprints: Mapping[str, int]) -> list[weights_pb2.Fingerprint]:
    """Returns the fingerprints as messages, in their order."""
    return [weights_pb2.Fingerprint(name=name, value=value) for name, value in fingerprints.items()]
