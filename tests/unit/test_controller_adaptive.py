"""What the algorithm carries from step to step: encoded exactly, only where something adapts, and the batch that is
prepared with it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.control import Control
from rolecall.algorithms.shaping import Moments
from rolecall.settings import AlgorithmSection, RunSettings
from rolecall.telemetry import Metrics
from rolecall.v1 import trajectory_pb2
from rolecall.v1.training_pb2 import TrainResult
from rolecall.wire import Array
from services.controller.groups.assembly import GreedyResponse, ScoredGroup
from services.controller.step.adaptive import AdaptiveState
from services.controller.step.preparation import prepare
from tests.smallest import smallest_tree

ADAPTIVE: dict[str, Any] = {
    "groups_per_batch": 1,
    "advantage": {"kind": "rloo"},
    "kl": {"reference": "ref", "kl_coef": 0.5, "adaptive": {"target": 0.1, "horizon": 10}},
    "entropy": {"entropy_coef": 0.001, "target": 0.5},
}


def algorithm(**fields: Any) -> AlgorithmSection:
    return AlgorithmSection.model_validate(ADAPTIVE | fields)


def run_settings(**fields: Any) -> RunSettings:
    return RunSettings.model_validate(
        smallest_tree(
            Path("/nowhere"),
            sampling={"num_responses": 2, "max_tokens": 4},
            algorithm={"groups_per_batch": 1, "advantage": {"kind": "rloo"}} | fields,
            references={"ref": {}} if "kl" in fields else {},
        )
    )


def group(*rewards: float, truncated: tuple[bool, ...] = (False, False), greedy: float | None = None) -> ScoredGroup:
    rows = tuple(trajectory_pb2.RowRef(id=f"0/{i}", token="w.1-1", num_tokens=4) for i in range(len(rewards)))
    baseline = (
        None
        if greedy is None
        else GreedyResponse(trajectory_pb2.RowRef(id="0/2", token="w.1-1", num_tokens=4), greedy, greedy)
    )
    tokens = np.full(len(rewards), 2, np.int32)
    raw = np.array(rewards, np.float32)
    return ScoredGroup(0, rows, 0, raw, raw, {}, tokens, np.array(truncated), 0.1, 0.0, 0.0, baseline)


def row(reward: float, reference: float = 0.0) -> dict[str, Array]:
    return {
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "response_mask": np.array([0, 0, 1, 1], np.uint8),
        "rollout_logprobs": np.array([0, 0, -0.6, -0.2], np.float32),
        "old_logprobs": np.array([0, 0, -0.5, -0.25], np.float32),
        "ref/logprobs": np.array([0, 0, -0.5 - reference, -0.25], np.float32),
        "reward": np.array([reward], np.float32),
    }


def result_of(**metrics: float) -> list[TrainResult]:
    found = Metrics()
    for name, value in metrics.items():
        found.mean(f"actor/{name}", value)
    return [TrainResult(metrics=found.to_proto())]


@given(
    floats=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=5, max_size=5), num=st.integers(0, 2**40)
)
def test_a_state_comes_back_bit_by_bit(floats: list[float], num: int) -> None:
    state = AdaptiveState(Control(*floats[:3]), Moments(num, *floats[3:]))
    adapting = algorithm(shaping={"normalize": "running"})
    assert AdaptiveState.decode(adapting, state.encode(adapting)) == state


def test_nothing_kept_is_the_start() -> None:
    assert AdaptiveState.decode(algorithm(), b"") == AdaptiveState(Control(0.5, 0.001))


def test_a_coefficient_that_does_not_adapt_is_the_settings_also_when_they_change() -> None:
    kept = AdaptiveState(Control(0.7, 0.003, 0.4), Moments(3, 1.0, 2.0)).encode(
        algorithm(shaping={"normalize": "running"})
    )
    plain = algorithm(kl={"reference": "ref", "kl_coef": 0.2}, entropy={"entropy_coef": 0.01})
    assert AdaptiveState.decode(plain, kept) == AdaptiveState(Control(0.2, 0.01))


@pytest.mark.parametrize(
    "before",
    [{"kl": None, "entropy": None}, {"kl": {"reference": "ref", "kl_coef": 0.2}, "entropy": {"entropy_coef": 0.01}}],
)
def test_what_begins_to_adapt_begins_at_its_settings(before: dict[str, Any]) -> None:
    """A KL coefficient that began at the 0 of a run without KL would stay 0 for ever."""
    kept = AdaptiveState.start(algorithm(**before)).encode(algorithm(**before))
    assert kept == b""
    assert AdaptiveState.decode(algorithm(), kept) == AdaptiveState.start(algorithm())
    half = algorithm(kl=before["kl"])
    assert AdaptiveState.decode(algorithm(), AdaptiveState.start(half).encode(half)).control.kl_coef == 0.5


def test_a_step_moves_the_coefficients_by_what_it_measured() -> None:
    batch = trajectory_pb2.TrainBatch(rows=[trajectory_pb2.RowRef()] * 5)
    state = AdaptiveState.start(algorithm()).after(algorithm(), batch, result_of(reference_kl=1.0, entropy=0.1))
    # KL 10 times its target: the error counts 0.2; 5 responses of a horizon of 10: 0.5 * (1 + 0.2 * 5 / 10). Entropy
    # below its target: one step up.
    assert state.control == Control(0.5 * 1.1, 0.0011, 0.1)
    assert state.after(algorithm(), batch, result_of(reference_kl=float("nan"))).control == state.control, (
        "what is not finite was not measured"
    )


def test_a_step_of_the_critic_alone_moves_no_coefficient() -> None:
    batch = trajectory_pb2.TrainBatch(rows=[trajectory_pb2.RowRef()] * 5, critic_only=True)
    batch.statistics.kl = 0.0  # the policy is the reference: the coefficient would fall to nothing
    state = AdaptiveState.start(algorithm())
    assert state.after(algorithm(), batch, result_of()) == state


def test_the_kl_of_a_reward_is_measured_and_sealed_before_the_step() -> None:
    kl = {
        "reference": "ref",
        "kl_coef": 0.5,
        "estimator": "k1",
        "placement": "reward",
        "adaptive": {"target": 0.1, "horizon": 10},
    }
    settings = run_settings(kl=kl)
    state = AdaptiveState(Control(kl_coef=2.0))
    batch, columns = prepare(settings, 0, [group(1.0, 1.0)], [row(1.0), row(1.0, reference=1.0)], state=state)
    # one of four tokens is a nat less likely to the reference
    assert (batch.coefficients.kl_coef, batch.statistics.kl) == (2.0, 0.25)
    np.testing.assert_allclose([column["advantages"][2] for column in columns], [2.0, -2.0])
    assert state.after(settings.algorithm, batch, result_of()).control.kl_coef == pytest.approx(
        2.0 * (1 + 0.2 * 2 / 10)
    )


def test_other_coefficients_make_another_batch() -> None:
    settings, groups, rows = run_settings(entropy=ADAPTIVE["entropy"]), [group(1.0, 0.0)], [row(1.0), row(0.0)]
    digests = {
        prepare(settings, 0, groups, rows, state=AdaptiveState(Control(0.0, coef)))[0].digest
        for coef in (0.001, 0.001, 0.0015)
    }
    assert len(digests) == 2


def test_rewards_are_normalised_by_those_of_the_run_with_this_batch() -> None:
    settings = run_settings(shaping={"normalize": "running"})
    before = AdaptiveState(Control(), Moments(2, 4.0, 0.0))
    batch, columns = prepare(settings, 0, [group(1.0, 3.0)], [row(1.0), row(3.0)], state=before)
    # All: 4, 4, 1, 3: mean 3, variance (1 + 1 + 4 + 0) / 4 = 1.5. RLOO of two: the difference, 2 / sqrt(1.5).
    np.testing.assert_allclose([column["advantages"][3] for column in columns], [-1.63299, 1.63299], rtol=1e-4)
    assert before.after(settings.algorithm, batch, result_of()).rewards == Moments(4, 3.0, 6.0)
    assert before.rewards == Moments(2, 4.0, 0.0)


def test_a_truncated_response_is_masked_and_its_reward_still_compared_with() -> None:
    settings = run_settings(shaping={"mask_truncated": True})
    _, columns = prepare(settings, 0, [group(1.0, 0.0, truncated=(False, True))], [row(1.0), row(0.0)])
    assert [column["loss_mask"].tolist() for column in columns] == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert [column["advantages"].tolist() for column in columns] == [[0, 0, 1, 1], [0, 0, 0, 0]]


def test_the_overlong_are_punished_after_normalisation_and_the_greedy_response_as_the_others() -> None:
    shaping = {"clip_max": 1.0, "overlong": {"buffer_tokens": 4}}
    settings = run_settings(advantage={"kind": "remax"}, shaping=shaping)
    greedy_row: dict[str, Array] = {
        "response_mask": np.array([0, 0, 1, 1], np.uint8),
        "reward": np.array([9.0], np.float32),
    }
    _, columns = prepare(settings, 0, [group(5.0, 0.0, greedy=9.0)], [row(5.0), row(0.0)], [greedy_row])
    # All three are two tokens long and lose a half; the greedy 9 is clipped to 1.
    np.testing.assert_allclose([column["advantages"][2] for column in columns], [0.0, -1.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shaping": {"overlong": {"buffer_tokens": 5}}}, "exceeds the longest response, 4 tokens"),
        ({"filters": {"max_dropped_per_step": 0}}, "greater than 0"),
        ({"curriculum": {"revisit_epochs": 1}}, "greater than or equal to 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_settings(**fields)
