"""The 28 checks: where each is found, to which part it belongs and how long it may take. Imports nothing heavy."""

from dataclasses import dataclass

PART_S = 525.0
"""Seconds of a whole part, starting and ending processes included."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    number: int
    part: int
    name: str
    target: str
    """"module:function"; the function takes a Stage and writes what it finds into the stage's Findings."""
    budget_s: float
    """Seconds kept for it. It may take more where those before it took less."""


_CHECKS = "tools.gpu_acceptance"

CATALOGUE = (
    Check(1, 1, "imports, versions, device", f"{_CHECKS}.machine:check_machine", 50),
    Check(2, 1, "pytest -m gpu", f"{_CHECKS}.machine:check_tests", 95),
    Check(3, 1, "packed attention against SDPA in float32", f"{_CHECKS}.attention:check_attention", 60),
    Check(4, 1, "logprobs against float32 log_softmax", f"{_CHECKS}.heads:check_logprobs", 90),
    Check(5, 1, "engine: tokens/s, MFU, peaks, gradient norm", f"{_CHECKS}.speed:check_engine", 150),
    Check(6, 1, "float32 masters and moments", f"{_CHECKS}.numbers:check_masters", 35),
    Check(7, 1, "adapters, value head, base", f"{_CHECKS}.numbers:check_heads", 40),
    Check(8, 2, "snapshot beside steps", f"{_CHECKS}.state:check_snapshot", 55),
    Check(9, 2, "offload of state and of activations", f"{_CHECKS}.state:check_offload", 75),
    Check(10, 2, "channel of a lone rank; fingerprints", f"{_CHECKS}.channel:check_lone_rank", 50),
    Check(11, 2, "publishing to a second process", f"{_CHECKS}.channel:check_two_processes", 110),
    Check(12, 2, "a receiver that dies, hangs or is late", f"{_CHECKS}.faults:check_faults", 110),
    Check(13, 2, "two ranks against one", f"{_CHECKS}.ranks:check_ranks", 115),
    Check(14, 3, "whole run over the channel; the actor killed", f"{_CHECKS}.whole_run:check_whole_run", 150),
    Check(15, 3, "noise of the probe between engines", f"{_CHECKS}.probe:check_probe", 75),
    Check(16, 3, "longest silence in one long row", f"{_CHECKS}.speed:check_silence", 70),
    Check(17, 3, "profile of a microbatch", f"{_CHECKS}.kernels:check_profile", 75),
    Check(18, 3, "running out of memory", f"{_CHECKS}.memory:check_out_of_memory", 60),
    Check(19, 3, "one device in shifts; a sampler killed", f"{_CHECKS}.shifts:check_shifts", 90),
    Check(20, 4, "0.6B as it is trained: tokens/s and MFU", f"{_CHECKS}.trained:check_trained", 150),
    Check(21, 4, "a publish of 0.6B and 8B on the actor's side", f"{_CHECKS}.published:check_publish", 120),
    Check(22, 4, "weights to a second process without NCCL; deltas", f"{_CHECKS}.published:check_host_ways", 150),
    Check(23, 5, "vLLM beside the trainer", f"{_CHECKS}.rollout:check_engine", 270),
    Check(24, 5, "whole run with vLLM on one GPU", f"{_CHECKS}.rollout:check_run", 250),
    Check(25, 6, "images: Qwen2.5-VL beside vLLM", f"{_CHECKS}.images:check_qwen2_5_vl", 260),
    Check(26, 6, "images: Qwen3-VL beside vLLM", f"{_CHECKS}.images:check_qwen3_vl", 260),
    Check(27, 7, "pytest -m gpu, compiled layers", f"{_CHECKS}.machine:check_compiled", 510),
    Check(28, 8, "Megatron-Core beside FSDP2", f"{_CHECKS}.megatron:check_megatron", 200),
)


def part(number: int) -> tuple[Check, ...]:
    """The checks of a part, in order."""
    return tuple(check for check in CATALOGUE if check.part == number)
