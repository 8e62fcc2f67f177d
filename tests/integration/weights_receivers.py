"""Ends of the weight channel in processes of their own, without vLLM. What they say is JSON, a line at a time."""

import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rolecall.errors import RoleCallError
from rolecall.rpc.listening import require_ports
from rolecall.settings import WeightBackend, WeightsSection
from rolecall.training.ranks.watch import RankWatch
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.weights.channel import Channel, join
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import FurtherRoot, Publisher
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.shared_memory.meeting import socket_of
from rolecall.weights.transfer import Reception, agreed_manifest
from tests.forks import saying

MEET_S = 60.0
"""Deadline of a meeting, on a busy machine."""
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_LISTENING = "0A"
_NOBODY = 65534


def receiver(
    pipe: Connection,
    address: str,
    epoch: int,
    rank: int,
    world_size: int,
    bucket_timeout_s: float,
    stop_after: int | None = None,
    backend: WeightBackend = "gloo",
    device: str = "cpu",
    environment: Mapping[str, str] = {},
) -> None:
    """Joins an epoch, takes one transfer and says what came of it. With `stop_after` it says so after as many buckets
    and does nothing more. The environment is what NCCL reads.
    """
    say = saying(pipe)
    os.environ.update(environment)
    rendezvous = Rendezvous(address, epoch, rank, MEET_S)
    channel = join(rendezvous, world_size, backend, torch.device(device), MEET_S)
    start = time.monotonic()
    try:
        reception = Reception(channel, agreed_manifest(rendezvous, MEET_S), bucket_timeout_s)
        for count, _ in enumerate(reception, start=1):
            if count == stop_after:
                say({"stopped": count})
                time.sleep(600)
        result = reception.result()
        say(
            {
                "digest": result.digest,
                "num_bytes": result.num_bytes,
                "transfer_s": result.transfer_s,
                "device": str(channel.device),
            }
        )
    except RoleCallError as error:
        say({"error": error.reason, "message": error.message, "waited_s": time.monotonic() - start})
    finally:
        channel.close()
        rendezvous.close()


def seeded_weights(device: str) -> list[tuple[str, torch.Tensor]]:
    """64 MB, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    return [(f"w{i}", torch.randn(1000, 1000, generator=generator).to(device)) for i in range(16)]


def further_root(pipe: Connection, address: str, world_size: int, device: str) -> None:
    """Sends `seeded_weights` beside the root of epoch 1 at `address`, as root 1, and says when it has."""
    root, weights = FurtherRoot(torch.device(device)), seeded_weights(device)
    root.stand_by(1, address, world_size, 1, MEET_S)
    root.publish(iter(weights), epoch=1, bucket_timeout_s=MEET_S)
    saying(pipe)("sent")
    time.sleep(600)  # whoever closes a root ends the epoch, and the others may still send


def stalling_sender(pipe: Connection, backend: WeightBackend) -> None:
    """Says the address of epoch 1 for two receivers, and that it sends: some tensors, and never the last."""
    say = saying(pipe)
    weights = [(name, torch.zeros(1024)) for name in "abcd"]

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:-1]  # the first of them has left by the time that another is asked for
        say("sending")
        time.sleep(600)

    root = Publisher(torch.device("cpu"))
    say(root.open(1, 3, "127.0.0.1", backend, MEET_S))
    root.publish(slow(), build_manifest(weights, 4096), epoch=1, policy_version=1, bucket_timeout_s=600)


def stranger(pipe: Connection, address: str) -> None:
    """Comes for the shared memory of epoch 1 as another user, and says what it was given."""
    rendezvous = Rendezvous(address, 1, 1, MEET_S)
    name = rendezvous.take(socket_of(0), MEET_S).split()[0].decode()
    os.setuid(_NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as root:
        root.settimeout(MEET_S)
        root.connect("\0" + name)
        message, descriptors, _, _ = socket.recv_fds(root, 64, 1)
    saying(pipe)({"bytes": len(message), "descriptors": len(descriptors)})
    rendezvous.close()


def listening_ports(pipe: Connection, ports: str) -> None:
    """Publishes to two receivers beside a watch over ranks, in a network namespace whose kernel is told the range
    `ports` as a container engine or a kubelet tells it; says the ports that were listened on meanwhile.
    """
    say = saying(pipe)
    enter_namespace()
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(ports.replace("-", " "))
    require_ports(WeightsSection(ports=ports))
    watch = RankWatch(ProcessHooks(), 0, 2)
    watch.listen("127.0.0.1")
    publisher, weights = Publisher(torch.device("cpu")), [("weight", torch.ones(1000))]
    address = publisher.open(1, 3, "127.0.0.1", "gloo", MEET_S)
    open_channels: list[Channel] = []

    def receive(rank: int) -> str:
        rendezvous = Rendezvous(address, 1, rank, MEET_S)
        open_channels.append(join(rendezvous, 3, "gloo", torch.device("cpu"), MEET_S))
        reception = Reception(open_channels[-1], agreed_manifest(rendezvous, MEET_S), MEET_S)
        for _ in reception:
            pass
        return reception.result().digest

    with ThreadPoolExecutor(2) as pool:
        receivers = [pool.submit(partial(receive, rank)) for rank in (1, 2)]
        sent = publisher.publish(
            iter(weights), build_manifest(weights, 1024), epoch=1, policy_version=1, bucket_timeout_s=MEET_S
        )
        digests = [each.result(MEET_S) for each in receivers]
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = sorted(int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENING)
    say({"listening": listening, "agreed": digests == [sent.digest] * 2})
    publisher.close()
    watch.leave()


def enter_namespace() -> None:
    """Makes a network namespace, whose loopback is up, and this process its root, as `unshare --net` does."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_NET) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    with socket.socket() as interface:
        fcntl.ioctl(interface, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
