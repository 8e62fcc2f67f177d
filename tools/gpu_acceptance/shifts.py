"""One device in shifts: the state of an actor and a critic leaves it, a sampler in a process of its own takes it, and
is killed awake and asleep. Bytes that are really free, and the locks that say who is there.

    python -m tools.gpu_acceptance.shifts RUN_DIR DEVICE BYTES      # the sampler: takes the device, then obeys "sleep"
"""

import subprocess
import sys
import time
from pathlib import Path

import torch

from rolecall.errors import DeviceFullError
from rolecall.settings import OptimizerSection
from rolecall.shifts import Post, ShiftLocks, Side
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts
from rolecall.training.ranks.device import free_cached_memory, memory_bytes, require_room
from rolecall.weights.fingerprint import fingerprint
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage, local_parameters, make_engine, make_rows, packed, write_zeros

PATIENCE_S = 30.0
"""Longest wait for a side to leave the device, or for the sampler to answer."""


def check_shifts(found: Findings, folder: Path) -> None:
    """Actor and critic train, leave the device to a sampler that is killed, and come back to the same weights."""
    stage, locks = Stage.of(found, folder), ShiftLocks(folder)
    config = stage.config("0.6B")
    path = write_zeros(folder / "model", config)
    engines = [make_engine(stage, path, optimizer=OptimizerSection(), head=head) for head in ("policy", "value")]
    rows = make_rows(stage.pick((600, 300), (12, 9)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    engines[0].forward_backward([microbatch], objective, entropy=True)
    engines[0].step()
    for fate in ("awake", "asleep"):
        before = [{name: fingerprint(part) for name, part in local_parameters(each).items()} for each in engines]
        full = memory_bytes(stage.device)[0]
        for each in engines:
            each.offload()
        away, freed = sum(each.num_bytes_away() for each in engines), full - memory_bytes(stage.device)[0]
        found.at_least(
            f"memory that is free for the sampler killed {fate}, of the state", freed / away, 0.95, on_device=True
        )
        _give(locks, "rollouts")
        _sampled(stage, folder, away, fate)
        _give(locks, "trainers")
        for each in engines:
            require_room(stage.device, each.num_bytes_away())
            each.onload()
        after = [{name: fingerprint(part) for name, part in local_parameters(each).items()} for each in engines]
        found.require(f"weights after the sampler killed {fate} are not those before", after == before)
    locks.close()


def _sampled(stage: Stage, folder: Path, away: int, fate: str) -> None:
    """A sampler takes all that is free but half of what is away, and is killed."""
    used, total = memory_bytes(stage.device)
    num_bytes = max(total - used - away // 2, 2**20) if stage.device.type == "cuda" else 2**20
    command = [sys.executable, "-m", "tools.gpu_acceptance.shifts", str(folder), str(stage.device), str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdin is not None
        assert sampler.stdout is not None
        stage.found.require("the sampler did not take the device", sampler.stdout.readline() == "awake\n")
        if stage.device.type == "cuda":
            try:
                require_room(stage.device, away)
                stage.found.require("room was found where there is none", False)
            except DeviceFullError as error:
                stage.found.figure("a full device", error.message[:60])
        if fate == "asleep":
            sampler.stdin.write("sleep\n")
            sampler.stdin.flush()
            stage.found.require("the sampler did not sleep", sampler.stdout.readline() == "asleep\n")
        sampler.kill()


def _give(locks: ShiftLocks, side: Side) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not locks.give_to(side):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"the other side did not leave the device to the {side} within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def main(folder: str, device: str, num_bytes: str) -> None:
    """The sampler's process."""
    post = Post(Path(folder), "rollouts")
    assert post.take()
    held = [torch.ones(int(num_bytes), dtype=torch.uint8, device=device)]
    sys.stdout.write("awake\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        held.clear()
        free_cached_memory(torch.device(device))
        post.leave()
        sys.stdout.write("asleep\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
