"""Two machines for the weight channel, as far as the network goes: two network namespaces and a cable between them.

python -m tests.integration.weights_machines ADDRESS RANK      a receiver, which says a line of JSON
python -m tests.integration.weights_machines ADDRESS 0         a further root
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from rolecall.errors import RoleCallError
from rolecall.weights.channel import join
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import FurtherRoot, Publisher
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest
from tests.forks import saying
from tests.integration.weights_receivers import MEET_S, enter_namespace

HERE, THERE = "10.99.0.1", "10.99.0.2"
WEIGHTS = [("weight", torch.ones(1000))]
MANIFEST = build_manifest(WEIGHTS, 1024)


def publish_to_two_machines(pipe: Connection, or_gloo: bool, num_roots: int = 1) -> None:
    """Publishes as `weights.backend: shared`, or with `or_gloo` as where nothing is said, to a receiver on this machine
    and to one on another, where a second root is if `num_roots` says so. Says what became of the publish and of either.
    """
    say = saying(pipe)
    enter_namespace()
    there = _Machine()
    root = Publisher(torch.device("cpu"))
    address = root.open(1, 3, HERE, "shared", MEET_S, or_gloo=or_gloo, num_roots=num_roots)
    further = [_start(there.command, address, 0) for _ in range(1, num_roots)]
    receivers = [_start((), address, 1), _start(there.command, address, 2)]
    try:
        sent = root.publish(iter(WEIGHTS), MANIFEST, epoch=1, policy_version=1, bucket_timeout_s=MEET_S)
        say({"digest": sent.digest})
    except RoleCallError as error:
        say({"error": error.reason, "message": error.message})
    for process in receivers:
        say(json.loads(process.communicate(timeout=MEET_S)[0].splitlines()[-1]))
    for process in further:
        process.wait(MEET_S)
    root.close()
    there.close()


class _Machine:
    """A network namespace at the other end of a cable, as long as a process of it sleeps."""

    def __init__(self) -> None:
        self._sleeper = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        own, theirs = (f"/proc/{pid}/ns/net" for pid in ("self", self._sleeper.pid))
        deadline = time.monotonic() + MEET_S
        while os.readlink(theirs) == os.readlink(own):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.command = ("nsenter", "--target", str(self._sleeper.pid), "--net", "--preserve-credentials")
        for words in (
            ("link", "add", "here0", "type", "veth", "peer", "name", "there0", "netns", str(self._sleeper.pid)),
            ("address", "add", f"{HERE}/24", "dev", "here0"),
            ("link", "set", "here0", "up"),
        ):
            subprocess.run(["ip", *words], check=True)
        for words in (("address", "add", f"{THERE}/24", "dev", "there0"), ("link", "set", "there0", "up")):
            subprocess.run([*self.command, "ip", *words], check=True)

    def close(self) -> None:
        """Ends it."""
        self._sleeper.kill()
        self._sleeper.wait(MEET_S)


def _start(prefix: Sequence[str], address: str, rank: int) -> "subprocess.Popen[str]":
    command = [*prefix, sys.executable, "-m", "tests.integration.weights_machines", address, str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _receive(address: str, rank: int) -> dict[str, str]:
    rendezvous = Rendezvous(address, 1, rank, MEET_S)
    try:
        channel = join(rendezvous, 3, "shared", torch.device("cpu"), MEET_S)
        reception = Reception(channel, agreed_manifest(rendezvous, MEET_S), MEET_S)
        for _ in reception:
            pass
        return {"channel": type(channel).__name__, "digest": reception.result().digest}
    except RoleCallError as error:
        return {"error": error.reason, "message": error.message}
    finally:
        rendezvous.close()


def _send_beside(address: str) -> None:
    root = FurtherRoot(torch.device("cpu"))
    root.stand_by(1, address, 3, 1, MEET_S)
    root.publish(iter(WEIGHTS), epoch=1, bucket_timeout_s=MEET_S)


if __name__ == "__main__":
    if sys.argv[2] == "0":
        _send_beside(sys.argv[1])
    else:
        sys.stdout.write(json.dumps(_receive(sys.argv[1], int(sys.argv[2]))) + "\n")
