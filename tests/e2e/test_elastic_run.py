"""A run of real processes with vLLM, torch and a critic whose fleet grows while it runs, and which is resumed
afterwards.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rolecall.settings import StoreSection
from rolecall.store.connection import connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from tests.tiny_models import write_qwen3

RUN_TIMEOUT_S = 420.0
"""Deadline of one `rolecall train`: two starts of vLLM and a dozen small steps."""


def write_config(folder: Path) -> Path:
    """A tiny random model rewarded for short responses, one rollout of ours, batches one step off-policy at most."""
    write_qwen3(folder / "model", hidden=128)
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(64)))
    tree = {
        "run": {"name": "elastic", "dir": "run", "num_steps": 12, "checkpoint_every_steps": 4},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
        "sampling": {"num_responses": 4, "max_tokens": 24},
        "algorithm": {"groups_per_batch": 8, "max_staleness": 1, "num_minibatches": 2, "advantage": {"kind": "gae"}},
        "actor": {"optimizer": {"learning_rate": 1e-4}},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "reward": {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 24}}}},
        "rollout": {"kv_cache_bytes": 2**26},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rolecall", *words]


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if "reward/mean" in row]


def wait_for_step(folder: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not metrics(folder) or metrics(folder)[-1]["step"] < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.thorough("test_a_fleet_of_one_grows_to_three_and_shrinks_to_one_inside_a_run")
@pytest.mark.timeout(1200)
def test_a_rollout_that_joins_late_samples_for_the_run_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    config = write_config(tmp_path)
    late = None
    try:
        train = subprocess.Popen(
            command("train", str(config)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        wait_for_step(tmp_path, 1, train)
        pause = subprocess.run(
            command("pause", str(tmp_path / "run")), capture_output=True, text=True, timeout=120, check=False
        )
        assert pause.returncode == 0, pause.stderr
        serve = command("serve", "rollout", str(tmp_path / "run" / "config.yaml"), "--name", "rollout-1")
        with (tmp_path / "late.log").open("w") as log:
            late = subprocess.Popen(serve, env=environment, stdout=log, stderr=log)
        status = ""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while "rollout-1" not in status:
            assert time.monotonic() < deadline
            assert late.poll() is None, (tmp_path / "late.log").read_text()
            status = subprocess.run(
                command("status", str(tmp_path / "run")), capture_output=True, text=True, timeout=120, check=False
            ).stdout
        subprocess.run(command("resume", str(tmp_path / "run")), timeout=120, check=True)
        output = train.communicate(timeout=RUN_TIMEOUT_S)[0]
        assert train.returncode == 0, output
        check_bounds(tmp_path, num_steps=12)
        assert metrics(tmp_path)[-1]["rollout/replicas"] == 2
        late.terminate()
        assert late.wait(timeout=120) == 0

        resumed = subprocess.run(
            command("train", str(config), "--resume", "--run.num_steps=14"),
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        check_bounds(tmp_path, num_steps=14)
        assert balance(tmp_path) == (14 * 8, 14 * 8, 0)
    finally:
        if late is not None:
            late.kill()
            late.wait(120)


def balance(folder: Path) -> tuple[int, int, int]:
    """(admitted, trained, live) of the run that has ended, from its store."""
    store = EmbeddedStore(folder / "run" / "store", "elastic", 128 * 2**20)
    try:
        connection = connect(StoreSection.model_validate({"url": store.start(), "max_bytes": 128 * 2**20}))
        counts = Ledger(connection, "elastic").counts()
        connection.close()
        return counts.admitted, counts.trained, counts.live
    finally:
        store.stop()


def check_bounds(folder: Path, num_steps: int) -> None:
    """Each step once, staleness within its bound, and the sampler's logprobs those of the actor."""
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert max(row["staleness/max"] for row in rows) <= 1
    assert max(row.get("actor/mismatch_max", 0.0) for row in rows) <= 1e-4
    assert max(row.get("actor/mismatch_p999", 0.0) for row in rows) <= 2e-5
    assert any("actor/mismatch_max" in row for row in rows)
    assert all(row["critic/grad_norm"] > 0 for row in rows)
