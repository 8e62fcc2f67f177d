"""Functions of users: what could never be called, or never answer, is named before anything is called."""

import io
import re
import types
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from rolecall.commands.check import find_problems
from rolecall.plugins import load_function
from rolecall.scoring.results import result_of
from rolecall.settings import FunctionScorer, load_settings
from rolecall.v1 import reward_pb2
from tests.twins.launched import write_light_config

NEVER_ANSWER = {
    "def score(item):\n    yield 1.0": "is a generator, and nobody awaits",
    "async def score(item):\n    yield 1.0": "is an async generator, and nobody awaits",
    "def score():\n    return 1.0": "cannot be called with an item: too many positional arguments; correct it",
    "def score(item, truth):\n    return 1.0": "cannot be called with an item: missing a required argument: 'truth'",
    "import sys\nsys.exit()": "calls sys.exit(None) when it is imported; keep that under if __name__",
    "import sys\nsys.exit('no')": "calls sys.exit('no') when it is imported; keep that under if __name__",
}


@pytest.mark.parametrize("source", NEVER_ANSWER)
def test_a_scorer_that_would_never_answer_is_named_before_the_run(tmp_path: Path, source: str) -> None:
    config = write_light_config(tmp_path, target="mine:score")
    (tmp_path / "mine.py").write_text(source)
    (problem,) = find_problems(load_settings(config), io.StringIO())
    assert problem.startswith("reward.components.correct.scorer.target 'mine:score'")
    assert NEVER_ANSWER[source] in problem


@pytest.mark.parametrize(
    "source",
    [
        "async def score(item):\n    raise AssertionError('not called')",
        "class S:\n    async def __call__(self, item):\n        return 1.0\nscore = S()",
    ],
)
def test_a_scorer_may_be_a_coroutine_function_and_a_loss_may_not(tmp_path: Path, source: str) -> None:
    config = write_light_config(tmp_path, target="mine:score")
    (tmp_path / "mine.py").write_text(source)
    assert find_problems(load_settings(config), io.StringIO()) == []
    loss = "algorithm.policy_loss={kind: custom, function: 'mine:score', columns: []}"
    local = ["actor.address=null", "rollout.num_replicas=1"]
    (problem,) = find_problems(load_settings(config, [loss, *local]), io.StringIO())
    assert "is async, and nobody awaits or iterates it; return the answer from a plain def" in problem


@pytest.mark.parametrize(("name", "taken_by"), [("types", types.__file__), ("time", "Python itself")])
def test_a_module_whose_name_is_taken_is_told_by_what(tmp_path: Path, name: str, taken_by: str) -> None:
    config = write_light_config(tmp_path, target=f"{name}:score")
    (tmp_path / f"{name}.py").write_text("def score(item):\n    return 1.0")
    (problem,) = find_problems(load_settings(config), io.StringIO())
    assert f"the name {name!r} is taken by {taken_by}, so that {tmp_path / name}.py is not imported" in problem


@pytest.mark.parametrize("target", ["operator:truth", "builtins:bool"])
def test_a_callable_that_takes_one_thing_or_does_not_tell_passes(target: str) -> None:
    assert load_function(target, "field", first="an item")([1]) is True


def test_a_decorator_that_supplies_arguments_passes(tmp_path: Path) -> None:
    """The call meets the decorator's own signature, not that of what it wraps."""
    config = write_light_config(tmp_path, target="mine:score")
    (tmp_path / "mine.py").write_text(
        "import functools\n"
        "def with_truth(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(item):\n"
        "        return function(item, '2')\n"
        "    return wrapper\n"
        "@with_truth\n"
        "def score(item, truth):\n"
        "    return 1.0\n"
    )
    assert find_problems(load_settings(config), io.StringIO()) == []


def test_a_function_of_many_is_told_that_it_gets_a_list(tmp_path: Path) -> None:
    config = write_light_config(tmp_path, target="mine:score")
    (tmp_path / "mine.py").write_text("def score(items, group):\n    return [1.0 for _ in items]")
    (problem,) = find_problems(load_settings(config, ["reward.components.correct.scorer.scope=group"]), io.StringIO())
    assert "cannot be called with a list of items: missing a required argument: 'group'" in problem


def test_the_options_of_a_loss_are_held_against_it_before_the_run(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    (tmp_path / "mine.py").write_text("def loss(batch, *, scale):\n    raise AssertionError('not called')")
    loss = "algorithm.policy_loss={{kind: custom, function: 'mine:loss', columns: [], options: {{{}: 2}}}}"
    local = ["actor.address=null", "rollout.num_replicas=1"]
    assert find_problems(load_settings(config, [loss.format("scale"), *local]), io.StringIO()) == []
    (problem,) = find_problems(load_settings(config, [loss.format("size"), *local]), io.StringIO())
    assert re.search(r"and the options \['size'\]: missing a required (keyword-only )?argument: 'scale'", problem)


@pytest.mark.parametrize("scope", ["item", "batch", "group"])
def test_the_options_of_a_scorer_are_held_against_it_before_the_run(tmp_path: Path, scope: str) -> None:
    config = write_light_config(tmp_path, target="mine:score")
    (tmp_path / "mine.py").write_text("def score(given, *, scale):\n    raise AssertionError('not called')")
    scorer = "reward.components.correct.scorer"
    with_options = [f"{scorer}.scope={scope}", f"{scorer}.options={{scale: 2}}"]
    assert find_problems(load_settings(config, with_options), io.StringIO()) == []
    (problem,) = find_problems(load_settings(config, [with_options[0], f"{scorer}.options={{size: 2}}"]), io.StringIO())
    assert problem.startswith(f"{scorer}.target 'mine:score' cannot be called with ")
    assert re.search(r"and the options \['size'\]: missing a required (keyword-only )?argument: 'scale'", problem)


def test_an_environment_s_reward_has_no_options() -> None:
    with pytest.raises(ValueError, match="options: they are of a target, and an environment has none"):
        FunctionScorer.model_validate({"kind": "environment", "options": {"scale": 2}})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"min": 2.0, "max": 1.0}, "min 2 exceeds max 1, so that no value is inside"),
        ({"components": ("a", "a")}, "each needs a name of its own"),
    ],
)
def test_a_description_that_no_score_fits_is_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FunctionScorer.model_validate({"target": "mine:score", **fields})


@pytest.mark.parametrize("answer", [True, np.True_, 1, np.int64(1), np.float32(1)])
def test_a_function_may_return_truth_and_any_number_of_python_or_numpy(answer: object) -> None:
    spec = reward_pb2.DescribeResponse(name="mine")
    assert result_of(reward_pb2.ScoreItem(id="0/0"), answer, spec).reward.value == 1.0


@pytest.mark.parametrize("options", [{"cap": float("inf")}, {"since": date(2024, 1, 1)}, {"names": {1: "a"}}])
def test_options_that_would_reach_a_worker_as_something_else_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="options: worker processes get them as JSON"):
        FunctionScorer(target="mine:score", options=options)
