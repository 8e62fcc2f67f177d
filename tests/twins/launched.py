"""Runs under the real launcher, in processes of their own, that start fast: a real controller, reward service and
store; the actor is said to be elsewhere and there are no rollouts.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import yaml
from safetensors.numpy import save_file

from tests.smallest import smallest_tree
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer

START_TIMEOUT_S = 200.0
FAILS_IN_A_ROLE = """import sys
if sys.argv[0].endswith("worker.py"):
    open("no_such_file")
def score(item):
    return 0.0
"""
"""The source of a module that is imported well everywhere but in a role of a run."""
VOCAB_SIZE = 259
"""The size of `write_tokenizer`'s vocabulary."""


def write_light_config(folder: Path, target: str | None = None) -> Path:
    """Writes a configuration to `folder`, with the files that it names. `target` is a `module:function` scorer instead
    of exact match.
    """
    write_model(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "2 + 2", "ground_truth": "4"}\n')
    scorer = {"kind": "function", "target": target} if target else {"kind": "exact_match"}
    tree = smallest_tree(
        folder,
        run={"name": "light", "dir": "run", "num_steps": 1},
        sampling={"num_responses": 2, "max_tokens": 8},
        actor={"address": "127.0.0.1:9"},
        rollout={"num_replicas": 0},
        reward={"components": {"correct": {"scorer": scorer}}},
    )
    path = folder / "light.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def write_model(path: Path) -> Path:
    """Writes a model directory that passes every check and that nobody loads: a tokenizer, a configuration and an
    embedding.
    """
    write_tokenizer(path)
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "eos_token_id": EOS_TOKEN_ID,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB_SIZE,
        "head_dim": 32,
    }
    (path / "config.json").write_text(json.dumps(model))
    save_file({"model.embed_tokens.weight": np.zeros((VOCAB_SIZE, 32), np.float32)}, path / "model.safetensors")
    return path


def start_train(config: Path, *arguments: str, under: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Starts `rolecall train` on `config`, its output in pipes, as an argument of the command `under`."""
    command = [*under, sys.executable, "-m", "rolecall", "train", str(config), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until_up(train: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Returns all processes below `train` once the controller says that it waits for the actor."""
    assert train.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    said = []
    for line in train.stdout:
        said.append(line)
        if "waiting for actor" in line:
            processes: list[psutil.Process] = psutil.Process(train.pid).children(recursive=True)
            return processes
        assert time.monotonic() < deadline, "".join(said)
    raise AssertionError("rolecall train ended: " + "".join(said))


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Returns those that are still alive after `timeout_s`."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
