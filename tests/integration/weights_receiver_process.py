"""A receiver of its own process, without vLLM: joins an epoch, takes one transfer and prints what came of it as one JSON line.

    python -m tests.integration.weights_receiver_process ADDRESS EPOCH RANK WORLD_SIZE BUCKET_TIMEOUT_S [STOP_AFTER]

With STOP_AFTER it prints "stopped" after as many buckets and does nothing more, until somebody ends it.
"""

import json
import sys
import time

import torch

from rolecall.errors import RoleCallError
from rolecall.weights.channel import join
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest

MEET_S = 60.0
"""Deadline of the meeting."""


def main(address: str, epoch: int, rank: int, world_size: int, bucket_timeout_s: float, stop_after: int | None) -> None:
    """Joins, receives, reports."""
    torch.set_num_threads(1)
    rendezvous = Rendezvous(address, epoch, rank, MEET_S)
    channel = join(rendezvous, world_size, "gloo", torch.device("cpu"), MEET_S)
    reception = Reception(channel, agreed_manifest(rendezvous, MEET_S), bucket_timeout_s)
    start = time.monotonic()
    try:
        for count, _ in enumerate(reception, start=1):
            if count == stop_after:
                say({"stopped": count})
                time.sleep(600)
        result = reception.result()
        say({"digest": result.digest, "num_bytes": result.num_bytes, "transfer_s": result.transfer_s})
    except RoleCallError as error:
        say({"error": error.reason, "message": error.message, "waited_s": time.monotonic() - start})
    finally:
        channel.close()
        rendezvous.close()


def say(line: dict[str, object]) -> None:
    """One line of JSON on stdout, at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]) if len(sys.argv) > 6 else None)
