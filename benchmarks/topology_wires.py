"""Real Gloo over slow wires, beside the simulation of topology.py: each host is a network namespace whose cable to a
switch, a bridge in one more namespace, `tc tbf` slows down in both directions. It also counts how often each byte left
a host. `python -m benchmarks.topology_wires`, as root.
"""

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.deltas import ran
from benchmarks.epochs import CPU, NUM_VERSIONS, Receivers, form
from benchmarks.machine import describe
from benchmarks.topology import BUCKET, SLOW, Fleet, copies, publish_s
from rolecall.weights.publisher import Publisher

MEGABITS = 200
"""So slow that two cores never keep the wires waiting."""
NUM_BYTES = 4 * BUCKET
CASES = (Fleet(1), Fleet(2), Fleet(4), Fleet(8), Fleet(8, per_host=4), Fleet(16, per_host=8))
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def address(host: int) -> str:
    """Where a host is reached."""
    return f"10.99.77.{1 + host}"


def namespace(host: int | str) -> str:
    """The name of a host's namespace."""
    return f"topology-{os.getpid()}-{host}"


@contextlib.contextmanager
def wires(fleet: Fleet) -> Iterator[dict[int, str]]:
    """The namespaces of the hosts, by host. PermissionError where the kernel lets this user make none."""
    names, switch = {host: namespace(host) for host in sorted(set(fleet.hosts))}, namespace("switch")
    try:
        ran(f"ip netns add {switch}")
        ran(f"ip -n {switch} link add bridge type bridge")
        ran(f"ip -n {switch} link set bridge up")
        for host, name in names.items():
            rate = f"{int(1000 * MEGABITS * fleet.speeds[host])}kbit"
            tbf = f"root tbf rate {rate} burst 256kb latency 1s"
            for words in (
                f"ip netns add {name}",
                f"ip -n {switch} link add port{host} type veth peer name wire netns {name}",
                f"ip -n {switch} link set port{host} master bridge up",
                f"ip -n {name} address add {address(host)}/24 dev wire",
                f"ip -n {name} link set wire up",
                f"ip -n {name} link set lo up",
                f"tc -n {switch} qdisc add dev port{host} {tbf}",
                f"tc -n {name} qdisc add dev wire {tbf}",
            ):
                ran(words)
        yield names
    finally:
        for name in (*names.values(), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60, check=False)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread, and those that it starts, in a namespace."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        yield
    finally:
        enter_by(back)
        os.close(back)


def enter(name: str) -> None:
    """Goes into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    enter_by(descriptor)
    os.close(descriptor)


def enter_by(descriptor: int) -> None:
    """Goes into the namespace of a descriptor. PermissionError."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
        raise PermissionError(ctypes.get_errno(), "setns")


def sent_bytes(name: str) -> int:
    """The bytes that have left a host over its wire."""
    done = subprocess.run(
        ["ip", "netns", "exec", name, "cat", "/proc/net/dev"], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r"wire: *(.+)", done.stdout)
    assert found is not None
    return int(found[1].split()[8])


def one_case(fleet: Fleet) -> tuple[float, list[float]]:
    """Seconds of a publish over one epoch, and how often each byte left each host, rank 0's first."""
    with wires(fleet) as names:
        hosts = fleet.hosts
        receivers = Receivers(fleet.num_receivers, lambda number: enter(names[hosts[number]]))
        with inside(names[0]):
            root = Publisher(CPU)
            before = [sent_bytes(name) for name in names.values()]
            _, formed = form(root, receivers, 0, 1 + fleet.num_receivers, NUM_BYTES, address(0))
            after = [sent_bytes(name) for name in names.values()]
            root.close()
        receivers.close()
        per_byte = NUM_BYTES * NUM_VERSIONS
        return formed.publish_s, [(end - begin) / per_byte for begin, end in zip(before, after, strict=True)]


def main() -> None:
    """Prints a row for each of CASES."""
    torch.set_num_threads(1)
    print(*describe(), f"torch {torch.__version__}", Path(__file__).name, sep="\n")
    print(f"\n{NUM_BYTES / 2**20:.0f} MiB in buckets of {BUCKET / 2**20:.0f}, {MEGABITS} Mbit/s each way\n")
    print("| receivers | a host | slow | measured s | simulated s, tree | copies: rank 0, busiest | of the tree |")
    print("|---" * 7 + "|")
    for fleet in CASES:
        seconds, counted = one_case(fleet)
        simulated = publish_s("tree", fleet, NUM_BYTES, MEGABITS * 125e3)
        slow = f"rank {fleet.slow_rank} at {SLOW:g}" if fleet.slow_rank else "none"
        first, busiest = copies(fleet)
        print(f"| {fleet.num_receivers} | {fleet.per_host} | {slow} | {seconds:.1f} | {simulated:.1f} | ", end="")
        print(f"{counted[0]:.2f}, {max(counted[1:]):.2f} | {first}, {busiest} |", flush=True)


if __name__ == "__main__":
    main()
