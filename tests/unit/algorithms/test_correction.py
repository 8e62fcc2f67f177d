"""The off-policy correction against numbers worked by hand and a loop over responses, and the relations it must
keep.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.aggregation import Counts, token_weights
from rolecall.algorithms.correction import correct, weight_sums
from rolecall.algorithms.losses import PolicyBatch
from rolecall.algorithms.losses.ppo import ppo
from rolecall.settings import (
    AlgorithmSection,
    CorrectionSection,
    ImportanceWeight,
    ReinforceLoss,
    Rejection,
)

STRAY = [[1e-15, 1.0, 1.0]]
"""A ratio of e^-34.5 beside two of 1: k2 596.5, k3 33.5, geometric mean 1e-5."""

WEIGHTS: tuple[ImportanceWeight | None, ...] = (
    None,
    ImportanceWeight(),
    ImportanceWeight(cap=None),
    ImportanceWeight(kind="sequence"),
    ImportanceWeight(kind="sequence", cap=None),
    ImportanceWeight(kind="icepop"),
)
REJECTIONS: tuple[Rejection, ...] = (
    Rejection(kind="ratio", over="token", low=0.6, high=1.6),
    Rejection(kind="ratio", over="sequence_mean", low=0.9, high=1.1),
    Rejection(kind="ratio", over="sequence_sum", low=0.5, high=2.0),
    Rejection(kind="ratio", over="sequence_max", low=0.0, high=1.5),
    *(
        Rejection(kind=kind, over=over, high=0.08)
        for kind in ("k2", "k3")
        for over in ("token", "sequence_mean", "sequence_sum", "sequence_max")
    ),
)


def ragged(log_ratios: list[list[float]], masks: list[list[bool]] | None = None) -> tuple[PolicyBatch, torch.Tensor]:
    """A batch whose proximal logprobs are the sampler's plus `log_ratios`, and the sampler's."""
    flat = torch.tensor([x for row in log_ratios for x in row], dtype=torch.float64)
    mask = torch.tensor(
        [x for row in masks or [[True] * len(row) for row in log_ratios] for x in row], dtype=torch.bool
    )
    index = torch.tensor([s for s, row in enumerate(log_ratios) for _ in row])
    sampled = torch.full_like(flat, -1.0)
    return PolicyBatch(sampled + flat, sampled + flat, torch.ones_like(flat), mask, index, len(log_ratios), {}), sampled


def weights_of(
    section: CorrectionSection, ratios: list[list[float]], masks: list[list[bool]] | None = None
) -> list[float]:
    batch, sampled = ragged([[math.log(r) for r in row] for row in ratios], masks)
    return correct(section, batch, sampled).weights_N.tolist()


RATIOS = [[0.4, 1.5, 1.2], [3.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (CorrectionSection(), [0.4, 1.5, 1.2, 2.0, 1, 1]),
        (CorrectionSection(weight=ImportanceWeight(cap=None)), [0.4, 1.5, 1.2, 3.0, 1, 1]),
        (CorrectionSection(weight=ImportanceWeight(kind="sequence")), [0.72, 0.72, 0.72, 2.0, 1, 1]),
        (CorrectionSection(weight=ImportanceWeight(kind="icepop", cap=2.0)), [0, 1.5, 1.2, 0, 1, 1]),
        (CorrectionSection(weight=None), [1, 1, 1, 1, 1, 1]),
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="ratio", over="token", low=0.5, high=1.3),)),
            [0, 0, 1, 0, 1, 1],
        ),
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="ratio", over="sequence_sum", low=0.8, high=1.3),)),
            [0, 0, 0, 0, 1, 1],
        ),
        # 0.72^(1/3) = 0.896
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="ratio", over="sequence_mean", low=0.89, high=1.1),)),
            [1, 1, 1, 0, 1, 1],
        ),
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="ratio", over="sequence_max", low=0.5, high=4.0),)),
            [0, 0, 0, 1, 1, 1],
        ),
        # k2: 0.42, 0.082, 0.017; 0.60. k3: 0.316, 0.095, 0.018; 0.901
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="k2", over="token", high=0.05),)),
            [0, 0, 1, 0, 1, 1],
        ),
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="k2", over="sequence_mean", high=0.2),)),
            [1, 1, 1, 0, 1, 1],
        ),
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="k3", over="sequence_sum", high=0.4),)),
            [0, 0, 0, 0, 1, 1],
        ),
        (
            CorrectionSection(weight=None, reject=(Rejection(kind="k3", over="sequence_max", high=0.4),)),
            [1, 1, 1, 0, 1, 1],
        ),
        (
            CorrectionSection(
                reject=(
                    Rejection(kind="ratio", over="token", low=0.5, high=9.0),
                    Rejection(kind="k3", over="sequence_max", high=0.4),
                )
            ),
            [0, 1.5, 1.2, 0, 1, 1],
        ),
    ],
)
def test_weights_by_hand(section: CorrectionSection, expected: list[float]) -> None:
    """Sources: settings/algorithm/correction.py, each of its sections."""
    assert weights_of(section, RATIOS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        (Rejection(kind="ratio", over="sequence_mean", low=0.9e-5, high=2.0), 1.0),
        (Rejection(kind="ratio", over="sequence_mean", low=1.1e-5, high=2.0), 0.0),
        (Rejection(kind="k2", over="sequence_max", high=590.0), 0.0),
        (Rejection(kind="k3", over="sequence_sum", high=33.0), 0.0),
    ],
)
def test_a_stray_token_counts_whole_in_what_is_asked_of_its_response(rejection: Rejection, kept: float) -> None:
    assert weights_of(CorrectionSection(weight=None, reject=(rejection,)), STRAY) == [kept] * 3


def slow_weight(weight: ImportanceWeight | None, ratio: float, ratios: list[float]) -> float:
    if weight is None:
        return 1.0
    cap = weight.cap or math.inf
    match weight.kind:
        case "token":
            return min(ratio, cap)
        case "sequence":
            return min(math.prod(ratios), cap)
        case "icepop":
            return ratio if weight.low <= ratio <= cap else 0.0


def slow_rejects(rejection: Rejection, ratio: float, ratios: list[float]) -> bool:
    def estimate(r: float) -> float:
        return {"ratio": math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[rejection.kind]

    def out(value: float) -> bool:
        return (
            not rejection.low <= math.exp(value) <= rejection.high
            if rejection.kind == "ratio"
            else value > rejection.high
        )

    values = [estimate(r) for r in ratios]
    match rejection.over:
        case "token":
            return out(estimate(ratio))
        case "sequence_mean":
            return out(sum(values) / len(values))
        case "sequence_sum":
            return out(sum(values))
        case "sequence_max":
            return any(out(value) for value in values)


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@given(LENGTHS, st.integers(0, 2**32 - 1), st.sampled_from(WEIGHTS), st.lists(st.sampled_from(REJECTIONS), max_size=2))
def test_weights_and_rejections_are_those_of_a_loop(
    lengths: list[int], seed: int, weight: ImportanceWeight | None, reject: list[Rejection]
) -> None:
    rng = np.random.default_rng(seed)
    ratios = [np.exp(rng.normal(0, 0.3, n)).tolist() for n in lengths]
    masks = [(rng.random(n) < 0.7).tolist() for n in lengths]
    expected = []
    for row, mask in zip(ratios, masks, strict=True):
        trained = [r for r, flag in zip(row, mask, strict=True) if flag]
        for ratio, flag in zip(row, mask, strict=True):
            kept = flag and not any(slow_rejects(rejection, ratio, trained) for rejection in reject)
            expected.append(slow_weight(weight, ratio, trained) if kept else 0.0)
    np.testing.assert_allclose(
        weights_of(CorrectionSection(weight=weight, reject=tuple(reject)), ratios, masks), expected, rtol=1e-6
    )


@given(LENGTHS, st.integers(0, 2**32 - 1), st.sampled_from(WEIGHTS), st.sampled_from(REJECTIONS), st.data())
def test_the_corrected_loss_does_not_depend_on_how_the_minibatch_is_cut(
    lengths: list[int], seed: int, weight: ImportanceWeight | None, rejection: Rejection, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    leaf, old, sampled, advantages = (torch.from_numpy(rng.normal(-1, 0.3, starts[-1])) for _ in range(4))
    leaf.requires_grad_()
    mask = torch.from_numpy(rng.random(starts[-1]) < 0.6)
    counts = Counts(int(mask.sum()), sum(bool(mask[a:b].any()) for a, b in pairwise(starts)))
    section = CorrectionSection(weight=weight, reject=(rejection,))

    def loss_of(sequences: list[int]) -> torch.Tensor:
        at = torch.from_numpy(np.concatenate([np.arange(starts[s], starts[s + 1]) for s in sequences]))
        index = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([lengths[s] for s in sequences]))
        batch = PolicyBatch(leaf[at], old[at], advantages[at], mask[at], index, len(sequences), {})
        losses_N = (
            ppo(batch, clip_eps_low=0.2, clip_eps_high=0.28).losses_N * correct(section, batch, sampled[at]).weights_N
        )
        return (losses_N * token_weights(mask[at], index, len(sequences), "seq_mean_token_mean", counts)).sum()

    whole = loss_of(list(range(len(lengths))))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {0, len(lengths)})
    parts = torch.stack([loss_of(list(order[a:b])) for a, b in pairwise(cuts)]).sum()
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, leaf), torch.autograd.grad(whole, leaf))


NORMALIZED = [ImportanceWeight(kind=kind, normalize=True) for kind in ("token", "sequence", "icepop")]


def test_normalised_weights_by_hand() -> None:
    """Of RATIOS: tokens weigh 0.4, 1.5, 1.2, 2, 1, 1, in the mean 7.1 / 6; responses 0.72, 2 and 1, in the mean 1.24;
    one that is rejected counts in the mean and raises the weight of no other.
    """
    by_token, by_response = 7.1 / 6, 3.72 / 3
    batch, sampled = ragged([[math.log(r) for r in row] for row in RATIOS])
    out = Rejection(kind="ratio", over="token", low=0.5, high=9.0)
    for weight, mean, expected in (
        (NORMALIZED[0], by_token, [0, 1.5, 1.2, 2.0, 1, 1]),
        (NORMALIZED[1], by_response, [0, 0.72, 0.72, 2.0, 1, 1]),
    ):
        total, num = weight_sums(weight, batch, sampled).tolist()
        assert total / num == pytest.approx(mean)
        corrected = correct(CorrectionSection(weight=weight, reject=(out,)), batch, sampled, total / num)
        assert corrected.weights_N.tolist() == pytest.approx([each / mean for each in expected])


@given(LENGTHS, st.integers(0, 2**32 - 1), st.sampled_from(NORMALIZED), st.data())
def test_the_mean_of_normalised_weights_and_their_loss_do_not_depend_on_how_the_step_is_cut(
    lengths: list[int], seed: int, weight: ImportanceWeight, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    log_ratios = [rng.normal(0, 0.5, n).tolist() for n in lengths]
    masks = [(rng.random(n) < 0.7).tolist() for n in lengths]
    slow = []
    for row, mask in zip(log_ratios, masks, strict=True):
        trained = [math.exp(x) for x, flag in zip(row, mask, strict=True) if flag]
        of_row = [slow_weight(weight, ratio, trained) for ratio in trained]
        slow += of_row[:1] if weight.kind == "sequence" else of_row
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {0, len(lengths)})
    parts = [ragged([log_ratios[s] for s in order[a:b]], [masks[s] for s in order[a:b]]) for a, b in pairwise(cuts)]
    total, num = torch.stack([weight_sums(weight, *part) for part in parts]).sum(0).tolist()
    assert (total, num) == (pytest.approx(sum(slow)), len(slow))
    if total > 0:
        section = CorrectionSection(weight=weight)
        weights = torch.cat([correct(section, *part, total / num).weights_N for part in parts])
        plain = torch.cat([correct(section, *part).weights_N for part in parts])
        torch.testing.assert_close(weights, plain * num / total)
        if weight.kind != "sequence":
            assert float(weights.sum()) == pytest.approx(num), "a mean of 1 over the trained tokens"


def test_an_infinite_cap_is_importance_sampling() -> None:
    """Exact: the expectation over the sampler of the weighted value is the trainer's own expectation, for a token and,
    by product, for two of them.
    """
    sampler, trainer = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64),
    )
    value = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    rows = [[trainer[i], trainer[j]] for i in range(3) for j in range(3)]
    sampled = [[sampler[i], sampler[j]] for i in range(3) for j in range(3)]
    ratios = [[float(t / s) for t, s in zip(*pair, strict=True)] for pair in zip(rows, sampled, strict=True)]
    ones = weights_of(CorrectionSection(weight=ImportanceWeight(cap=None)), [[float(r)] for r in trainer / sampler])
    assert float((sampler * torch.tensor(ones) * value).sum()) == pytest.approx(float((trainer * value).sum()))
    pairs = weights_of(CorrectionSection(weight=ImportanceWeight(kind="sequence", cap=None)), ratios)[::2]
    product = [float(value[i] * value[j] ** 2) for i in range(3) for j in range(3)]
    drawn = sum(float(s[0] * s[1]) * w * v for s, w, v in zip(sampled, pairs, product, strict=True))
    assert drawn == pytest.approx(sum(float(t[0] * t[1]) * v for t, v in zip(rows, product, strict=True)))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_a_response_of_one_token_weighs_the_same_by_token_and_by_sequence(ratios: list[float]) -> None:
    by_token = weights_of(CorrectionSection(weight=ImportanceWeight(cap=3.0)), [[r] for r in ratios])
    assert by_token == weights_of(
        CorrectionSection(weight=ImportanceWeight(kind="sequence", cap=3.0)), [[r] for r in ratios]
    )


def test_weights_carry_no_gradient() -> None:
    batch, sampled = ragged([[0.1, -0.2], [0.3]])
    leaf = batch.logprobs_N.clone().requires_grad_()
    attached = PolicyBatch(leaf, leaf, batch.advantages_N, batch.mask_N, batch.sequence_N, 2, {})
    for weight in WEIGHTS:
        assert not correct(
            CorrectionSection(weight=weight, reject=REJECTIONS), attached, sampled
        ).weights_N.requires_grad


def test_the_gradient_of_a_corrected_loss_passes_gradcheck() -> None:
    batch, sampled = ragged([[0.1, -0.4], [0.3]])
    old = batch.old_logprobs_N

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        moved = PolicyBatch(logprobs, old, batch.advantages_N, batch.mask_N, batch.sequence_N, 2, {})
        return (
            ppo(moved, clip_eps_low=0.2, clip_eps_high=0.28).losses_N
            * correct(CorrectionSection(), moved, sampled).weights_N
        ).sum()

    assert torch.autograd.gradcheck(loss, (old + 0.05).requires_grad_())


def test_what_is_rejected_never_raises_the_weight_of_the_rest() -> None:
    section = CorrectionSection(weight=None, reject=(Rejection(kind="ratio", over="token", low=0.5, high=2.0),))
    batch, sampled = ragged([[0.0, 5.0, 0.0]])
    correction = correct(section, batch, sampled)
    assert correction.weights_N.tolist() == [1, 0, 1]
    assert correction.rejected_N.tolist() == [False, True, False]


def test_a_response_without_a_trained_token_weighs_nothing_and_is_not_rejected() -> None:
    for rejection in REJECTIONS:
        batch, sampled = ragged([[9.0, 9.0], [0.0]], [[False, False], [True]])
        correction = correct(
            CorrectionSection(weight=ImportanceWeight(kind="sequence"), reject=(rejection,)), batch, sampled
        )
        assert correction.weights_N.tolist() == [0, 0, 1]
        assert not correction.rejected_N.any()


def test_bypass_weighs_nothing_twice_and_rejects_by_the_policy_as_it_is() -> None:
    """The proximal policy is the sampler: the loss's own ratio corrects, and a token that the policy has left far
    behind is out.
    """
    sampled = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    policy = torch.tensor([-1.0, -4.0], dtype=torch.float64, requires_grad=True)
    batch = PolicyBatch(
        policy, sampled, torch.ones(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1, {}
    )
    assert correct(CorrectionSection(proximal="bypass"), batch, sampled).weights_N.tolist() == [1, 1]
    banded = CorrectionSection(proximal="bypass", reject=(Rejection(kind="ratio", over="token", low=0.5, high=2.0),))
    assert correct(banded, batch, sampled).weights_N.tolist() == [1, 0]


def test_a_weight_under_bypass_is_refused() -> None:
    for weight in (ImportanceWeight(), ImportanceWeight(normalize=True)):
        with pytest.raises(ValidationError, match="remove weight, or use proximal: recompute"):
            CorrectionSection(proximal="bypass", weight=weight)
    assert CorrectionSection(proximal="bypass", weight=None).weight is None


def test_bypass_of_a_loss_without_a_ratio_is_refused() -> None:
    with pytest.raises(ValidationError, match="policy_loss reinforce has none; use proximal: recompute"):
        AlgorithmSection(
            groups_per_batch=1, policy_loss=ReinforceLoss(), correction=CorrectionSection(proximal="bypass")
        )


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(ValidationError, match="everything would be rejected"):
        Rejection(kind="ratio", over="token", low=2.0, high=1.0)


def test_tokens_are_weighed_unless_a_run_says_otherwise() -> None:
    assert AlgorithmSection(groups_per_batch=1).correction == CorrectionSection(
        weight=ImportanceWeight(cap=2.0), reject=(), proximal="recompute"
    )
    assert AlgorithmSection.model_validate({"groups_per_batch": 1, "correction": None}).correction is None
