"""The bytes of a model's files, and the time in which a process that serves them is up."""

from pathlib import Path

DISK_BYTES_PER_S = 100e6
"""Rate of reading models, or writing checkpoints, over a network: of all roles together, which do so at once."""
CPU_START_S = 300.0
"""Imports and the meeting of ranks, beside the reading of a model."""
GPU_START_S = 900.0
"""Compilation and the capture of CUDA graphs, beside the reading."""


def loading_s(num_bytes: int, *, on_gpus: bool) -> float:
    """The time in which a process that serves a model of so many bytes is up."""
    return float(round((GPU_START_S if on_gpus else CPU_START_S) + num_bytes / DISK_BYTES_PER_S))


def model_bytes(path: Path) -> int:
    """The bytes of a model's weights; 0 where there is no such directory, which others complain of."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
