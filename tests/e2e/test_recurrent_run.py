"""A run of real processes whose model has recurrent layers: vLLM samples, and the actor computes the same of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny_models import write_qwen3_next

NUM_STEPS = 3


@pytest.mark.timeout(900)
@pytest.mark.thorough("test_every_sequence_of_a_pack_is_computed_as_if_it_were_alone")
def test_sampler_and_trainer_of_a_recurrent_model_agree_before_and_after_its_updates(tmp_path: Path) -> None:
    write_qwen3_next(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(64)))
    tree: dict[str, Any] = {
        "run": {"name": "recurrent", "dir": "run", "num_steps": NUM_STEPS},
        "model": {"path": "model", "dtype": "bfloat16"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "sampling": {"num_responses": 4, "max_tokens": 100},  # more than one chunk of 64
        "algorithm": {"groups_per_batch": 8, "num_minibatches": 2},
        "actor": {"optimizer": {"learning_rate": 1e-3}},
        "reward": {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 100}}}},
        "rollout": {"kv_cache_bytes": 2**27},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "rolecall", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == NUM_STEPS
    for row in steps:
        assert row["actor/grad_norm"] > 0
        # over all tokens: where a rollout was replaced none may be of the actor's very version; bfloat16 of both, and
        # leaks are test_recurrent.py's to find
        assert abs(row["actor/mismatch_kl"]) < 1e-3
