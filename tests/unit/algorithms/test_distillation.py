"""Distillation as an advantage and as a loss: worked by hand, against loops, by finite differences, and cut into
pieces.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.distillation import distil
from rolecall.algorithms.kl import kl_N
from rolecall.algorithms.losses.distillation import TAIL_FLOOR, forward_topk_kl_N, reverse_kl_N
from rolecall.wire import Array


def slow_distil(
    task: list[float],
    sampled: list[float],
    taught: list[float],
    mask: list[int],
    coef: float,
    task_coef: float,
    bound: float,
) -> list[float]:
    """The oracle: token after token."""
    advantages = []
    for t, trained in enumerate(mask):
        advantages.append(0.0)
        if trained:
            reverse_kl = min(max(sampled[t] - taught[t], -bound), bound)
            advantages[t] = task_coef * task[t] - coef * reverse_kl
    return advantages


def slow_forward_kl(student: list[float], teacher: list[float]) -> float:
    """The oracle: outcome after outcome, the tail the last."""
    divergence, student_rest, teacher_rest = 0.0, 1.0, 1.0
    for log_s, log_t in zip(student, teacher, strict=True):
        divergence += math.exp(log_t) * (log_t - log_s)
        student_rest -= math.exp(log_s)
        teacher_rest -= math.exp(log_t)
    student_rest, teacher_rest = max(student_rest, TAIL_FLOOR), max(teacher_rest, TAIL_FLOOR)
    return divergence + teacher_rest * math.log(teacher_rest / student_rest)


def test_the_advantage_of_a_hand_worked_row() -> None:
    """Three sampled tokens behind a prompt token: liked as much by both, less by the teacher, more by the teacher."""
    sampled, taught = np.log([1.0, 0.5, 0.8, 0.1]), np.log([1.0, 0.5, 0.2, 0.4])
    (pure,) = distil([np.array([0.0, 9, 9, 9])], [sampled], [taught], [np.array([0, 1, 1, 1])], coef=1.0, task_coef=0.0)
    np.testing.assert_allclose(pure, [0, 0, -math.log(4), math.log(4)], atol=1e-12)
    (mixed,) = distil(
        [np.array([0.0, 1, 1, -1])], [sampled], [taught], [np.array([0, 1, 1, 0])], coef=0.5, task_coef=2.0
    )
    np.testing.assert_allclose(mixed, [0, 2, 2 - math.log(2), 0], atol=1e-12)


BOUNDS = st.none() | st.floats(0.1, 3)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.floats(0, 3),
    st.floats(0, 3),
    BOUNDS,
    st.integers(0, 2**31),
)
def test_the_advantage_agrees_with_a_loop_over_tokens(
    lengths: list[int], coef: float, task_coef: float, bound: float | None, seed: int
) -> None:
    """Rows of any lengths, some wholly masked, some empty."""
    rng = np.random.default_rng(seed)
    task, sampled, taught = ([rng.normal(size=n) for n in lengths] for _ in range(3))
    masks: list[Array] = [rng.integers(0, 2, n).astype(np.uint8) * int(rng.integers(0, 4) > 0) for n in lengths]
    made = distil(task, sampled, taught, masks, coef=coef, task_coef=task_coef, max_log_ratio=bound)
    for row, advantage in enumerate(made):
        expected = slow_distil(
            task[row].tolist(),
            sampled[row].tolist(),
            taught[row].tolist(),
            masks[row].tolist(),
            coef,
            task_coef,
            math.inf if bound is None else bound,
        )
        assert advantage.dtype == np.float64
        np.testing.assert_allclose(advantage, expected, atol=1e-6)


def test_a_teacher_that_is_the_sampler_leaves_the_task_alone_and_stays_float32() -> None:
    logprobs, task = np.array([0, -1, -2], np.float32), np.array([0, 0.5, 0.5], np.float32)
    (advantage,) = distil([task], [logprobs], [logprobs], [np.array([0, 1, 1], np.uint8)], coef=3.0, task_coef=1.0)
    assert advantage.dtype == np.float32
    np.testing.assert_array_equal(advantage, task)


def test_the_advantage_is_the_gradient_of_the_reverse_kl_on_average() -> None:
    """REINFORCE with it, in expectation over the policy's own tokens, descends KL(policy || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    sampled, mask = log_p.detach().numpy(), np.ones(5, np.uint8)
    (advantage,) = distil([np.zeros(5)], [sampled], [teacher.numpy()], [mask], coef=1.0, task_coef=0.0)
    ascended = (log_p.exp().detach() * torch.from_numpy(advantage) * log_p).sum()  # every token, by its probability
    divergence = (log_p.exp() * (log_p - teacher)).sum()
    (gained,), (paid,) = (
        torch.autograd.grad(ascended, logits, retain_graph=True),
        torch.autograd.grad(divergence, logits),
    )
    torch.testing.assert_close(gained, -paid, rtol=1e-12, atol=1e-12)


def slow_reverse_kl(policy: float, teacher: float, bound: float) -> tuple[float, float]:
    """The oracle: the value of a token, and its derivative by the policy's logprob: the slope, by differences, of
    (log ratio)^2 / 2 that goes on straight beyond the bound (Huber's loss).
    """

    def huber(x: float) -> float:
        return x * x / 2 if abs(x) <= bound else bound * (abs(x) - bound / 2)

    step = 1e-6
    ratio = policy - teacher
    return max(-bound, min(ratio, bound)), (huber(ratio + step) - huber(ratio - step)) / (2 * step)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=6), BOUNDS)
