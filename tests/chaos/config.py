"""The configuration of a light run: every role, PPO so that there is a critic, KL so that there is a reference, and all
that adapts from step to step.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.tiny_tokenizer import write_tokenizer

NUM_PROMPTS = 64
ALGORITHM: dict[str, Any] = {
    "groups_per_batch": 4,
    "advantage": {"kind": "gae"},
    "kl": {
        "reference": "ref",
        "kl_coef": 0.1,
        "placement": "reward",
        "adaptive": {"target": 0.1, "horizon": 100},
    },
    "entropy": {"entropy_coef": 0.001, "target": 0.5},
    "shaping": {"normalize": "running"},
    "filters": {"max_mean_tokens": 10},
}


def write_config(
    folder: Path,
    *,
    seed: int,
    num_steps: int,
    max_staleness: int,
    lease_s: float,
    hang_s: float,
    num_rollouts: int = 3,
    takes_shifts: bool = False,
) -> Path:
    """The file, with all that it names, in `folder`. Budgets are out of the way: what is counted here are losses, not
    patience.
    """
    (folder / "model").mkdir(parents=True)
    write_tokenizer(folder / "model")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"number {i}", "ground_truth": str(i)}) + "\n" for i in range(NUM_PROMPTS))
    )
    tree: dict[str, Any] = {
        "run": {"name": "chaos", "dir": "run", "seed": seed, "num_steps": num_steps, "checkpoint_every_steps": 5},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 48},
        "sampling": {"num_responses": 2, "max_tokens": 12},
        "algorithm": ALGORITHM | {"max_staleness": max_staleness},
        "controller": {
            "lease_s": lease_s,
            "max_deliveries": 1000,
            "max_dead_letters": 1000,
            "start_timeout_s": 120.0,
            "stall_timeout_s": 120.0,
            "max_recoveries": 100_000,
        },
        "actor": {"train_timeout_s": 120.0, "compute_timeout_s": 60.0, "hang_s": hang_s},
        "critic": {},
        "references": {"ref": {"offload": takes_shifts or None}},
        "reward": {
            "components": {
                "hashed": {
                    "scorer": {"kind": "function", "target": "tests.chaos.scorer:score", "min": 0.0, "max": 1.0},
                    "weight": 0.5,
                    "timeout_s": 3.0,
                },
                "outside": {
                    "scorer": {"kind": "external", "address": f"unix:{folder / 'scorer.sock'}"},
                    "weight": 0.5,
                    "timeout_s": 3.0,
                },
            },
            "num_workers": 1,
            "timeout_s": 5.0,
            "max_failed_groups": 1000,
        },
        "rollout": {
            "num_replicas": num_rollouts,
            "max_groups": 2,
            "generation_timeout_s": 60.0,
            "hang_s": hang_s,
            "sleep_mode": takes_shifts,
        },
        "weights": {"bucket_timeout_s": 5.0, "publish_timeout_s": 60.0},
        "launcher": {"max_restarts": 100_000, "backoff_s": 0.01},
        "store": {"num_shards": 2, "max_bytes": 2**28},
        "trackers": {"tensorboard": False, "num_samples_kept": 0},
    }
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
