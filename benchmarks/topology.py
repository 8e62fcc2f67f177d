"""How long a publish takes to reach every receiver of a large fleet, by topology: a simulation, `python -m
benchmarks.topology`; topology_wires.py holds it to real Gloo over slow wires. See README.md.

Three ways. `star`: rank 0 sends to each receiver. `tree`: the binomial tree of Gloo's broadcast, in which a rank passes
a bucket on once it has all of it, to all its children at a time; rank 0 has ceil(log2(ranks)) of them. `chain`: from
rank to rank in chunks, as NCCL's ring does it. Star and tree have the transfer's two buckets in flight. Links are
full duplex, flows share them max-min fairly, and between ranks of one host bytes cost nothing. Left out: TCP's slow
start and losses, switches that are too narrow, what packing, loading and fingerprints take.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rolecall.settings import WeightsSection
from rolecall.weights.transfer import IN_FLIGHT

BUCKET = WeightsSection().bucket_bytes
CHUNK = 2**20
"""Bytes that a rank of a chain passes on at a time."""
LATENCY_S = 50e-6
"""Of one hop."""
NUM_STEADY = 8
"""Buckets between the two simulations whose difference is the pace of star and tree."""
SLOW = 0.1
"""Bandwidth of a slow receiver's host, of the others'."""
SIZES = {"600 MB": 600e6, "16 GB": 16e9, "64 GB": 64e9}
GIGABITS = (1, 10, 25, 100, 400)
RECEIVERS = (1, 4, 16, 64, 256)
Children = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Fleet:
    """Receivers of one publish; rank 0 has a host of its own."""

    num_receivers: int
    per_host: int = 1
    """Receivers that share a host and its link, neighbours by rank."""
    slow_rank: int | None = None
    """A receiver whose host has SLOW of the bandwidth."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """Host of each rank."""
        return (0, *(1 + receiver // self.per_host for receiver in range(self.num_receivers)))

    @property
    def speeds(self) -> np.ndarray:
        """Bandwidth of each host, that of most of them being 1."""
        speeds = np.ones(1 + max(self.hosts))
        if self.slow_rank is not None:
            speeds[self.hosts[self.slow_rank]] = SLOW
        return speeds


def star(num_ranks: int) -> Children:
    """Everyone below rank 0."""
    return (tuple(range(1, num_ranks)), *(() for _ in range(1, num_ranks)))


def tree(num_ranks: int) -> Children:
    """Gloo's: rank r passes on to r + 2^i for each 2^i above r."""
    return tuple(
        tuple(rank + 2**i for i in range(rank.bit_length(), num_ranks.bit_length()) if rank + 2**i < num_ranks)
        for rank in range(num_ranks)
    )


TOPOLOGIES = {"star": star, "tree": tree}


def publish_s(way: str, fleet: Fleet, num_bytes: float, bytes_per_s: float, bucket: int = BUCKET) -> float:
    """Seconds from the first bucket until the last receiver has the last one."""
    if way == "chain":
        return chain_s(fleet, num_bytes, bytes_per_s)
    num_buckets = math.ceil(num_bytes / bucket)
    num_few = min(num_buckets, 2 * NUM_STEADY)
    fill = bucket_times(way, fleet, num_few)
    pace = (fill - bucket_times(way, fleet, num_few - NUM_STEADY)) / NUM_STEADY if num_buckets > num_few else 0.0
    depth = math.ceil(math.log2(1 + fleet.num_receivers)) if way == "tree" else 1
    return (fill + pace * (num_buckets - num_few)) * bucket / bytes_per_s + depth * LATENCY_S


def chain_s(fleet: Fleet, num_bytes: float, bytes_per_s: float) -> float:
    """A chunk reaches a rank once the rank before has it and the chunk before it has passed."""
    hosts, speeds = fleet.hosts, fleet.speeds
    numbers = np.arange(math.ceil(num_bytes / CHUNK))
    at = np.zeros(len(numbers))
    for rank in range(1, len(hosts)):
        ends = hosts[rank - 1], hosts[rank]
        each_s = 0.0 if ends[0] == ends[1] else CHUNK / bytes_per_s / speeds[list(ends)].min()
        at = np.maximum.accumulate(at - numbers * each_s) + (numbers + 1) * each_s + LATENCY_S
    return float(at[-1])


