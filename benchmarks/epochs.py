"""What forming an epoch of the weight channel costs by the number of ranks, on one machine. See README.md.

The actor's real Publisher and receivers by the real Rendezvous, `join` and Reception, over Gloo, a process for each
rank. Left out: engines, gRPC and the controller. Receivers are forked, so that they share torch's code in memory.
"""

import argparse
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though not in __all__

from benchmarks.machine import describe
from rolecall.settings import WeightsSection
from rolecall.weights.channel import join
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest

CPU = torch.device("cpu")
HOST = "127.0.0.1"
TIMEOUT_S = 300.0
"""Deadline of a meeting, of each bucket and of each answer."""
NUM_VERSIONS = 3
"""Publishes of an epoch; the first makes the first use of the connections and is left out."""


@dataclass(frozen=True)
class Place:
    """What a receiver is told of an epoch."""

    address: str
    epoch: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Joined:
    """What a receiver says once it has joined."""

    at: float
    """Monotonic time; one clock on one machine."""
    num_sockets: int
    added_bytes: int
    """Sockets, and memory of its own, that joining took."""


@dataclass(frozen=True)
class Formed:
    """One epoch."""

    meeting_s: float
    """From before Publisher.open until the last receiver has joined."""
    publish_s: float
    """From the root's first bucket until the last receiver has the last one, median of the versions but the first."""
    num_sockets: int
    added_bytes: int
    """Both at the receiver that has the most."""
    num_keys: int
    """Keys in its store at the end."""


class Receivers:
    """Processes that are forked once and take part in any number of epochs, the first ones of them."""

    def __init__(self, count: int, begin: Callable[[int], None] = lambda number: None) -> None:
        """`begin`: what each process does first, given its number from 1."""
        context = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for number in range(1, 1 + count):
            ours, theirs = context.Pipe()
            process = context.Process(target=take_part, args=(theirs, begin, number), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
            process.join(TIMEOUT_S)

    def tell(self, words: Sequence[Place]) -> None:
        """Says one to each, in order."""
        for end, word in zip(self._ends, words, strict=False):
            end.send(word)

    def answers(self, count: int) -> list[Joined | float]:
        """Returns the next answer of each of the first `count`."""
        found: list[Joined | float] = []
        for end in self._ends[:count]:
            if not end.poll(TIMEOUT_S):
                raise SystemExit("a receiver does not answer")
            found.append(end.recv())
        return found


def take_part(end: Connection, begin: Callable[[int], None], number: int) -> None:
    """A receiver's process: epoch after epoch until it is ended."""
    begin(number)
    torch.set_num_threads(1)
    while True:
        place: Place = end.recv()  # bounded: by its parent, which ends it
        before, num_before = own_bytes(), len(open_sockets())
        rendezvous = Rendezvous(place.address, place.epoch, place.rank, TIMEOUT_S)
        channel = join(rendezvous, place.world_size, "gloo", CPU, TIMEOUT_S)
        at = time.monotonic()
        end.send(Joined(at, len(open_sockets()) - num_before, own_bytes() - before))
        manifest = agreed_manifest(rendezvous, TIMEOUT_S)
        for _ in range(NUM_VERSIONS):
            for _ in Reception(channel, manifest, TIMEOUT_S):
                pass
            end.send(time.monotonic())
        channel.close()
        rendezvous.close()


def own_bytes() -> int:
    """The memory that this process shares with no other."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^Private_\w+: +(\d+)", text, re.MULTILINE))


def open_sockets() -> list[str]:
    """The sockets that this process has open, as the kernel names them."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith("socket:")]


def num_listening() -> int:
    """The ports that this process listens at."""
    links = [f"socket:[{line.split()[9]}]" for path in ("tcp", "tcp6") for line in _listening(path)]
    return sum(link in links for link in open_sockets())


def _listening(path: str) -> list[str]:
    lines = Path(f"/proc/self/net/{path}").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[3] == "0A"]


def form(
    root: Publisher, receivers: Receivers, epoch: int, world_size: int, num_bytes: int, host: str = HOST
) -> tuple[str, Formed]:
    """Opens an epoch and publishes over it: its address, and what it took."""
    named = [(f"w{i}", torch.zeros(2**20, dtype=torch.uint8)) for i in range(num_bytes // 2**20)]
    manifest = build_manifest(named, WeightsSection().bucket_bytes)
    started = time.monotonic()
    address = root.open(epoch, world_size, host, "gloo", TIMEOUT_S)
    receivers.tell([Place(address, epoch, rank, world_size) for rank in range(1, world_size)])
    joined = [answer for answer in receivers.answers(world_size - 1) if isinstance(answer, Joined)]
    seconds = []
    for number in range(NUM_VERSIONS):
        begun = time.monotonic()
        version = NUM_VERSIONS * epoch + number
        root.publish(iter(named), manifest, epoch=epoch, policy_version=version, bucket_timeout_s=TIMEOUT_S)
        seconds.append(max(end for end in receivers.answers(world_size - 1) if isinstance(end, float)) - begun)
    return address, Formed(
        max(each.at for each in joined) - started,
        median(seconds[1:]),
        max(each.num_sockets for each in joined),
        max(each.added_bytes for each in joined),
        keys_at(address),
    )


def keys_at(address: str) -> int:
    """The keys in the store of an epoch that is open, or of the one before."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), None, False, timedelta(seconds=TIMEOUT_S), wait_for_workers=False).num_keys()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32, 64], help="of an epoch, rank 0 included")
    parser.add_argument("--mb", type=int, nargs="+", default=[4, 64], help="sizes of a publish, in MiB")
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each")
    parser.add_argument("--quick", action="store_true", help="2 and 4 ranks and one round: does it still run?")
    words = parser.parse_args()
    if words.quick:
        words.ranks, words.mb, words.rounds = [2, 4], [1, 4], 1
    receivers = Receivers(max(words.ranks) - 1)  # forked before any thread is there
    torch.set_num_threads(1)
    print(*describe(), f"torch {torch.__version__}", sep="\n")
    root, addresses = Publisher(CPU), list[str]()
    print(f"\n{'ranks':>5}{'meeting s':>11}{'longest':>9}", *(f"{f'{mb} MiB, s':>11}" for mb in words.mb), end="")
    print(f"{'sockets':>9}{'MB a rank':>11}{'keys':>7}")
    for world_size in words.ranks:
        formed: dict[int, list[Formed]] = {mb: [] for mb in words.mb}
        for _ in range(words.rounds):
            for mb in words.mb:
                address, each = form(root, receivers, len(addresses), world_size, mb * 2**20)
                addresses.append(address)
                formed[mb].append(each)
        every = [each for several in formed.values() for each in several]
        meetings = [each.meeting_s for each in every]
        print(f"{world_size:>5}{median(meetings):>11.3f}{max(meetings):>9.3f}", end=" ")
        print(*(f"{median(each.publish_s for each in several):>11.3f}" for several in formed.values()), end="")
        added = max(each.added_bytes for each in every) / 1e6
        print(f"{max(each.num_sockets for each in every):>9}{added:>11.1f}{every[-1].num_keys:>7}", flush=True)
    root.close()
    print(f"\nafter {len(addresses)} epochs rank 0 listens at {num_listening()} ports: the stores of the last two")
    receivers.close()


if __name__ == "__main__":
    main()
