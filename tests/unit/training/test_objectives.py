"""The configured objective against its pieces, and the metrics it brings."""

import math
from typing import Literal

import numpy as np
import pytest
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.settings import (
    AlgorithmSection,
    CorrectionSection,
    DistillationSection,
    ImportanceWeight,
    KlSection,
    Rejection,
)
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.objective.objectives import PolicyObjective, ValueObjective, policy_columns
from rolecall.training.packing.pack import pack
from rolecall.v1.trajectory_pb2 import Coefficients
from rolecall.wire import Array

CPU = torch.device("cpu")


def microbatch(**columns: list[float]) -> Microbatch:
    """One sequence: a prompt token and two sampled ones, the second of them not trained on unless said."""
    row: dict[str, Array] = {
        "token_ids": np.array([5, 6, 7], np.int32),
        "response_mask": np.array([0, 1, 1], np.uint8),
        "loss_mask": np.array([0, 1, 1], np.uint8),
    }
    row |= {name: np.array(values, np.float32) for name, values in columns.items()}
    return pack([row], ["loss_mask", *columns], temperature=1.0, device=CPU)


def outputs(*logprobs: float) -> TokenOutputs:
    return TokenOutputs(torch.tensor(logprobs), torch.tensor([0.0, 2.0, 4.0]))


def test_the_objective_adds_correction_entropy_and_reference_kl() -> None:
    algorithm = AlgorithmSection(
        groups_per_batch=1,
        kl=KlSection(reference="ref", kl_coef=0.5, estimator="k1"),
        correction=CorrectionSection(weight=ImportanceWeight(cap=2.0)),
    )
    columns: dict[str, list[float]] = {
        "advantages": [0, 1, -1],
        "old_logprobs": [0, -1, -2],
        "rollout_logprobs": [0, -1, -9],
        "ref/logprobs": [0, -1.5, -2.5],
    }
    loss, metrics = PolicyObjective(algorithm, Counts(2, 1), Coefficients(kl_coef=0.5, entropy_coef=0.1), 1)(
        microbatch(**columns), outputs(0, -1, -2)
    )
    # ratio 1 on both: token losses -1 * 1 and +1 * 2 (capped weight), then entropy 0.1 * 3 and KL 0.5 * 0.5
    assert float(loss) == pytest.approx((-1 + 2) / 2 - 0.3 + 0.25)
    values = metrics.values()
    assert values["actor/policy_loss"] == pytest.approx(0.5)
    assert values["actor/entropy"] == pytest.approx(3.0)
    assert values["actor/reference_kl"] == pytest.approx(0.5)
    assert values["actor/correction_weight"] == pytest.approx(1.5)
    assert "ref/logprobs" in policy_columns(algorithm)


def test_without_old_logprobs_the_policy_is_compared_with_itself() -> None:
    logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    objective = PolicyObjective(AlgorithmSection(groups_per_batch=1, correction=None), Counts(2, 1), Coefficients(), 1)
    loss, metrics = objective(
        microbatch(advantages=[0, 1, 3], rollout_logprobs=[0, -1.5, -2]), TokenOutputs(logprobs, torch.zeros(3))
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5, -1.5]
    assert metrics.values()["actor/ratio"] == 1.0
    assert metrics.values()["actor/sampler_kl"] == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2, rel=1e-5)


def test_bypass_with_one_minibatch_is_ppo_against_the_sampler() -> None:
    rows: dict[str, list[float]] = {"advantages": [0, 1, -3], "rollout_logprobs": [0, -1.2, -1.9]}
    gradients = []
    against = {**rows, "old_logprobs": rows["rollout_logprobs"]}
    # the proximal policy is the policy: the weight is the ratio, while no clip binds
    weighed = CorrectionSection(weight=ImportanceWeight(cap=None))
    for correction, columns in ((CorrectionSection(proximal="bypass"), against), (None, against), (weighed, rows)):
        logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
        objective = PolicyObjective(
            AlgorithmSection(groups_per_batch=1, correction=correction), Counts(2, 1), Coefficients(), 1
        )
        loss, _ = objective(microbatch(**columns), TokenOutputs(logprobs, torch.zeros(3)))
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])
    assert gradients[0][1] == pytest.approx(-math.exp(0.2) / 2)


@pytest.mark.parametrize(("gradient", "slope"), [("estimator", 1.0), ("k2", 0.5)])
def test_the_kl_term_has_the_gradient_it_is_given(gradient: Literal["estimator", "k2"], slope: float) -> None:
    algorithm = AlgorithmSection(
        groups_per_batch=1, kl=KlSection(reference="ref", kl_coef=0.5, estimator="k1", gradient=gradient)
    )
    columns: dict[str, list[float]] = {
        "advantages": [0, 0, 0],
        "rollout_logprobs": [0, -1, -2],
        "ref/logprobs": [0, -1.5, -2.5],
    }
    logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    loss, metrics = PolicyObjective(algorithm, Counts(2, 1), Coefficients(kl_coef=0.3), 1)(
        microbatch(**columns), TokenOutputs(logprobs, torch.zeros(3))
    )
    (given,) = torch.autograd.grad(loss, logprobs)
    assert given.tolist() == pytest.approx([0.0, 0.3 * slope / 2, 0.3 * slope / 2])
    assert metrics.values()["actor/reference_kl"] == pytest.approx(0.5)