@cache
def bucket_times(way: str, fleet: Fleet, num_buckets: int) -> float:
    """Time until every rank of a star or tree has done its part of each bucket, in times of one bucket on a free link.

    A flow goes from rank to child as soon as the rank has the bucket and both have begun it; a rank begins a bucket
    once it has done, forwarding included, the one IN_FLIGHT before.
    """
    children = TOPOLOGIES[way](1 + fleet.num_receivers)
    hosts, speeds = np.array(fleet.hosts), fleet.speeds
    parents = {child: rank for rank, below in enumerate(children) for child in below}
    has = [num_buckets, *(0 for _ in parents)]
    """Buckets that each rank has."""
    passed = [[0] * len(below) for below in children]
    """Buckets that each of its children has had from it."""
    now, flows = 0.0, dict[tuple[int, int], float]()
    """Rank and bucket of what is arriving, and what is left of it."""

    def begun(rank: int) -> int:
        done = min([has[rank], *passed[rank]])
        return min(done + IN_FLIGHT, num_buckets)

    while min(has) < num_buckets:
        for child, rank in parents.items():
            for number in range(has[child], min(has[rank], begun(rank), begun(child))):
                flows.setdefault((child, number), 1.0)
        keys = list(flows)
        to = np.array([child for child, _ in keys])
        rates = shared(hosts[[parents[child] for child in to]], hosts[to], speeds)
        left = np.array([flows[key] for key in keys])
        step = (left / rates).min()
        now += step
        left = np.where(np.isinf(rates), 0.0, left - np.where(np.isinf(rates), 0.0, rates) * step)
        flows = dict(zip(keys, left.tolist(), strict=True))
        for child, number in sorted(key for key in keys if flows[key] < 1e-9):
            if number == has[child]:  # a later bucket that came first waits for it
                del flows[child, number]
                has[child] += 1
                passed[parents[child]][children[parents[child]].index(child)] += 1
    return now


def shared(sources: np.ndarray, targets: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Max-min fair rates of flows from host to host; infinite inside a host."""
    num_hosts = len(speeds)
    rates = np.where(sources == targets, np.inf, 0.0)
    open_ = sources != targets
    room = np.concatenate([speeds, speeds])  # upwards, then downwards
    ends = np.stack([sources, targets + num_hosts])
    while open_.any():
        counts = np.bincount(ends[:, open_].ravel(), minlength=2 * num_hosts)
        shares = np.where(counts > 0, room / np.maximum(counts, 1), np.inf)
        tightest = shares.min()
        full = shares <= tightest * (1 + 1e-9)
        fixed = open_ & full[ends].any(axis=0)
        rates[fixed] = tightest
        room = room - tightest * np.bincount(ends[:, fixed].ravel(), minlength=2 * num_hosts)
        open_ &= ~fixed
    return rates


def copies(fleet: Fleet) -> tuple[int, int]:
    """How often each byte leaves rank 0's host, and the busiest other host, in a tree."""
    hosts, sent = fleet.hosts, [0] * (1 + max(fleet.hosts))
    for rank, below in enumerate(tree(1 + fleet.num_receivers)):
        sent[hosts[rank]] += sum(hosts[child] != hosts[rank] for child in below)
    return sent[0], max(sent[1:])


def seconds_tables(receivers: Sequence[int]) -> None:
    """Prints the seconds of each size on each link."""
    for gigabits in GIGABITS:
        print(f"\n{gigabits} Gbit/s, one receiver a host: seconds of star, tree, chain\n")
        print("| receivers | " + " | ".join(SIZES) + " |\n|" + "---|" * (1 + len(SIZES)))
        for count in receivers:
            rows = [
                [publish_s(way, Fleet(count), size, gigabits * 125e6) for way in ("star", "tree", "chain")]
                for size in SIZES.values()
            ]
            print(f"| {count} | " + " | ".join(", ".join(map(digits, row)) for row in rows) + " |")


def digits(seconds: float) -> str:
    """Three of them, or all before the point."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def hosts_table(receivers: Sequence[int]) -> None:
    """Prints what hosts with several receivers cost, in times of all bytes over one link."""
    print("\n16 GB at 100 Gbit/s, in times of all bytes once over one link\n")
    print(
        "| receivers | a host | tree | copies from rank 0, busiest host | chain | tree of hosts |\n" + "|---" * 6 + "|"
    )
    once_s = 16e9 / 12.5e9
    for count in receivers:
        for per_host in (per_host for per_host in (1, 4, 8) if per_host < count):
            fleet = Fleet(count, per_host)
            ways = [publish_s(way, fleet, 16e9, 12.5e9) / once_s for way in ("tree", "chain")]
            hosts = publish_s("tree", Fleet(math.ceil(count / per_host)), 16e9, 12.5e9) / once_s
            first, busiest = copies(fleet)
            print(f"| {count} | {per_host} | {ways[0]:.1f} | {first}, {busiest} | {ways[1]:.2f} | {hosts:.1f} |")


def slow_table(receivers: Sequence[int]) -> None:
    """Prints what one slow receiver costs all the others."""
    print(f"\n16 GB at 100 Gbit/s, one receiver at {SLOW:g} of it: times as long as without\n")
    print("| receivers | star | tree, the slow one is rank 1 | tree, it is the last | chain |\n|---|---|---|---|---|")
    for count in receivers:
        cases = (("star", 1), ("tree", 1), ("tree", count), ("chain", 1))
        times = [
            publish_s(way, Fleet(count, slow_rank=rank), 16e9, 12.5e9) / publish_s(way, Fleet(count), 16e9, 12.5e9)
            for way, rank in cases
        ]
        print(f"| {count} | " + " | ".join(f"{each:.1f}" for each in times) + " |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receivers", type=int, nargs="+", default=list(RECEIVERS))
    parser.add_argument("--quick", action="store_true", help="at most 16 receivers: does it still run?")
    words = parser.parse_args()
    receivers = [count for count in words.receivers if count <= 16] if words.quick else words.receivers
    seconds_tables(receivers)
    hosts_table(receivers)
    slow_table(receivers)


if __name__ == "__main__":
    main()
