"""Where memory goes: peaks of phases that nest, and what is said and kept when it runs out."""

import json
from pathlib import Path

import pytest
import torch

from rolecall.errors import OutOfMemoryError, WorkerLostError
from rolecall.training.account.memory import MemoryLostError, PhaseMemory, held_tensors
from rolecall.training.serving.device_thread import DeviceThread
from tests.resident import use_memory

CPU = torch.device("cpu")
MIB = 2**20


def run_out() -> None:
    """Asks for more than there is."""
    torch.empty(2**60)


def test_a_peak_counts_for_every_phase_that_it_is_inside_of_and_for_no_other() -> None:
    memory = PhaseMemory(CPU)
    with memory.phase("optimizer"):
        pass
    with memory.phase("publish"):
        with memory.phase("forward"):
            use_memory(64 * MIB)
        with memory.phase("backward"):
            pass
    peaks = memory.take_peaks()
    assert list(peaks) == ["optimizer", "publish", "forward", "backward"]
    assert peaks["publish"] >= peaks["forward"] > peaks["optimizer"] + 32 * MIB
    assert peaks["forward"] > peaks["backward"] + 32 * MIB
    assert memory.take_peaks() == {}


def test_a_lack_of_memory_names_phase_largest_tensors_and_remedy_and_leaves_an_account(tmp_path: Path) -> None:
    # never written, so that they take no memory; larger than whatever the tests before left in this process
    weight, moment, unnamed = torch.empty(2**15, 1024), torch.empty(2**14, 1024), torch.empty(64, 2**20)
    memory = PhaseMemory(CPU, role="ref/0", rank=1, folder=tmp_path / "memory")
    memory.holdings = lambda: {
        "parameters": {"head.weight": weight},
        "optimizer states": {"exp_avg/head.weight": moment},
    }
    with pytest.raises(OutOfMemoryError) as failure, memory.phase("publish"), memory.phase("backward"):
        run_out()
    message = failure.value.message
    assert "rank 1 of ref/0 ran out of memory in backward on cpu" in message
    assert "can't allocate memory" in message
    assert "parameters 0.125 GiB" in message
    assert (
        f"the largest: a tensor float32 [64, {2**20}] 0.25 GiB, head.weight float32 [{2**15}, 1024] 0.125 GiB"
        in message
    )
    assert "token_budget" in message
    assert "num_ranks" in message
    account = json.loads((tmp_path / "memory/ref.0-rank1.json").read_text())
    assert (account["role"], account["rank"], account["phase"]) == ("ref/0", 1, "backward")
    assert account["peak_bytes"].keys() == {"publish", "backward"}
    assert account["bytes_by_kind"]["optimizer states"] == moment.nbytes
    assert account["tensors"][0]["num_bytes"] == unnamed.nbytes
    assert message.endswith(str(tmp_path / "memory/ref.0-rank1.json"))


def test_a_phase_that_had_succeeded_before_may_start_again() -> None:
    memory = PhaseMemory(CPU)
    with memory.phase("forward"):
        pass
    with (
        pytest.raises(MemoryLostError, match="ran out of memory in forward"),
        memory.phase("publish"),
        memory.phase("forward"),
    ):
        run_out()
    with pytest.raises(OutOfMemoryError), memory.phase("backward"):
        run_out()


def test_other_failures_pass_untouched_and_a_folder_that_cannot_be_is_no_second_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = PhaseMemory(CPU, folder=tmp_path / "file" / "memory")
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), memory.phase("forward"):
        raise RuntimeError("shapes differ")
    with pytest.raises(OutOfMemoryError, match=r"\(num_ranks\)$"), memory.phase("forward"):
        run_out()


async def test_the_device_thread_answers_that_memory_ran_out_and_its_process_ends() -> None:
    device_thread, memory = DeviceThread(), PhaseMemory(CPU)

    def work() -> None:
        with memory.phase("forward"):
            run_out()

    with pytest.raises(OutOfMemoryError, match="ran out of memory in forward"):
        await device_thread.run(work, "training")
    assert isinstance(device_thread.failed.exception(), OutOfMemoryError)
    with pytest.raises(WorkerLostError):
        await device_thread.run(lambda: None, "training")
    await device_thread.close()


def test_a_storage_is_counted_once_whatever_looks_at_it() -> None:
    whole = torch.ones(3, 7 * MIB // 4)
    views = [whole[0], whole.view(-1), whole.detach()]
    held = [each for each in held_tensors(CPU, {"parameters": {"w": whole}}) if each.num_bytes == whole.nbytes]
    assert [(each.name, each.shape) for each in held] == [("w", (3, 7 * MIB // 4))]
    assert len(views) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_full_gpu_is_named_and_its_allocator_is_in_the_account(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    held = torch.ones(2**20, device=device)
    memory = PhaseMemory(device, role="actor", folder=tmp_path)
    memory.holdings = lambda: {"parameters": {"w": held}}
    with pytest.raises(OutOfMemoryError, match="w float32"), memory.phase("forward"):
        torch.empty(2**50, device=device)
    account = json.loads((tmp_path / "actor-rank0.json").read_text())
    assert account["device"]["name"] == torch.cuda.get_device_name(device)
    assert account["allocator"]["segments"]
