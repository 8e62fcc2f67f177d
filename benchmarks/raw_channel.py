"""The bare channel, through shared memory or over Gloo: the bytes of a publish to one receiver process without vLLM, in
the same buckets, as many in flight. Several ways take turns, transfer by transfer.

What is not there: gathering, packing, fingerprints, manifest, loading, pause and probe; buckets are allocated once. The
clock runs from the root's first bucket until the receiver has the last: a root that left its bytes with the kernel has
not delivered them. Prints one line of JSON: of each way, seconds of each transfer after the first, and CPU seconds of
both processes, which count what the kernel does for them in interrupts to whoever is interrupted.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch

from rolecall.settings import WeightBackend
from rolecall.weights.channel import Channel, Transfer, join
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.transfer import IN_FLIGHT

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
"""Deadline of the meeting and of each bucket."""
Taken = tuple[float, float]
"""Seconds and CPU seconds of one transfer."""


def send(
    backends: Sequence[WeightBackend],
    host: str,
    buckets: Sequence[torch.Tensor],
    num_transfers: int,
    prefix: Sequence[str] = (),
) -> dict[WeightBackend, list[Taken]]:
    """What each of `num_transfers` transfers by each way took, to a receiver that this starts with `prefix`."""
    servers = [RendezvousServer(host) for _ in backends]
    meetings = [server.enter(0) for server in servers]
    plan = ["--bucket-sizes", *(str(bucket.numel()) for bucket in buckets), "--transfers", str(num_transfers)]
    plan += ["--backends", *backends, "--receive-from", *(server.address for server in servers)]
    receiver = subprocess.Popen([*prefix, sys.executable, __file__, *plan])
    try:
        channels = [
            join(meeting, 2, backend, CPU, TIMEOUT_S) for meeting, backend in zip(meetings, backends, strict=True)
        ]
        taken: dict[WeightBackend, list[Taken]] = {backend: [] for backend in backends}
        for number in range(num_transfers):
            for channel, backend in zip(channels, backends, strict=True):
                channel.rendezvous.take(f"ready/{number}", TIMEOUT_S)
                started, started_cpu = time.monotonic(), time.process_time()
                transfer(channel, buckets)
                used = time.process_time() - started_cpu
                ended, used_there = map(float, channel.rendezvous.take(f"done/{number}", TIMEOUT_S).split())
                taken[backend].append((ended - started, used + used_there))
        return taken
    finally:
        for meeting in meetings:
            meeting.close()
        receiver.terminate()
        receiver.wait(TIMEOUT_S)


def receive(
    backends: Sequence[WeightBackend], addresses: Sequence[str], buckets: Sequence[torch.Tensor], num_transfers: int
) -> None:
    """The other end."""
    channels = [
        join(Rendezvous(address, 0, 1, TIMEOUT_S), 2, backend, CPU, TIMEOUT_S)
        for address, backend in zip(addresses, backends, strict=True)
    ]
    for number in range(num_transfers):
        for channel in channels:
            channel.rendezvous.offer(f"ready/{number}", b"1")
            started_cpu = time.process_time()
            transfer(channel, buckets)
            ended, used = time.monotonic(), time.process_time() - started_cpu  # one clock on one machine
            channel.rendezvous.offer(f"done/{number}", f"{ended} {used}".encode())
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
    parser.add_argument("--backends", nargs="+", choices=("gloo", "shared"), default=["gloo", "shared"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--receive-from", nargs="+", metavar="HOST:PORT", help="be the receiver; the root starts one itself"
    )
    arguments = parser.parse_args()
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in arguments.bucket_sizes]
    if arguments.receive_from:
        receive(arguments.backends, arguments.receive_from, buckets, arguments.transfers)
    else:
        taken = send(arguments.backends, arguments.host, buckets, arguments.transfers)
        figures = {
            backend: {"seconds": [each[0] for each in after[1:]], "cpu_s": [each[1] for each in after[1:]]}
            for backend, after in taken.items()
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
