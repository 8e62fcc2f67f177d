"""Runs that start the servers of their scorers themselves: vLLM's own, of a judge with random weights, in a whole run,
and a reward model's under the real launcher. Each is killed meanwhile and comes back; nothing is lost and nothing made
up.
"""

import asyncio
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

from examples.sort_digits.quickstart import read_jsonl
from rolecall.address import is_loopback_host
from rolecall.scoring.client import open_external
from rolecall.scoring.scores import Score
from rolecall.settings import ExternalScorer, RpcSection, load_settings
from rolecall.v1 import reward_pb2, trajectory_pb2
from tests.smallest import smallest_tree
from tests.tiny_models import write_qwen3, write_reward_model
from tests.twins.launched import START_TIMEOUT_S, start_train, wait_until_gone, write_light_config

QUESTION = trajectory_pb2.Message(role="user", content="2 + 2")
NUM_STEPS = 6
GROUPS, RESPONSES = 4, 4
TIMEOUT_S = 600.0


def write_run(folder: Path) -> Path:
    """The file of a run whose judge, of random weights, is held to two verdicts."""
    write_qwen3(folder / "model", hidden=128)  # heads of 32, which vLLM takes on CPUs
    write_qwen3(folder / "weights-of-the-judge", hidden=128, seed=1)
    prompts = ({"prompt": f"{a} + {b}", "ground_truth": str(a + b)} for a in range(8) for b in range(8))
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    rubric: dict[str, Any] = {
        "template": "Is this right? {{ response | tojson }}",
        "verdicts": {"good": 1.0, "bad": 0.25},
        "answer": "choice",
        "parameters": {"temperature": 1.0, "max_tokens": 16},
    }
    server = {"model": "weights-of-the-judge", "engine": {"dtype": "float32", "max_model_len": 512}}
    tree = smallest_tree(
        folder,
        run={"name": "judged", "dir": "run", "num_steps": NUM_STEPS},
        model={"path": "model", "dtype": "float32"},
        data={"train": "train.jsonl", "max_prompt_tokens": 64},
        sampling={"num_responses": RESPONSES, "max_tokens": 8},
        algorithm={"groups_per_batch": GROUPS},
        reward={
            "servers": {"judge": server},
            "components": {
                "verdict": {"scorer": {"kind": "judge", "server": "judge", "rubric": rubric}, "timeout_s": 60},
                "again": {"scorer": {"kind": "judge", "server": "judge", "rubric": {**rubric, "model": "another"}}},
            },
        },
        trackers={"num_samples_kept": None, "tensorboard": False},
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def entry(run: Path, name: str) -> dict[str, Any]:
    listed = json.loads((run / "processes.json").read_text())["processes"]
    return next(each for each in listed if each["name"] == name)


def listening_beyond_loopback(processes: list[psutil.Process]) -> list[str]:
    sockets = [found for process in processes for found in process.net_connections("tcp")]
    return [
        f"{found.laddr.ip}:{found.laddr.port}"
        for found in sockets
        if found.status == psutil.CONN_LISTEN and not is_loopback_host(found.laddr.ip)
    ]


@pytest.mark.timeout(900)
@pytest.mark.thorough("test_a_reward_model_starts_with_the_run_again_when_it_is_killed_and_ends_with_it")
def test_the_server_of_a_judge_starts_with_the_run_and_again_when_it_is_killed(tmp_path: Path) -> None:
    config, run, said = write_run(tmp_path), tmp_path / "run", tmp_path / "said"
    with said.open("w") as out:
        command = [sys.executable, "-m", "rolecall", "train", str(config)]
        train = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while "step 1/" not in said.read_text():
            assert train.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        killed = psutil.Process(entry(run, "judge")["pid"])
        below = killed.children(recursive=True)
        assert listening_beyond_loopback([killed, *below]) == []
        os.kill(killed.pid, signal.SIGKILL)
        assert wait_until_gone([killed, *below], 30.0) == []
        assert train.wait(TIMEOUT_S) == 0, said.read_text()
    finally:
        train.kill()
        train.wait(30)
    output = said.read_text()
    assert "judge was killed by SIGKILL; starting it again" in output
    assert "gives no scores: SCORER_UNAVAILABLE" in output.partition("judge was killed")[2], output
    assert (run / "logs" / "judge.log").read_text().count("=== started judge") == 2
    ledger = subprocess.run(
        [sys.executable, "-m", "rolecall", "ledger", str(run), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = json.loads(ledger.stdout)
    assert (told["balanced"], told["problems"], told["dropped"]) == (True, [], {})
    assert told["admitted"] == told["trained"] == NUM_STEPS * GROUPS
    samples = [row for row in read_jsonl(run / "samples.jsonl") if row["set"] == "train"]
    assert len(samples) == NUM_STEPS * GROUPS * RESPONSES
    for row in samples:
        verdicts = row["components"]
        assert set(verdicts) == {"verdict", "again"}
        assert set(verdicts.values()) <= {1.0, 0.25}, "a failure is no verdict"
        assert row["reward"] == pytest.approx(sum(verdicts.values()))
    assert {row["components"]["verdict"] for row in samples} == {1.0, 0.25}


async def scored(address: str) -> float:
    """The score of one response by the reward model at `address`, once it is there."""
    scorer = ExternalScorer(kind="external", address=address)
    client, channel = open_external("it", scorer, RpcSection(), timeout_s=10.0, max_attempts=1)
    item = reward_pb2.ScoreItem(id="1", response_text="4", messages=[QUESTION])
    deadline = time.monotonic() + START_TIMEOUT_S
    async with channel:
        while True:
            (outcome,) = await client.score([item])
            if isinstance(outcome, Score):
                return outcome.value
            assert time.monotonic() < deadline, outcome
            await asyncio.sleep(0.1)


@pytest.mark.timeout(600)
async def test_a_reward_model_starts_with_the_run_again_when_it_is_killed_and_ends_with_it(tmp_path: Path) -> None:
    config, run = write_light_config(tmp_path), tmp_path / "run"
    write_reward_model(tmp_path / "preference")
    (tmp_path / "preference.yaml").write_text("{path: preference, dtype: float32, num_threads: 1}")
    tree = yaml.safe_load(config.read_text())
    tree["reward"] = {
        "servers": {"preference": {"reward_model": "preference.yaml"}},
        "components": {"liked": {"scorer": {"kind": "external", "server": "preference"}}},
    }
    config.write_text(yaml.safe_dump(tree))
    train = start_train(config)
    assert train.stdout is not None
    said: list[str] = []

    def until(words: str) -> None:
        for line in train.stdout or ():
            said.append(line)
            if words in line:
                return
        raise AssertionError("".join(said))

    try:
        until("waiting for actor, rollouts\n")  # so the reward is there, which waits for its server
        address = load_settings(run / "config.yaml").reward.servers["preference"].address
        assert address is not None
        before = await scored(address)
        processes = psutil.Process(train.pid).children(recursive=True)
        os.kill(entry(run, "preference")["pid"], signal.SIGKILL)
        await asyncio.to_thread(until, "preference was killed by SIGKILL; starting it again")
        assert await scored(address) == before
        processes += psutil.Process(train.pid).children(recursive=True)
        train.send_signal(signal.SIGTERM)
        await asyncio.to_thread(train.communicate, timeout=60)
        assert wait_until_gone(processes, 10.0) == []
        assert "names no range" not in (run / "logs" / "reward.log").read_text(), "nobody can correct what is ours"
    finally:
        train.kill()
        train.wait(30)
        train.stdout.close()
