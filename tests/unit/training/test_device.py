"""The device seam: nobody else names a kind of device, and what it says of cores and memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import rolecall
import services
from rolecall.training.ranks.device import (
    allocator_state,
    held_bytes,
    is_out_of_memory,
    memory_bytes,
    name_of,
    near_cores,
    seed_rank,
    stay_near,
    take_peak_bytes,
)
from tests.resident import use_memory

CPU = torch.device("cpu")
KNOW_CUDA = {
    "rolecall/training/ranks/device.py",
    "rolecall/training/megatron/experts.py",
    "rolecall/training/megatron/layout.py",
    "rolecall/training/megatron/on_cpu.py",
    "rolecall/weights/nccl.py",
    "rolecall/weights/shared_memory/device_slots.py",
}
"""The seam itself, bindings of libraries that are CUDA's own, megatron-core among them, and where that is told that
there is none.
"""


def test_nothing_but_the_seam_and_the_bindings_of_libraries_says_cuda() -> None:
    sources = [path for package in (rolecall, services) for path in Path(*package.__path__).rglob("*.py")]
    assert len(sources) > 100
    saying = {str(path.relative_to(Path(*rolecall.__path__).parent)) for path in sources if "cuda" in path.read_text()}
    assert saying == KNOW_CUDA


@pytest.mark.parametrize(("node", "cores"), [("0", {0, 1, 2, 3, 8}), ("1", {4, 5}), ("-1", set())])
def test_the_cores_near_a_gpu_are_those_of_its_numa_node(tmp_path: Path, node: str, cores: set[int]) -> None:
    gpu = tmp_path / "bus/pci/devices/0000:dc:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(node + "\n")
    for name, listed in (("node0", "0-3,8\n"), ("node1", "4-5\n")):
        (tmp_path / "devices/system/node" / name).mkdir(parents=True)
        (tmp_path / "devices/system/node" / name / "cpulist").write_text(listed)
    assert near_cores("0000:dc:00.0", tmp_path) == cores
    assert near_cores("0000:99:00.0", tmp_path) == set()


def test_a_rank_on_cpus_keeps_its_cores_and_has_no_device_name() -> None:
    before = os.sched_getaffinity(0)
    stay_near(CPU)
    assert os.sched_getaffinity(0) == before
    assert name_of(CPU) is None
    assert allocator_state(CPU) == {}


def test_a_peak_on_cpus_is_seen_once_and_is_of_the_process() -> None:
    take_peak_bytes(CPU)
    in_use, total = memory_bytes(CPU)
    use_memory(2**26)
    assert in_use + 2**25 < take_peak_bytes(CPU) < total
    assert take_peak_bytes(CPU) < in_use + 2**25


def test_a_lack_of_memory_is_told_from_other_failures() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60)
    assert is_out_of_memory(host.value)
    with pytest.raises(MemoryError) as numpy:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_peak_on_a_gpu_is_of_its_tensors_and_its_name_is_known() -> None:
    device = torch.device("cuda", 0)
    take_peak_bytes(device)
    before = held_bytes(device)  # what other tests left: the workspace of products
    kept = torch.ones(2**20, device=device)
    torch.ones(2**22, device=device)
    assert 20 * 2**20 <= take_peak_bytes(device) - before < 30 * 2**20
    assert 4 * 2**20 <= take_peak_bytes(device) - before < 10 * 2**20
    assert kept.nbytes < memory_bytes(device)[0] < memory_bytes(device)[1]
    assert name_of(device)
    assert allocator_state(device)["segments"]
    stay_near(device)


def test_ranks_draw_their_own_numbers_by_every_seed_that_a_run_may_have() -> None:
    def drawn(seed: int, rank: int) -> float:
        seed_rank(seed, rank)
        return torch.rand(1, dtype=torch.float64).item()

    with torch.random.fork_rng(devices=[]):
        large = [drawn(seed, rank) for seed in (185_000_000_000_000, 2**63 - 1) for rank in (0, 1)]
        torch.manual_seed(7 * 100_003 + 1)
        before = torch.rand(1, dtype=torch.float64).item()
        assert drawn(7, 1) == before, "runs go on as they began"
    assert len(set(large)) == 4
