"""A run of real processes with vLLM, torch and a critic, made twice: the second time with deaths in it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.numpy import load_file

from tests.tiny_models import write_qwen3

RUN_TIMEOUT_S = 500.0
"""Deadline of one `rolecall train`: three starts of vLLM, one of the actor, and a few small steps."""
NUM_STEPS = 7


def begin(folder: Path, name: str) -> "subprocess.Popen[str]":
    """A tiny random model, rewarded for short responses; one rollout whose answers are of many lengths."""
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": name, "num_steps": NUM_STEPS, "deterministic": True, "checkpoint_every_steps": 2},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "sampling": {"num_responses": 4, "max_tokens": 24},
        "algorithm": {"groups_per_batch": 8, "num_minibatches": 2, "advantage": {"kind": "gae"}},
        "actor": {"optimizer": {"learning_rate": 1e-3}},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "reward": {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 24}}}},
        "rollout": {"kv_cache_bytes": 2**26},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "rolecall", "train", str(folder / f"{name}.yaml")]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def curve(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """What each step says of the policy, by step. Left out is what it says of tokens that were sampled with the actor's
    very weights: those that come back after a death are the same, and another version.
    """
    path = folder / name / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    told = (
        "reward/",
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
        "actor/mismatch_kl",
        "actor/mismatch_all",
        "critic/loss",
        "response/",
    )
    return {
        row["step"]: {key: value for key, value in row.items() if key.startswith(told)}
        for row in rows
        if "reward/mean" in row
    }


def kill(train: "subprocess.Popen[str]", folder: Path, module: str, after_step: int) -> None:
    """Ends a role by SIGKILL once a step is applied."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while max(curve(folder, "disturbed"), default=0) < after_step:
        assert train.poll() is None, train.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    roles = [each for each in psutil.Process(train.pid).children(recursive=True) if module in each.cmdline()]
    roles[0].send_signal(signal.SIGKILL)


def trained(folder: Path, name: str) -> dict[str, Any]:
    """The weights of the last checkpoint, by name."""
    model = folder / f"model-{name}"
    command = [sys.executable, "-m", "rolecall", "export", str(folder / name), str(model)]
    subprocess.run(command, timeout=120, check=True, capture_output=True)
    return {key: value for file in sorted(model.glob("*.safetensors")) for key, value in load_file(file).items()}


@pytest.mark.thorough("test_a_deterministic_run_sees_no_batch")
@pytest.mark.timeout(1200)
def test_a_deterministic_run_ends_in_the_same_weights_whoever_dies_in_it(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "model", hidden=128)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(64)))
    for name in ("undisturbed", "disturbed"):
        train = begin(tmp_path, name)
        try:
            if name == "disturbed":
                kill(train, tmp_path, "services.rollout", after_step=1)
                kill(train, tmp_path, "services.actor", after_step=3)
            output = train.communicate(timeout=RUN_TIMEOUT_S)[0]
            assert train.returncode == 0, output
        finally:
            train.kill()
    assert sorted(curve(tmp_path, "undisturbed")) == list(range(1, NUM_STEPS + 1))
    # a step that was applied, and whose report was lost with its trainer, is not told again
    steps = sorted(curve(tmp_path, "disturbed"))
    assert steps[0] == 1
    assert steps[-1] == NUM_STEPS
    assert curve(tmp_path, "disturbed") == {step: curve(tmp_path, "undisturbed")[step] for step in steps}
    ours, theirs = trained(tmp_path, "disturbed"), trained(tmp_path, "undisturbed")
    assert sorted(ours) == sorted(theirs)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
