"""The settings of the smallest run, as its file says them."""

from pathlib import Path
from typing import Any


def smallest_tree(folder: Path, **sections: Any) -> dict[str, Any]:
    """Returns the settings of the smallest GRPO run, all that it names in `folder`; keywords replace whole sections."""
    return {
        "run": {"name": "test", "dir": str(folder / "run"), "num_steps": 1},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "algorithm": {"groups_per_batch": 2},
        "reward": {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
    } | sections
