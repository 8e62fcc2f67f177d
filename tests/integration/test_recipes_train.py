"""Every recipe trains the sort-digits model for two steps: real trainers, reference, reward, controller, store and
weight channel.

Plain transformers sample from the weights that arrive: vLLM knows nothing of recipes, and takes most of a minute to
start (tests/e2e/test_recipes.py has it).
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.sort_digits import prepare as sort_digits
from examples.sort_digits.quickstart import HERE, train_command
from rolecall.commands.cli import main
from rolecall.launcher.plan import write_config
from rolecall.settings import RunSettings, recipe_file, recipe_names
from tests.fixtures_store import StoreUnderTest
from tests.forks import forked_role
from tests.ports import free_port
from tests.twins.channel_engine import PolicyEngine
from tests.twins.run import twin_run

TASK = HERE / "task.yaml"
NAMES = recipe_names()
BRIEF = ("grpo", "ppo")
"""Those of `make test`: one without a critic and one with."""
RECIPES = [
    pytest.param(name, marks=() if name in BRIEF else pytest.mark.thorough("test_the_recipe_trains")) for name in NAMES
]
RECIPES.append(pytest.param("ppo, adapters", marks=pytest.mark.thorough("test_the_recipe_trains")))
ADAPTERS = {"lora": {"rank": 4, "alpha": 8}}
NUM_SFT_STEPS = 90
NUM_STEPS = 2
RUN_S = 180.0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sort-digits job's prompts, and its model as soon as some of its answers are right."""
    folder = tmp_path_factory.mktemp("sort_digits")
    sort_digits.prepare(folder, 0, num_steps=NUM_SFT_STEPS)
    return folder


@pytest.mark.timeout(480)
@pytest.mark.parametrize("recipe", RECIPES)
async def test_the_recipe_trains(
    recipe: str,
    work: Path,
    store: StoreUnderTest,
    tmp_path: Path,
    make_settings: Callable[..., RunSettings],
) -> None:
    recipe, _, adapters = recipe.partition(", ")
    task = yaml.safe_load(TASK.read_text())
    sections: dict[str, Any] = {name: task[name] for name in ("actor", "reward", "sampling")} | yaml.safe_load(
        recipe_file(recipe).read_text()
    )
    sections |= {
        "run": {"num_steps": NUM_STEPS},
        "model": {"path": str(work / "model"), "dtype": "float32"},
        "data": {"train": str(work / "train.jsonl"), "max_prompt_tokens": 40},
        "algorithm": {**sections["algorithm"], "groups_per_batch": 4, "num_minibatches": 2},
        # the machine may be busy with other tests
        "controller": {"lease_s": 30.0, "start_timeout_s": 60.0, "stall_timeout_s": 60.0},
    }
    if adapters:
        sections["critic"] = {**sections["critic"], **ADAPTERS}
    references = sections.get("references", {})
    roles = {name: name for name in ("actor", "critic", "reward") if name in sections} | dict.fromkeys(
        references, "reference"
    )
    for name in roles:
        section = references if name in references else sections
        section[name] = {**section[name], "address": f"127.0.0.1:{free_port()}"}
    store.ledger.unlock()
    async with twin_run(store, tmp_path, make_settings, **sections) as run:
        config = write_config(run.settings)
        url = {"ROLECALL_STORE_URL": store.url}
        started = [
            forked_role(role, tmp_path / f"{name}.log", url, str(config), "--name", name)
            for name, role in roles.items()
        ]
        engine = PolicyEngine(work / "model")
        try:
            async with run.rollout("rollout-0", engine=engine), run.controller() as (_, running, _):
                await asyncio.wait_for(running, RUN_S)
        finally:
            await engine.close()
            for process in started:
                process.kill()
    steps = run.metrics()
    assert len(steps) == NUM_STEPS
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
    assert "critic" not in roles or all(step["critic/grad_norm"] > 0 for step in steps)
    assert steps[0]["actor/mismatch_max"] < 1e-4


@pytest.mark.parametrize("recipe", NAMES)
def test_the_quickstarts_command_is_accepted_with_the_recipe(
    recipe: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, _, train, *words = train_command(work, 0, recipe)
    assert train == "train"
    assert main(["check", *words]) == 0
    sections = yaml.safe_load(recipe_file(recipe).read_text())
    said = capsys.readouterr().out
    assert ("\n  critic " in said) == ("critic" in sections)
    assert all(f"\n  reference {name} " in said for name in sections.get("references", {}))
