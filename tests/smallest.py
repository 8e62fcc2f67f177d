"""The settings of the smallest run, as its file says them."""

from pathlib import Path
from typing import Any


def judged(**server: Any) -> dict[str, Any]:
    """Returns a section `reward` whose judge asks the server `grader`, which has these keys."""
    rubric = {"template": "{{ response }}?", "verdicts": {"good": 1, "bad": 0}}
    return {
        "servers": {"grader": {"model": "model", **server}},
        "components": {"verdict": {"scorer": {"kind": "judge", "server": "grader", "rubric": rubric}}},
    }


def smallest_tree(folder: Path, **sections: Any) -> dict[str, Any]:
    """Returns the settings of the smallest GRPO run, all that it names in `folder`; keywords replace whole sections."""
    return {
        "run": {"name": "test", "dir": str(folder / "run"), "num_steps": 1},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "algorithm": {"groups_per_batch": 2},
        "reward": {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
    } | sections
