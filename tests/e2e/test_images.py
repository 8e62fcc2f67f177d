"""Runs of real processes whose prompts show images, vLLM in the rollout: the example learns what only the images say,
and every role computes the same of images of all sizes.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.colored_squares.prepare import FAMILIES
from rolecall.data.model_files import read_model
from tests.integration.agent_pictures import FIRST, OTHER, SECOND, pictures
from tests.pictures import picture
from tests.tiny_models import VisionFamily, write_vision

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "colored_squares"
MAX_GAP = 1e-3
"""Nats, in float32: a token's logprob by vLLM and by the trainer, which see the same pixels, differ by 1e-5. Another
image, or none, is tenths and more.
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


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_actor_critic_and_reference_see_the_same(tmp_path: Path, family: VisionFamily) -> None:
    write_vision(tmp_path / "model", family)
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
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "images_field": "images", "max_prompt_tokens": 200},
        "sampling": {"num_responses": 4, "max_tokens": 24},
        "algorithm": {"groups_per_batch": 8, "num_minibatches": 2, "max_staleness": 1},
        "actor": {"optimizer": {"learning_rate": 1e-3}},
        "critic": {"learning_rate": 1e-3},
        "reward": {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 24}}}},
        "rollout": {"kv_cache_bytes": 2**27},
        "store": {"max_bytes": 2**28},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    run("-m", "rolecall", "train", str(tmp_path / "run.yaml"))
    assert all(norm > 0 for norm in metrics(tmp_path / "run", "actor/grad_norm"))
    # of the tokens of the actor's very version, which the first step's all are
    assert metrics(tmp_path / "run", "actor/mismatch_tokens")[0] > 0
    assert max(metrics(tmp_path / "run", "actor/mismatch_max")) < MAX_GAP
    # and the reference is the policy that the first step sampled from
    assert abs(metrics(tmp_path / "run", "reward/kl")[0]) < MAX_GAP


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
            "environment": {
                "address": address,
                "max_turns": 4,
                "max_image_bytes": len(FIRST) + len(SECOND) + len(OTHER),
                "max_row_tokens": 900,
            },
            "sampling": {"num_responses": 4, "max_tokens": 200},
            "algorithm": {"groups_per_batch": 4, "num_minibatches": 2, "max_staleness": 1},
            "actor": {"optimizer": {"learning_rate": 1e-3}, "token_budget": 450},
            "critic": {"learning_rate": 1e-3},
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