def test_a_teachers_reverse_kl_has_the_gradient_of_the_kl() -> None:
    """Value log(policy / teacher) of the sampled token, whose own gradient is 0 on average; so the gradient is k2's,
    log(policy / teacher) d log policy.
    """
    algorithm = AlgorithmSection(
        groups_per_batch=1, distillation=DistillationSection(teacher="wise", placement="loss", coef=0.3)
    )
    columns: dict[str, list[float]] = {
        "advantages": [0, 0, 0],
        "rollout_logprobs": [0, -1, -2],
        "teacher/logprobs": [0, -1.5, -1.0],
    }
    logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    loss, metrics = PolicyObjective(algorithm, Counts(2, 1), Coefficients(), 1)(
        microbatch(**columns), TokenOutputs(logprobs, torch.zeros(3))
    )
    (given,) = torch.autograd.grad(loss, logprobs)
    assert given.tolist() == pytest.approx([0.0, 0.3 * 0.5 / 2, -0.3 * 1.0 / 2])
    assert float(loss.detach()) == pytest.approx(0.3 * (0.5 - 1.0) / 2)
    assert metrics.values()["actor/teacher_kl"] == pytest.approx(-0.25)


def test_a_token_far_from_the_teacher_is_held_and_still_pulls() -> None:
    algorithm = AlgorithmSection(
        groups_per_batch=1, distillation=DistillationSection(teacher="wise", placement="loss", max_log_ratio=2.0)
    )
    columns: dict[str, list[float]] = {
        "advantages": [0, 0, 0],
        "rollout_logprobs": [0, -1, -2],
        "teacher/logprobs": [0, -1.5, -32.0],
    }
    logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    loss, metrics = PolicyObjective(algorithm, Counts(2, 1), Coefficients(), 1)(
        microbatch(**columns), TokenOutputs(logprobs, torch.zeros(3))
    )
    (given,) = torch.autograd.grad(loss, logprobs)
    assert given.tolist() == pytest.approx([0.0, 0.5 / 2, 2.0 / 2])
    assert metrics.values()["actor/teacher_kl"] == pytest.approx((0.5 + 2.0) / 2)


def test_what_is_rejected_is_counted_by_token_and_by_response() -> None:
    correction = CorrectionSection(reject=(Rejection(kind="ratio", over="token", low=0.5, high=2.0),))
    objective = PolicyObjective(
        AlgorithmSection(groups_per_batch=1, correction=correction), Counts(2, 1), Coefficients(), 1
    )
    for rollout, tokens, responses in (([0.0, -1.0, -9.0], 0.5, 0.0), ([0.0, -9.0, -9.0], 1.0, 1.0)):
        _, metrics = objective(microbatch(advantages=[0, 1, 3], rollout_logprobs=rollout), outputs(0, -1, -2))
        assert metrics.values()["actor/rejected_tokens"] == tokens
        assert metrics.values()["actor/rejected_sequences"] == responses


def test_a_kl_that_shapes_rewards_asks_the_trainer_for_nothing() -> None:
    algorithm = AlgorithmSection(groups_per_batch=1, kl=KlSection(reference="ref", kl_coef=0.5, placement="reward"))
    assert policy_columns(algorithm) == ("loss_mask", "advantages", "rollout_logprobs", "old_logprobs")


def test_the_value_objective_averages_over_the_global_tokens() -> None:
    columns = microbatch(values=[0, 0, 0], returns=[0, 1, 3])
    loss, metrics = ValueObjective(None, Counts(4, 2))(
        columns, ValueOutputs(torch.tensor([0.0, 2.0, 2.0]), torch.zeros(1))
    )
    assert float(loss) == pytest.approx(0.5 * (1 + 1) / 4)
    assert metrics.values()["critic/error"] == pytest.approx(0.0)
    assert metrics.values()["critic/return"] == pytest.approx(2.0)


def test_a_microbatch_without_trained_tokens_adds_nothing() -> None:
    empty = microbatch(advantages=[0, 0, 0], rollout_logprobs=[0, -1, -1])
    untrained = Microbatch(
        **{**vars(empty), "columns": {**empty.columns, "loss_mask": torch.zeros(3, dtype=torch.bool)}}
    )
    loss, metrics = PolicyObjective(AlgorithmSection(groups_per_batch=1), Counts(2, 1), Coefficients(), 1)(
        untrained, outputs(0, -1, -2)
    )
    assert float(loss) == 0.0
    assert "actor/ratio" not in metrics.values()
