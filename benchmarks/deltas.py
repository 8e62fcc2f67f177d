"""What deltas save: bytes after real AdamW steps by learning rate, and seconds of a publish over wires of several
speeds, with and without them. See README.md.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, Self

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.machine import describe
from benchmarks.training_measures import make_row, memory
from rolecall.settings import OptimizerSection, WeightsSection
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts, pack
from rolecall.training.ranks.device import RankSpec, start_rank
from rolecall.weights.channel import join
from rolecall.weights.deltas.base import Base
from rolecall.weights.manifest import build_manifest
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.transfer import Reception, agreed_manifest, offer_manifest, send
from rolecall.weights.transferred import Transferred

CPU = torch.device("cpu")
TIMEOUT_S = 120.0
"""Deadline of a meeting, of each bucket and of a receiver's end."""
MIDDLE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
QUICK = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
RATES = (1e-6, 3e-6, 1e-5)
Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
NUM_WARM = 3
"""Optimizer steps before the first version: the first ones move every weight by the whole learning rate."""
UPDATES = (1, 1, 1, 4, 4)
"""Optimizer steps between one version and the next."""
LINKS = {
    "100 Mbit/s": "rate 100mbit burst 256kb",
    "1 Gbit/s": "rate 1gbit burst 1mb",
    "10 Gbit/s": "rate 10gbit burst 8mb",
}
"""Wires, as tbf says them."""
HERE, THERE = "10.99.76.1", "10.99.76.2"
Version = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Taken:
    """One transfer."""

    sent: Transferred
    seconds: float
    """From the root's first bucket until the receiver has made tensors of the last."""
    received_bytes: int
    """Memory that the receiver then holds more than before the first, its own tensors dropped."""


def trained(folder: Path, shape: dict[str, int], dtype: Dtype, learning_rate: float) -> list[Version]:
    """The weights that an actor would publish: after the warm-up, and after each of UPDATES."""
    optimizer = OptimizerSection(learning_rate=learning_rate)
    engine = FsdpEngine(
        EngineOptions(path=folder, head="policy", dtype=dtype, optimizer=optimizer, total_steps=1000), device=CPU
    )
    rng = np.random.default_rng(0)
    versions: list[Version] = []
    for num_updates in (NUM_WARM, *UPDATES):
        for _ in range(num_updates):
            rows = [make_row(rng, 128, shape["vocab_size"]) for _ in range(2)]
            microbatch = pack(rows, ["loss_mask"], temperature=1.0, device=engine.device)
            engine.forward_backward([microbatch], SftObjective(local_counts(rows)))
            engine.step()
        versions.append([(name, tensor.clone()) for name, tensor in engine.named_weights()])
    return versions