def test_the_reverse_kl_agrees_with_a_loop_and_keeps_its_gradient_beyond_the_bound(
    tokens: list[tuple[float, float]], bound: float | None
) -> None:
    policy, teacher = (torch.tensor(each, dtype=torch.float64) for each in zip(*tokens, strict=True))
    losses = reverse_kl_N(policy.requires_grad_(), teacher, bound)
    (slopes,) = torch.autograd.grad(losses.sum(), policy)
    for token, (log_p, log_t) in enumerate(tokens):
        value, slope = slow_reverse_kl(log_p, log_t, math.inf if bound is None else bound)
        assert float(losses[token].detach()) == pytest.approx(value)
        assert float(slopes[token]) == pytest.approx(slope, abs=1e-5)
    if bound is None:
        estimate = kl_N(policy, teacher, "k1", "k2")
        torch.testing.assert_close(losses, estimate)
        torch.testing.assert_close(slopes, *torch.autograd.grad(estimate.sum(), policy))


def test_one_token_that_the_teacher_thinks_impossible_pulls_no_harder_than_the_bound() -> None:
    sampled, taught, mask = np.log([0.9, 0.5]), np.array([math.log(0.9), -40.0]), np.ones(2, np.uint8)
    (free,) = distil([np.zeros(2)], [sampled], [taught], [mask], coef=1.0, task_coef=0.0)
    (held,) = distil([np.zeros(2)], [sampled], [taught], [mask], coef=1.0, task_coef=0.0, max_log_ratio=10.0)
    np.testing.assert_allclose(free, [0, math.log(2) - 40], atol=1e-12)
    np.testing.assert_allclose(held, [0, -10], atol=1e-12)


def test_the_forward_kl_of_hand_worked_tokens() -> None:
    """Teacher 0.5, 0.25 and a tail of 0.25 against 0.25, 0.25, 0.5: 0.5 log 2 - 0.25 log 2. Against itself: 0."""
    teacher = torch.tensor([[0.5, 0.25], [0.5, 0.25]], dtype=torch.float64).log()
    student = torch.tensor([[0.25, 0.25], [0.5, 0.25]], dtype=torch.float64).log()
    torch.testing.assert_close(
        forward_topk_kl_N(student, teacher),
        torch.tensor([0.25 * math.log(2), 0.0], dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )


def distributions(seed: int, num_tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(num_tokens, vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    return student, teacher.log_softmax(1)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 9), st.integers(1, 8))
def test_the_forward_kl_agrees_with_a_loop_and_lies_between_0_and_the_whole_kl(
    seed: int, num_tokens: int, vocab: int, k: int
) -> None:
    student_NV, teacher_NV = distributions(seed, num_tokens, vocab)
    student_NV = student_NV.log_softmax(1)
    top = teacher_NV.topk(min(k, vocab - 1), 1)
    losses = forward_topk_kl_N(student_NV.gather(1, top.indices), top.values)
    for token in range(num_tokens):
        expected = slow_forward_kl(student_NV[token, top.indices[token]].tolist(), top.values[token].tolist())
        assert float(losses[token]) == pytest.approx(expected, abs=1e-6)
    whole = (teacher_NV.exp() * (teacher_NV - student_NV)).sum(1)
    assert bool((losses > -1e-5).all())
    assert bool((losses < whole + 1e-5).all())


def test_the_forward_kl_passes_gradcheck_and_its_gradient_is_that_of_the_whole_kl_on_the_teachers_ids() -> None:
    student_NV, teacher_NV = distributions(1, 4, 7)
    logits = student_NV.requires_grad_()
    top = teacher_NV.topk(3, 1)
    assert torch.autograd.gradcheck(
        lambda z: forward_topk_kl_N(z.log_softmax(1).gather(1, top.indices), top.values), (logits,)
    )
    (coarse,) = torch.autograd.grad(
        forward_topk_kl_N(logits.log_softmax(1).gather(1, top.indices), top.values).sum(), logits
    )
    expected = (logits.softmax(1) - teacher_NV.exp()).gather(1, top.indices)
    torch.testing.assert_close(coarse.gather(1, top.indices), expected.detach(), rtol=1e-10, atol=1e-10)


def test_a_policy_whose_whole_mass_is_on_the_teachers_ids_has_a_finite_loss_and_gradient() -> None:
    logits = torch.tensor([[60.0, 0.0, -60.0, -60.0]], requires_grad=True)
    teacher = torch.tensor([[0.6, 0.3]]).log()
    loss = forward_topk_kl_N(logits.log_softmax(1)[:, :2], teacher).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert math.isfinite(float(loss.detach()))
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) < 2


def test_tokens_that_are_not_scored_are_zeros_on_both_sides_and_stay_finite() -> None:
    zeros = torch.zeros(2, 3, requires_grad=True)
    loss = forward_topk_kl_N(zeros, torch.zeros(2, 3))
    (gradient,) = torch.autograd.grad((loss * 0.0).sum(), zeros)
    assert bool(loss.isfinite().all())
    assert not gradient.any()
