"""Every recipe trains the sort-digits model for two steps through the whole system: real processes, vLLM, the roles
that the method needs.

Part of `make test-learning`; `make test-all` trains them all without vLLM (tests/integration/test_recipes_train.py).
"""

import subprocess
from pathlib import Path

import pytest

from examples.sort_digits import prepare as sort_digits
from examples.sort_digits.quickstart import read_jsonl, train_command
from rolecall.settings import recipe_names

FEW = ["--run.num_steps=2", "--algorithm.groups_per_batch=4", "--evaluation.sets={}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sort_digits")
    sort_digits.prepare(path, 0)
    return path


@pytest.mark.learning
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", recipe_names())
def test_the_recipe_trains(recipe: str, folder: Path, tmp_path: Path) -> None:
    command = [*train_command(folder, 0, recipe), *FEW, f"--run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout
    steps = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in row]
    assert len(steps) == 2, done.stdout
    assert all(row["actor/skipped_steps"] == 0 for row in steps)
