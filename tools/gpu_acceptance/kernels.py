"""Check 17: what the device does in one microbatch, by torch's profiler: how long it idles, in how many kernels, what
the head and shared prefixes cost."""

import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from rolecall.training.engine import Microbatch
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts
from rolecall.training.ranks.device import free_cached_memory, memory_bytes, wait_for
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Size, Stage, make_engine, make_row, packed, write_zeros

_HEAD = ("_BlockedLogprobs", "_BlockedLogprobsBackward")
"""What autograd calls the LM head with its softmax."""
_PREFIXES = ("_Spread", "_SpreadBackward")
"""The same of copying what sequences share, and of adding up its gradients."""
_SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def check_profile(found: Findings, folder: Path) -> None:
    """Two shapes, one microbatch of eight responses to one prompt, forward and backward."""
    stage = Stage.of(found, folder)
    sizes: tuple[Size, ...] = stage.pick(("0.6B", "4B"), ("0.6B",))
    for size in sizes:
        with found.attempt(size):
            _profile(stage, size)
        gc.collect()
        free_cached_memory(stage.device)


def _profile(stage: Stage, size: Size) -> None:
    config = stage.config(size)
    # Without recomputation where it fits beside the weights and their gradients, as in a run of this size.
    spacious = memory_bytes(stage.device)[1] > 100e9 or size == "0.6B"
    engine = make_engine(stage, write_zeros(stage.folder / size, config), gradient_checkpointing=not spacious)
    num_prompt, num_response = stage.pick((512, 512), (12, 8))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, num_prompt, dtype=np.int32)
    rows = [make_row(rng, num_prompt + num_response, config.vocab_size, prompt) for _ in range(8)]
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    stage.found.require("the prompt is not shared", microbatch.prefixes is not None)

    def once(microbatch: Microbatch = microbatch) -> None:
        engine.forward_backward([microbatch], objective, entropy=True)
        wait_for(stage.device)

    once()
    once()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if stage.device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        once()
    trace = stage.folder / f"{size}.json"
    profiled.export_chrome_trace(str(trace))
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    _tell(stage, size, events)
    shares = shares_of(profiled.key_averages(), on_device=stage.device.type == "cuda")
    for name, share in shares.items():
        stage.found.figure(f"{size}, {name} of the operators' time", f"{share:.1%}")
    stage.found.require("the profiler saw no head", shares["head"] > 0)
    stage.found.require("the profiler saw no shared prefix", shares["shared prefixes"] > 0)


def _tell(stage: Stage, size: Size, events: Iterable[dict[str, Any]]) -> None:
    """Tells from the trace: kernels and copies on the device, and the host's waits."""
    events = [event for event in events if event.get("ph") == "X"]
    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    waits = [event for event in events if event.get("name") in _SYNCHRONIZING]
    stage.found.figure(f"{size}, operators", sum(event.get("cat") == "cpu_op" for event in events))
    if not on_device:
        stage.found.require("the profiler saw no kernel", False, on_device=True)
        return
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in on_device)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    stage.found.figure(f"{size}, ms", whole / 1e3)
    stage.found.figure(f"{size}, device idle", f"{1 - busy / whole:.1%}")
    stage.found.figure(f"{size}, kernels and copies", len(on_device))
    stage.found.figure(
        f"{size}, waits of the host", f"{len(waits)}, {sum(float(event['dur']) for event in waits) / 1e3:.1f} ms"
    )
    longest: dict[str, float] = {}
    for event in on_device:
        name = str(event["name"])[:60]
        longest[name] = longest.get(name, 0.0) + float(event["dur"])
    for name, us in sorted(longest.items(), key=lambda item: -item[1])[:5]:
        stage.found.figure(f"{size}, {name}", f"{us / whole:.1%}")


def shares_of(events: Iterable[Any], *, on_device: bool) -> dict[str, float]:
    """Returns what parts of the model take of all operators' time: on the device, where most operators do nothing there
    and are the host's alone; else on CPUs. `events` are a profiler's averages.
    """
    events = list(events)
    own, whole = (
        ("self_device_time_total", "device_time_total") if on_device else ("self_cpu_time_total", "cpu_time_total")
    )

    def us(field: str, counts: Callable[[str], bool]) -> float:
        return sum(float(getattr(event, field)) for event in events if counts(event.key))

    parts = {
        "head": us(whole, lambda key: key in _HEAD),
        "shared prefixes": us(whole, lambda key: key in _PREFIXES),
        "attention": us(own, lambda key: "flash_attention" in key or "scaled_dot_product" in key),
    }
    total_us = us(own, lambda key: key.startswith("aten::")) or 1.0
    return {name: part_us / total_us for name, part_us in parts.items()}
