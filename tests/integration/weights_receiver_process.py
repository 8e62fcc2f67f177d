"""A receiver of its own process, without vLLM: joins an epoch, takes one transfer and prints what came of it as one
JSON line.

    python -m tests.integration.weights_receiver_process ADDRESS EPOCH RANK WORLD_SIZE BUCKET_TIMEOUT_S
        [--stop-after N] [--device DEVICE]

With --stop-after it prints "stopped" after as many buckets and does nothing more, until somebody ends it. A CUDA device
receives over NCCL.
"""

import argparse
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


def main() -> None:
    """Joins, receives, reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    for name in ("epoch", "rank", "world_size"):
        parser.add_argument(name, type=int)
    parser.add_argument("bucket_timeout_s", type=float)
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rendezvous = Rendezvous(arguments.address, arguments.epoch, arguments.rank, MEET_S)
    channel = join(
        rendezvous,
        arguments.world_size,
        "nccl" if arguments.device.type == "cuda" else "gloo",
        arguments.device,
        MEET_S,
    )
    start = time.monotonic()
    try:
        reception = Reception(channel, agreed_manifest(rendezvous, MEET_S), arguments.bucket_timeout_s)
        for count, _ in enumerate(reception, start=1):
            if count == arguments.stop_after:
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
    main()
