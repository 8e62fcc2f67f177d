"""Estimators that users wrote: the example, what is checked of them, and which columns each kind asks for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from rolecall.algorithms.advantages import ScoredBatch, estimate
from rolecall.errors import ConfigError, OwnFunctionError
from rolecall.plugins import load_function
from rolecall.settings import (
    AdvantageSection,
    CustomAdvantage,
    GaeAdvantage,
    GrpoAdvantage,
    PlainAdvantage,
    Section,
)
from tests.unit.algorithms.advantage_rig import f32, mask, outcomes

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_advantage"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where modules of the test lie; forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def section(folder: Path, body: str, **more: Any) -> CustomAdvantage:
    (folder / "mine_for_a_test.py").write_text(
        "import numpy as np\nfrom rolecall.algorithms.advantages import Estimate\ndef f(batch, **options):\n    "
        f"{body}\n"
    )
    return CustomAdvantage(function=f"{folder}/mine_for_a_test:f", **more)


def test_the_example_is_an_estimator(folder: Path) -> None:
    configured = yaml.safe_load((EXAMPLE / "run.yaml").read_text())["algorithm"]["advantage"]
    result = estimate(
        CustomAdvantage.model_validate(configured, context={"base": EXAMPLE}), outcomes([3, 3, 3, 4], [0, 1, 5, 2])
    )
    np.testing.assert_array_equal(result.advantages_N, [0, -2, 0, 0, 0, 8, 0, 0])


def test_options_and_columns_reach_the_function(folder: Path) -> None:
    mine = section(
        folder,
        "return Estimate(options['a'] * batch.column('old_logprobs'))",
        options={"a": 3},
        columns=("old_logprobs",),
    )
    assert mine.needs == ("old_logprobs",)
    batch = ScoredBatch.of_rows(
        [0], [f32(0, 1, 0)], [mask(0, 1, 1)], [mask(0, 1, 0)], {"old_logprobs": [f32(-1, -2, -3)]}
    )
    result = estimate(mine, batch)
    np.testing.assert_array_equal(result.advantages_N, [0, -6, 0])
    assert result.advantages_N.dtype == np.float32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return batch.rewards_N", "returned ndarray"),
        ("return Estimate(batch.totals_B)", r"shape \(1,\)"),
        ("return Estimate(batch.rewards_N / 0 * np.nan)", "not finite"),
        ("return Estimate(batch.rewards_N, batch.totals_B)", "returns_N has shape"),
        ("return Estimate([0.0])", r"shape \(1,\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_a_function_returns_is_checked(folder: Path, body: str, message: str) -> None:
    with pytest.raises(OwnFunctionError, match=message):
        estimate(section(folder, body), outcomes([0], [1]))


def test_a_function_that_raises_is_named_with_its_line(folder: Path) -> None:
    message = (
        r"algorithm\.advantage\.function 'mine_for_a_test:f' raised AttributeError in .*mine_for_a_test\.py, line 4: "
        r"'ScoredBatch' object has no attribute 'mean'; correct it, and go on with --resume"
    )
    with pytest.raises(OwnFunctionError, match=message):
        estimate(section(folder, "return Estimate(batch.mean)"), outcomes([0], [1]))


def test_a_function_that_reads_values_must_give_the_critics_targets(folder: Path) -> None:
    batch = ScoredBatch.of_rows([0], [f32(0, 1)], [mask(0, 1)], [mask(0, 1)], {"values": [f32(0, 1)]})
    with pytest.raises(OwnFunctionError, match="returns_N"):
        estimate(section(folder, "return Estimate(batch.column('values'))", columns=("values",)), batch)


def test_a_function_or_module_that_does_not_exist_is_named_with_its_field(folder: Path) -> None:
    (folder / "mine_for_a_test.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage\.function 'absent_module:f': there is no module 'absent_module'"
    ):
        estimate(CustomAdvantage(function=f"{folder}/absent_module:f"), outcomes([0], [1]))
    with pytest.raises(ConfigError, match="has no function 'g'"):
        load_function("math:g", "field", first="a batch")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        load_function("mine_for_a_test:f", "field", folder, first="a batch")


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        (section, kind)
        for section in get_args(get_args(AdvantageSection)[0])
        if section is not CustomAdvantage
        for kind in get_args(section.model_fields["kind"].annotation)
    ],
)
def test_float32_rows_get_finite_float32_columns(section: type[Section], kind: str) -> None:
    masks, tokens = [mask(0, 1, 1), mask(0, 1)], [f32(0, -1, -2), f32(0, -1)]
    columns = {
        "values": tokens,
        "token_rewards": tokens,
        "old_logprobs": tokens,
        "sum_squared_probs": [f32(0, 0.5, 0.5), f32(0, 0.5)],
    }
    batch = ScoredBatch.of_rows(
        [4, 4],
        [f32(0, 0, 1), f32(0, 0.5)],
        masks,
        masks,
        columns | {"bootstrap_value": [f32(0), f32(1)]},
        {"right": f32(1, 0)},
        {"right": 1},
        f32(0, 1),
    )
    given = {"k": 1} if kind == "pass_at_k" else {}
    result = estimate(section(kind=kind, **given), batch)  # type: ignore[arg-type,call-arg]
    for values_N in [result.advantages_N] + ([] if result.returns_N is None else [result.returns_N]):
        assert values_N.dtype == np.float32
        assert np.isfinite(values_N).all()
        assert not values_N[batch.loss_mask_N == 0].any()


def test_estimators_ask_only_for_the_columns_they_read() -> None:
    assert GaeAdvantage().needs == ("values",)
    assert GaeAdvantage(bootstrap_truncated=True).needs == ("values", "bootstrap_value")
    assert GrpoAdvantage().needs == PlainAdvantage(kind="rloo").needs == ()
    assert GrpoAdvantage(supervision="process").needs == ("token_rewards",)
    assert PlainAdvantage(kind="optimal_token_baseline").needs == ("old_logprobs", "sum_squared_probs")
