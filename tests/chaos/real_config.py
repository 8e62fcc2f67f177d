"""The configuration of a real run small enough to be killed often: a random model of a few thousand parameters, every
role, the actor on two ranks: of FSDP2, or of Megatron-Core with tensors in two.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from rolecall.settings.trainers import TrainingBackend
from tests.chaos.config import NUM_PROMPTS


def write_config(folder: Path, *, seed: int, backend: TrainingBackend) -> Path:
    """The file, with all that it names, in `folder`. Leases and hangs are the defaults: what is measured is what people
    get.
    """
    from tests.tiny_models import write_qwen3  # torch, which only real runs need

    write_qwen3(folder / "model", hidden=128)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"number {i}", "ground_truth": str(i)}) + "\n" for i in range(NUM_PROMPTS))
    )
    layout = {"parallel": {"tensor": 2}} if backend == "megatron" else {}
    tree: dict[str, Any] = {
        "run": {"name": "chaos", "dir": "run", "seed": seed, "num_steps": 1_000_000, "checkpoint_every_steps": 4},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "sampling": {"num_responses": 4, "max_tokens": 24},
        "algorithm": {
            "groups_per_batch": 8,
            "max_staleness": 1,
            "advantage": {"kind": "gae"},
            "kl": {"reference": "ref", "kl_coef": 0.01},
        },
        "controller": {
            "max_deliveries": 1000,
            "max_dead_letters": 1000,
            "start_timeout_s": 300.0,
            "max_recoveries": 100_000,
        },
        "actor": {
            "backend": backend,
            "num_ranks": 2,
            "num_threads": 1,
            "optimizer": {"learning_rate": 1e-4},
            **layout,
        },
        "critic": {},
        "references": {"ref": {}},
        "reward": {
            "components": {
                "short": {"scorer": {"kind": "length", "max_tokens": 24}, "weight": 0.5},
                "outside": {"scorer": {"kind": "external", "address": f"unix:{folder / 'scorer.sock'}"}, "weight": 0.5},
            },
            "num_workers": 1,
            "max_failed_groups": 1000,
        },
        "rollout": {"num_replicas": 2, "kv_cache_bytes": 2**26, "generation_timeout_s": 120.0},
        "launcher": {"max_restarts": 100_000, "backoff_s": 0.05},
        "store": {"max_bytes": 2**28},
        "trackers": {"tensorboard": False, "num_samples_kept": 0},
    }
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
