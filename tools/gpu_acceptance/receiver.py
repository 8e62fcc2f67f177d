"""A receiver of the weight channel in a process of its own, without vLLM: `python -m tools.gpu_acceptance.receiver
[--device DEVICE]`.

It reads jobs from stdin, a JSON object a line, and answers with lines of JSON: "ready" once it has started, then one
for every transfer, "stopped" where it was
told to take no more, or the error. It joins an epoch for each job, so that one process serves many; whoever started it
may kill or stop it at any point.
`Receivers` is the other side.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rolecall.errors import RoleCallError
from rolecall.settings import WeightBackend, child_environment
from rolecall.training.ranks.device import backend_of
from rolecall.weights.channel import join
from rolecall.weights.deltas.base import Base
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest
from tests.nccl_hosts import as_host

MEET_S = 60.0
"""Deadline of the meeting, and of the manifest."""
START_S = 90.0
"""Longest start of the process: torch is imported, and the device begun."""
_POLL_S = 0.2
_STOPPED_S = 600.0
"""How long it holds still when told to; somebody ends it before."""


def main() -> None:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    device = parser.parse_args().device
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    say("ready")
    for line in sys.stdin:
        _serve(json.loads(line), device)


def _serve(job: dict[str, Any], device: torch.device) -> None:
    """{"address", "epoch", "backend", "transfers", "timeout_s", "stop_after": buckets or null, "hold_cycles"}."""
    started = time.monotonic()
    try:
        rendezvous = Rendezvous(job["address"], job["epoch"], 1, MEET_S)
        try:
            channel = join(rendezvous, 2, job["backend"], device, MEET_S)
            manifest, base = agreed_manifest(rendezvous, MEET_S), Base()
            for _ in range(job["transfers"]):
                reception = Reception(channel, manifest, job["timeout_s"], base)
                for count, _named in enumerate(reception, start=1):
                    if count == job["stop_after"]:
                        say({"stopped": count})
                        time.sleep(_STOPPED_S)
                    if job["hold_cycles"]:  # what reads the next bucket comes late
                        torch.cuda._sleep(job["hold_cycles"])  # type: ignore[no-untyped-call]
                result = reception.result()
                say(
                    {
                        "digest": result.digest,
                        "num_bytes": result.num_bytes,
                        "transfer_s": result.transfer_s,
                        "device": str(channel.device),
                    }
                )
            channel.close()
        finally:
            rendezvous.close()
    except RoleCallError as error:
        say({"error": error.reason, "message": error.message, "after_s": time.monotonic() - started})


def own_backend(device: torch.device) -> WeightBackend:
    """Returns the way on which weights do not leave the device's memory, where there is one."""
    return "nccl" if backend_of(device) == "nccl" else "gloo"


def say(what: object) -> None:
    """One line of JSON on stdout, at once."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Receiver:
    """One such process, seen from outside."""

    def __init__(self, device: torch.device, host: str) -> None:
        self._device = device
        command = [sys.executable, "-m", "tools.gpu_acceptance.receiver", "--device", str(device)]
        self.process = subprocess.Popen(
            command, env=child_environment(as_host(host)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._ready = False

    def ask(
        self,
        address: str,
        epoch: int,
        *,
        timeout_s: float,
        transfers: int = 1,
        stop_after: int | None = None,
        hold_cycles: int = 0,
        backend: WeightBackend | None = None,
    ) -> None:
        """Gives it a job, once it has started. `backend`: by default the device's own."""
        if not self._ready:
            assert self.answer(START_S) == "ready"
            self._ready = True
        job = {
            "address": address,
            "epoch": epoch,
            "backend": backend or own_backend(self._device),
            "transfers": transfers,
            "timeout_s": timeout_s,
            "stop_after": stop_after,
            "hold_cycles": hold_cycles,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = MEET_S) -> Any:
        """Returns the next line of the receiver. RuntimeError when it has ended, or says nothing in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return json.loads(self._said.get(timeout=_POLL_S))
            except queue.Empty:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    ended = self.process.returncode
                    raise RuntimeError(f"the receiver said nothing in {timeout_s:g} s (exit code {ended})") from None

    def kill(self) -> None:
        """SIGKILL, also of one that is stopped; returns when it is gone."""
        self.process.kill()
        self.process.wait(MEET_S)
        self._listener.join(MEET_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", '"')):  # NCCL warns on stdout, too
                self._said.put(line)


@contextmanager
def receivers(device: torch.device, count: int) -> Iterator[list[Receiver]]:
    """Yields so many receivers, started at once; none is left afterwards."""
    started = [Receiver(device, f"receiver-{index}") for index in range(count)]
    try:
        yield started
    finally:
        for receiver in started:
            receiver.kill()


if __name__ == "__main__":
    main()
