"""A publish from the root's first bucket until a receiver has made tensors of the last, beside the bare channel, over
wires of several speeds. See README.md.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from benchmarks.deltas import HERE, Receiver, Version, ran, wire
from benchmarks.machine import describe
from benchmarks.raw_channel import send
from rolecall.settings import WeightsSection
from rolecall.weights.manifest import build_manifest, plan_buckets

LAYER = {"q": (1024, 1024), "k": (512, 1024), "v": (512, 1024), "o": (1024, 1024), "mlp": (3072, 3 * 1024)}
"""Shapes of a layer's matrices, about as in a model of 0.6B."""
LINKS = {
    "1 Gbit/s": "rate 1gbit burst 1mb",
    "2.5 Gbit/s": "rate 2500mbit burst 2mb",
    "5 Gbit/s": "rate 5gbit burst 4mb",
    "10 Gbit/s": "rate 10gbit burst 8mb",
}
"""Wires, as tbf says them."""
NUM_VERSIONS = 6
"""Transfers in a row, of which the first is not counted."""


def version(num_bytes: int) -> Version:
    """Random bfloat16 weights, an embedding of an eighth and layers, at least `num_bytes` of them."""
    torch.manual_seed(0)
    made: Version = [("embed", torch.randn(num_bytes // 16 // 1024, 1024, dtype=torch.bfloat16))]
    while sum(tensor.nbytes for _, tensor in made) < num_bytes:
        number = len(made)
        made += [(f"{number}.{name}", torch.randn(shape, dtype=torch.bfloat16)) for name, shape in LAYER.items()]
    return made


@contextmanager
def links(quick: bool) -> Iterator[tuple[str, tuple[str, ...], Iterator[str]]]:
    """The root's address, what starts a receiver, and the wires, each set up as it is taken."""
    if quick:
        yield "127.0.0.1", (), iter(["loopback"])
        return
    with wire() as (name, cable):
        yield HERE, ("ip", "netns", "exec", name), _set_up(cable)


def _set_up(cable: str) -> Iterator[str]:
    for link, tbf in LINKS.items():
        ran(f"tc qdisc replace dev {cable} root tbf {tbf} latency 50ms")
        yield link
    ran(f"tc qdisc delete dev {cable} root")
    yield "no limit"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few bytes through loopback: does it still run?")
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2, help="of publish and bare channel in turns")
    words = parser.parse_args()
    print(*describe(), f"torch {torch.__version__}", sep="\n")
    torch.set_num_threads(1)
    weights = version(1_000_000 if words.quick else words.mb * 1_000_000)
    buckets = plan_buckets(build_manifest(weights, WeightsSection().bucket_bytes))
    bare = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in buckets]
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    print(
        f"{num_bytes / 1e6:.0f} MB in {len(buckets)} buckets\n\n{'wire':<12}{'bare MB/s':>10}{'publish':>9}{'share':>7}"
    )
    with links(words.quick) as (host, prefix, wires), Receiver(prefix) as receiver:
        for link in wires:
            bare_s: list[float] = []
            publish_s: list[float] = []
            for _ in range(1 if words.quick else words.rounds):
                bare_s += [seconds for seconds, _ in send(["gloo"], host, bare, NUM_VERSIONS, prefix)["gloo"][1:]]
                taken = receiver.publish([weights] * NUM_VERSIONS, host, deltas=False)[1:]
                publish_s += [each.seconds for each in taken]
            speeds = [num_bytes / median(seconds) / 1e6 for seconds in (bare_s, publish_s)]
            print(f"{link:<12}{speeds[0]:>10.0f}{speeds[1]:>9.0f}{speeds[1] / speeds[0]:>7.0%}", flush=True)


if __name__ == "__main__":
    main()
