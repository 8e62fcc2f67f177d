"""The bare Gloo channel: the bytes of a publish to one receiver process without vLLM, in the same buckets, as many in
flight.

What is not there: gathering, packing, fingerprints, manifest, loading, pause and probe; buckets are allocated once. As
in a publish, the clock runs at the root from the first bucket to the last. Prints one line of JSON: seconds of each
transfer after the first.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch

from rolecall.weights.channel import Channel, GlooChannel, Transfer
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.transfer import IN_FLIGHT

TIMEOUT_S = 60.0
"""Deadline of the meeting and of each bucket."""


def send(host: str, buckets: Sequence[torch.Tensor], num_transfers: int) -> list[float]:
    """Seconds of each of `num_transfers` transfers to a receiver that this starts."""
    server = RendezvousServer(host)
    rendezvous = server.enter(0)
    plan = ["--bucket-sizes", *(str(bucket.numel()) for bucket in buckets), "--transfers", str(num_transfers)]
    receiver = subprocess.Popen([sys.executable, __file__, "--receive-from", server.address, *plan])
    try:
        channel = GlooChannel(rendezvous, 2, TIMEOUT_S)
        seconds = []
        for number in range(num_transfers):
            rendezvous.take(f"ready/{number}", TIMEOUT_S)
            started = time.perf_counter()
            transfer(channel, buckets)
            seconds.append(time.perf_counter() - started)
        rendezvous.take(f"ready/{num_transfers}", TIMEOUT_S)
        return seconds
    finally:
        rendezvous.close()
        receiver.terminate()
        receiver.wait(TIMEOUT_S)


def receive(address: str, buckets: Sequence[torch.Tensor], num_transfers: int) -> None:
    """The other end."""
    rendezvous = Rendezvous(address, 0, 1, TIMEOUT_S)
    channel = GlooChannel(rendezvous, 2, TIMEOUT_S)
    for number in range(num_transfers):
        rendezvous.offer(f"ready/{number}", b"1")
        transfer(channel, buckets)
    rendezvous.offer(f"ready/{num_transfers}", b"1")
    time.sleep(TIMEOUT_S)  # the root ends this process; an end of its own could be taken for a lost peer


def transfer(channel: Channel, buckets: Sequence[torch.Tensor]) -> None:
    """All buckets once, IN_FLIGHT at a time."""
    pending: deque[Transfer] = deque()
    for bucket in buckets:
        if len(pending) == IN_FLIGHT:
            pending.popleft().wait(TIMEOUT_S)
        pending.append(channel.broadcast(bucket, TIMEOUT_S))
    while pending:
        pending.popleft().wait(TIMEOUT_S)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket-sizes", type=int, nargs="+", required=True, metavar="BYTES")
    parser.add_argument("--transfers", type=int, default=12)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--receive-from", metavar="HOST:PORT", help="be the receiver; the root starts one itself")
    arguments = parser.parse_args()
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in arguments.bucket_sizes]
    if arguments.receive_from:
        receive(arguments.receive_from, buckets, arguments.transfers)
    else:
        print(json.dumps({"seconds": send(arguments.host, buckets, arguments.transfers)[1:]}), flush=True)


if __name__ == "__main__":
    main()