class Receiver:
    """A process at the other end, epoch after epoch."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """`prefix` starts it."""
        command = [*prefix, sys.executable, "-m", "benchmarks.deltas", "--receive"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()

    def publish(self, versions: Sequence[Version], host: str, *, deltas: bool) -> list[Taken]:
        """Sends it every version over one epoch of a Gloo channel."""
        assert self._process.stdin is not None
        server = RendezvousServer(host)
        meeting = server.enter(0)
        self._process.stdin.write(f"{server.address}\n")
        self._process.stdin.flush()
        try:
            channel = join(meeting, 2, "gloo", CPU, TIMEOUT_S)
            manifest = build_manifest(versions[0], WeightsSection().bucket_bytes, deltas=deltas)
            offer_manifest(meeting, manifest)
            meeting.offer("versions", str(len(versions)).encode())
            base, taken = Base(), []
            for number, version in enumerate(versions):
                meeting.take(f"ready/{number}", TIMEOUT_S)
                started = time.monotonic()
                sent = send(channel, iter(version), manifest, TIMEOUT_S, base)
                ended, digest, held = meeting.take(f"done/{number}", TIMEOUT_S).decode().split()
                if digest != sent.digest:
                    raise SystemExit("what arrived is not what was sent")
                taken.append(Taken(sent, float(ended) - started, int(held)))
            meeting.take("left", TIMEOUT_S)
            return taken
        finally:
            meeting.abort("the benchmark goes on")
            meeting.close()


def receive(address: str) -> None:
    """The other end of one epoch."""
    meeting = Rendezvous(address, 0, 1, TIMEOUT_S)
    channel = join(meeting, 2, "gloo", CPU, TIMEOUT_S)
    manifest, base = agreed_manifest(meeting, TIMEOUT_S), Base()
    num_versions = int(meeting.take("versions", TIMEOUT_S))
    before = memory("VmRSS")
    for number in range(num_versions):
        meeting.offer(f"ready/{number}", b"1")
        reception = Reception(channel, manifest, TIMEOUT_S, base)
        for _ in reception:
            pass
        digest, ended = reception.result().digest, time.monotonic()  # one clock on one machine
        meeting.offer(f"done/{number}", f"{ended} {digest} {memory('VmRSS') - before}".encode())
    meeting.offer("left", b"1")
    channel.close()
    meeting.close()


@contextlib.contextmanager
def wire() -> Iterator[tuple[str, str]]:
    """A network namespace at the end of a cable: its name, and the cable's end here. PermissionError where the kernel
    lets this user make none.
    """
    name, cable = f"deltas-{os.getpid()}", f"deltas{os.getpid()}"
    try:
        for words in (
            f"ip netns add {name}",
            f"ip link add {cable} type veth peer name there netns {name}",
            f"ip address add {HERE}/30 dev {cable}",
            f"ip link set {cable} up",
            f"ip -n {name} address add {THERE}/30 dev there",
            f"ip -n {name} link set there up",
            f"ip -n {name} link set lo up",
        ):
            ran(words)
        yield name, cable
    finally:
        for words in (f"ip link delete {cable}", f"ip netns delete {name}"):
            subprocess.run(words.split(), capture_output=True, timeout=TIMEOUT_S, check=False)


def ran(words: str) -> None:
    """Runs a command. PermissionError when it fails, FileNotFoundError where it is not installed."""
    done = subprocess.run(words.split(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise PermissionError(f"{words}: {done.stderr.strip()}")


def bytes_table(cases: dict[tuple[Dtype, float], list[Version]]) -> None:
    """Prints the shares of the bytes that travel."""
    print("share of the bytes that travel, and of the elements whose bits changed\n")
    print(f"{'':<10}{'rate':>8}{'1 update':>16}{'4 updates':>16}{'MB whole':>10}{'receiver keeps MB':>19}")
    for (dtype, rate), versions in cases.items():
        with Receiver() as receiver:
            receiver.publish(versions[:2], "127.0.0.1", deltas=False)  # so that it has taken what any transfer takes
            taken = receiver.publish(versions, "127.0.0.1", deltas=True)
        print(f"{dtype:<10}{rate:>8.0e}", end="")
        for num_updates in (1, 4):
            of = [number for number, each in enumerate(UPDATES, start=1) if each == num_updates]
            share = median(taken[number].sent.wire_bytes / taken[number].sent.num_bytes for number in of)
            flipped = median(changed_share(versions[number - 1], versions[number]) for number in of)
            print(f"{share:>8.1%}{flipped:>8.1%}", end="")
        keeps = taken[-1].received_bytes / 1e6
        print(f"{taken[0].sent.num_bytes / 1e6:>10.0f}{keeps:>19.0f}", flush=True)


def changed_share(before: Version, after: Version) -> float:
    """Elements whose bits changed."""
    words = {2: torch.int16, 4: torch.int32}
    num_changed = sum(
        int((old.view(words[old.element_size()]) != new.view(words[new.element_size()])).sum())
        for (_, old), (_, new) in zip(before, after, strict=True)
    )
    return num_changed / sum(tensor.numel() for _, tensor in after)


def seconds_table(cases: dict[tuple[Dtype, float], list[Version]], rounds: int) -> None:
    """Prints the seconds of a publish over each wire, whole and as deltas, in turns."""
    of_bfloat16 = {rate: versions for (dtype, rate), versions in cases.items() if dtype == "bfloat16"}
    print("\nseconds of a publish after 1 update, bfloat16\n")
    print(f"{'wire':<12}{'whole':>8}" + "".join(f"{f'delta at {rate:.0e}':>18}{'':>8}" for rate in of_bfloat16))
    with wire() as (name, cable), Receiver(("ip", "netns", "exec", name)) as receiver:
        for link, tbf in {**LINKS, "no limit": None}.items():
            if tbf is not None:
                ran(f"tc qdisc replace dev {cable} root tbf {tbf} latency 50ms")
            else:
                ran(f"tc qdisc delete dev {cable} root")
            whole: list[float] = []
            delta: dict[float, list[float]] = {rate: [] for rate in of_bfloat16}
            for _ in range(rounds):
                for rate, versions in of_bfloat16.items():
                    single = versions[: 1 + UPDATES.count(1)]
                    whole += [each.seconds for each in receiver.publish(single, HERE, deltas=False)[1:]]
                    delta[rate] += [each.seconds for each in receiver.publish(single, HERE, deltas=True)[1:]]
            print(f"{link:<12}{median(whole):>8.3f}", end="")
            for taken in delta.values():
                print(f"{median(taken):>18.3f}{median(whole) / median(taken):>7.1f}x", end="")
            print(flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and one wire: does it still run?")
    parser.add_argument("--rounds", type=int, default=2, help="of each publish over a wire")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.receive:
        torch.set_num_threads(1)
        for line in sys.stdin:
            receive(line.strip())
        return
    print(*describe(), f"torch {torch.__version__}", sep="\n")
    shape = QUICK if words.quick else MIDDLE
    config = Qwen3Config(**shape, num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True)
    start_rank(RankSpec(0, 1, 0, (), None, len(os.sched_getaffinity(0)), 600.0))
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(name)
        print(f"{model.num_parameters() / 1e6:.1f}M parameters\n", flush=True)
        cases = {(dtype, rate): trained(Path(name), shape, dtype, rate) for dtype in DTYPES for rate in RATES}
    bytes_table(cases)
    try:
        seconds_table(cases, 1 if words.quick else words.rounds)
    except (PermissionError, FileNotFoundError) as error:
        print(f"\nno wires of several speeds: {error}")


if __name__ == "__main__":
    main()
