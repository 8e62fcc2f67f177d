"""Runs of real processes whose prompts show images, vLLM in the rollout: the example learns what only the images say,
and every role computes the same of images of all sizes.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.colored_squares.prepare import FAMILIES
from rolecall.data.model.files import read_model
from tests.integration.agent_pictures import FIRST, OTHER, SECOND, pictures
from tests.pictures import picture
from tests.ports import free_port
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import write_published

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "colored_squares"
MAX_GAP = 1e-3
"""Nats, in float32: a token's logprob by vLLM and by the trainer, which see the same pixels, differ by 1e-5. Another
image, or none, is tenths and more.
"""
MEAN_GAP = 0.05
"""Nats of a token on average, in bfloat16: the two differ by .02, and another image is .15 and more."""

COUNTS = """
def seen(item):
    return float(sum(isinstance(part, bytes) for _, parts in item.conversation for part in parts))
"""

pytestmark = [pytest.mark.vision, pytest.mark.timeout(900)]


def run(*words: str) -> str:
    """What a command says that succeeds."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def metrics(folder: Path, key: str) -> list[float]:
    """Values of a metric, step by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [float(row[key]) for row in rows if key in row]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_sees_selects_an_order_of_what_it_sees(tmp_path: Path, family: str) -> None:
    run(str(EXAMPLE / "prepare.py"), str(tmp_path / "work"), "--family", family)
    shutil.copy(EXAMPLE / "task.yaml", tmp_path)
    said = run("-m", "rolecall", "train", str(tmp_path / "task.yaml"))
    accuracy = metrics(tmp_path / "work" / "run", "eval/heldout/accuracy")
    assert accuracy[0] < 0.5, said
    assert accuracy[-1] >= 0.85, said
    gaps = metrics(tmp_path / "work" / "run", "actor/mismatch_max")
    assert len(gaps) == 30
    assert max(gaps) < MAX_GAP
    run("-m", "rolecall", "export", str(tmp_path / "work" / "run"), str(tmp_path / "trained"))
    assert read_model(tmp_path / "trained") == read_model(tmp_path / "work" / "model")
    assert (tmp_path / "trained" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_vl", "glm4v", "qwen3_5"])
def test_sampler_actor_critic_and_reference_see_the_same(tmp_path: Path, family: VisionFamily) -> None:
    """Recurrent layers vLLM computes on CPUs in bfloat16 alone; their model is as it is published."""
    path, is_exact = write_vision(tmp_path / "saved", family), family != "qwen3_5"
    model = path if is_exact else write_published(path, tmp_path / "model")
    rng = random.Random(0)
    with (tmp_path / "train.jsonl").open("w") as file:
        for number in range(48):
            names = [f"{number}-{place}.png" for place in range(rng.choice([0, 1, 1, 2]))]
            for place, name in enumerate(names):
                width, height = rng.randint(8, 80), rng.randint(8, 80)
                (tmp_path / name).write_bytes(picture(width, height, 2 * number + place))
            row = {"prompt": "What is " + " beside ".join(["<image>"] * len(names)) + "?", "images": names}
            file.write(json.dumps(row) + "\n")
    tree: dict[str, Any] = {
        "recipe": "ppo",
        "run": {"name": "images", "dir": "run", "num_steps": 3},
        "model": {"path": model.name, "dtype": "float32" if is_exact else "bfloat16"},
        "data": {"train": "train.jsonl", "images_field": "images", "max_prompt_tokens": 200},
        "sampling": {"num_responses": 4, "max_tokens": 24},
        "algorithm": {"groups_per_batch": 8, "num_minibatches": 2, "max_staleness": 1},
        "actor": {"optimizer": {"learning_rate": 1e-3}},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "reward": {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 24}}}},
        "rollout": {"kv_cache_bytes": 2**27},
        "store": {"max_bytes": 2**28},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    run("-m", "rolecall", "train", str(tmp_path / "run.yaml"))
    assert all(norm > 0 for norm in metrics(tmp_path / "run", "actor/grad_norm"))
    # of the tokens of the actor's very version, which the first step's all are
    assert metrics(tmp_path / "run", "actor/mismatch_tokens")[0] > 0
    gaps = metrics(tmp_path / "run", "actor/mismatch_max" if is_exact else "actor/mismatch_mean")
    assert max(gaps) < (MAX_GAP if is_exact else MEAN_GAP)
    # and the reference is the policy that the first step sampled from
    assert abs(metrics(tmp_path / "run", "reward/kl")[0]) < MAX_GAP


def test_a_run_whose_environment_shows_images_stops_and_goes_on(tmp_path: Path) -> None:
    """Actor of two ranks, critic and reference; half of the prompts show an image before the environment's. A scorer of
    no weight counts what it sees.
    """
    (tmp_path / "sees.py").write_text(COUNTS)
    write_vision(tmp_path / "model", "qwen3_vl")
    with (tmp_path / "train.jsonl").open("w") as file:
        for number in range(32):
            names = [f"{number}.png"] * (number % 2)
            for name in names:
                (tmp_path / name).write_bytes(picture(24, 16, number))
            file.write(json.dumps({"prompt": "<image>" * len(names) + "What?", "images": names}) + "\n")
    address = f"127.0.0.1:{free_port()}"
    tree: dict[str, Any] = {
        "recipe": "ppo",
        "run": {"name": "gallery", "dir": "run", "num_steps": 40},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "images_field": "images", "max_prompt_tokens": 120},
        "environments": {"game": {"address": address, "max_image_bytes": 20_000}},
        "sampling": {"num_responses": 4, "max_tokens": 240, "stop_token_ids": list(range(180, 288))},
        "algorithm": {"groups_per_batch": 4, "num_minibatches": 2},
        "actor": {"num_ranks": 2, "optimizer": {"learning_rate": 1e-3}},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "reward": {
            "components": {
                "even": {"scorer": {"kind": "environment", "min": 0, "max": 1}},
                "seen": {"scorer": {"kind": "function", "target": "sees:seen", "images": True}, "weight": 0},
            }
        },
        "rollout": {"kv_cache_bytes": 2**27},
        "store": {"max_bytes": 2**28},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    folder, gallery = tmp_path / "run", subprocess.Popen([sys.executable, "-m", "tests.e2e.gallery", address])
    try:
        with ThreadPoolExecutor(1) as trains:
            said = trains.submit(run, "-m", "rolecall", "train", str(tmp_path / "run.yaml"))
            while not (folder / "metrics.jsonl").is_file() or not metrics(folder, "actor/mismatch_max"):
                assert not said.done(), said.result()
                time.sleep(0.5)
            run("-m", "rolecall", "stop", str(folder), "--checkpoint")
            said.result(600)
        num_steps = len(metrics(folder, "actor/mismatch_max"))
        run("-m", "rolecall", "train", str(tmp_path / "run.yaml"), "--resume", f"--run.num_steps={num_steps + 2}")
    finally:
        gallery.terminate()
        gallery.wait(30)
    run("-m", "rolecall", "ledger", str(folder))
    gaps = metrics(folder, "actor/mismatch_max")
    assert len(gaps) == num_steps + 2
    assert max(gaps) < 1e-4
    assert abs(metrics(folder, "reward/kl")[0]) < 1e-4
    assert all(norm > 0 for norm in metrics(folder, "actor/grad_norm"))
    shown = metrics(folder, "episode/images")
    assert min(shown) > 2.5  # a random policy samples a placeholder now and then, behind which no more are shown
    beside_prompts = [seen - images for seen, images in zip(metrics(folder, "reward/seen"), shown, strict=True)]
    assert all(0 <= share <= 1 for share in beside_prompts)
    assert max(beside_prompts) > 0


def test_all_roles_see_what_an_agent_shows_in_each_segment(tmp_path: Path) -> None:
    """The agent shows the row's images, then others, and goes back to its beginning with another image there."""
    write_vision(tmp_path / "model", "qwen3_vl")
    rows = []
    for number in range(40):
        (tmp_path / f"{number}.png").write_bytes(picture(32, 24, 10 + number))
        shown = {"prompt": "<image>a", "images": [f"{number}.png"]}
        rows.append(shown if number % 3 else {"prompt": "a"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:32]))
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[32:]))
    with pictures() as address:
        tree: dict[str, Any] = {
            "recipe": "ppo",
            "run": {"name": "agents", "dir": "run", "num_steps": 3},
            "model": {"path": "model", "dtype": "float32"},
            "data": {"train": "train.jsonl", "images_field": "images", "max_prompt_tokens": 200},
            "environments": {
                "game": {
                    "address": address,
                    "max_turns": 4,
                    "max_image_bytes": len(FIRST) + len(SECOND) + len(OTHER),
                    "max_row_tokens": 900,
                }
            },
            "sampling": {"num_responses": 4, "max_tokens": 200},
            "algorithm": {"groups_per_batch": 4, "num_minibatches": 2, "max_staleness": 1},
            "actor": {"optimizer": {"learning_rate": 1e-3}, "token_budget": 450},
            "critic": {"optimizer": {"learning_rate": 1e-3}},
            "reward": {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 24}}}},
            "evaluation": {"sets": {"heldout": {"path": "heldout.jsonl"}}},
            "rollout": {"kv_cache_bytes": 2**27},
            "store": {"max_bytes": 2**28},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        said = run("-m", "rolecall", "train", str(tmp_path / "run.yaml"))
    folder = tmp_path / "run"
    assert all(norm > 0 for norm in metrics(folder, "actor/grad_norm")), said
    assert min(metrics(folder, "episode/segments")) >= 2
    assert min(metrics(folder, "episode/images")) >= 2
    assert metrics(folder, "episode/branches_history") == [1.0] * 3
    assert len(metrics(folder, "episode/branches_images")) == 3
    assert metrics(folder, "episode/masked_row_full_tokens") == [0.0] * 3
    assert metrics(folder, "actor/mismatch_tokens")[0] > 0
    assert max(metrics(folder, "actor/mismatch_max")) < MAX_GAP
    assert abs(metrics(folder, "reward/kl")[0]) < MAX_GAP
