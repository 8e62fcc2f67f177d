"""Blocked logprobs and entropy against log_softmax over whole logits, and their hand-written gradient against finite
differences.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo
from torch.utils._python_dispatch import TorchDispatchMode

from rolecall.training.model.logits.logprobs import VocabShard, Wanted, distribution, logprobs_and_entropy


def inputs(dtype: torch.dtype, num_tokens: int = 7, hidden: int = 5, vocab: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(num_tokens, hidden, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    temperature = torch.rand(num_tokens, generator=generator) + 0.5
    return hidden_states, weight, targets, temperature


def several_targets(targets: torch.Tensor, vocab: int = 11) -> torch.Tensor:
    """The target, the same again, and two others."""
    return torch.stack([targets, targets, (targets + 3) % vocab, (targets + 7) % vocab], 1)


def oracle(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    log_p = (logits.float() / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("block_elements", [1, 21, 35, 1000])
def test_any_blocks_agree_with_the_whole_logits_forward_and_backward(
    block_elements: int, num_tokens: int, cap: float | None
) -> None:
    """Tokens fewer and more than the hidden size: all, some and none of the logits are kept in the memory of the
    weight's gradient.
    """
    hidden, weight, targets, temperature = inputs(torch.float32, num_tokens)
    ours = logprobs_and_entropy(hidden, weight, targets, temperature, cap=cap, block_elements=block_elements)
    theirs = oracle(hidden, weight, targets, temperature, cap)
    mixture = torch.linspace(-1, 1, num_tokens)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((theirs[0] * mixture + theirs[1] * mixture.flip(0)).sum(), (hidden, weight))
    for again in (True, False):
        gradients = torch.autograd.grad(
            (ours[0] * mixture + ours[1] * mixture.flip(0)).sum(), (hidden, weight), retain_graph=again
        )
        for gradient, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("read", [0, 1])
def test_a_loss_may_read_one_of_the_two_outputs(read: int) -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    ours = logprobs_and_entropy(hidden, weight, targets, temperature, block_elements=28)[read]
    theirs = oracle(hidden, weight, targets, temperature)[read]
    mixture = torch.linspace(-1, 1, len(targets))
    gradients = (torch.autograd.grad((each * mixture).sum(), (hidden, weight)) for each in (ours, theirs))
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("entropy", [True, False])
def test_the_hand_written_backward_passes_gradcheck(entropy: bool, cap: float | None) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)

    def outputs(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs, entropies = logprobs_and_entropy(
            h, w, targets, temperature.double(), entropy=entropy, cap=cap, block_elements=28
        )
        return (logprobs, entropies) if entropy else (logprobs,)

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the columns of every product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.columns.append(result.shape[1])
        return result


def test_rows_of_logits_are_aligned_whatever_the_number_of_tokens() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32, num_tokens=7, hidden=5, vocab=1000)
    with Products() as products, torch.no_grad():
        logprobs_and_entropy(hidden, weight, targets, temperature, block_elements=7 * 300)
    assert products.columns == [256, 256, 256, 232]


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 6.0])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "float32_logits"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_kernels_compute_what_the_operators_do(
    dtype: torch.dtype, float32_logits: bool, num_targets: int, entropy: bool, cap: float | None
) -> None:
    """Blocks of more columns than a program holds, of fewer, and of all; the operators on the CPU."""
    hidden, weight, targets, temperature = inputs(dtype, num_tokens=37, hidden=64, vocab=9001)
    if num_targets > 1:
        targets = torch.stack([targets, targets, (targets + 4321) % 9001], 1)
    above = [torch.randn(targets.shape), torch.randn(37)][: 1 + entropy]

    def both(device: torch.device, block_elements: int | None) -> list[torch.Tensor]:
        inner, outer = (each.detach().to(device).requires_grad_() for each in (hidden, weight))
        outputs = logprobs_and_entropy(
            inner,
            outer,
            targets.to(device),
            temperature.to(device),
            entropy=entropy,
            cap=cap,
            float32_logits=float32_logits,
            block_elements=block_elements,
        )
        given = [each.to(device) for each in above]
        gradients = torch.autograd.grad(outputs[: 1 + entropy], (inner, outer), given)
        return [each.detach().cpu().double() for each in (*outputs, *gradients)]

    theirs = both(torch.device("cpu"), None)
    for block_elements in (None, 37 * 128, 37 * 5001):
        ours = both(torch.device("cuda", torch.cuda.current_device()), block_elements)
        for mine, reference in zip(ours, theirs, strict=True):
            gap = (mine - reference).norm() / reference.norm().clamp(min=1e-9)
            assert float(gap) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_bfloat16_computes_its_softmax_in_float32(cap: float | None) -> None:
    """And a soft cap step by step in bfloat16, as samplers do."""
    hidden, weight, targets, temperature = inputs(torch.bfloat16)
    ours = logprobs_and_entropy(hidden, weight, targets, temperature, cap=cap)
    theirs = oracle(hidden, weight, targets, temperature, cap)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(ours[0].sum(), weight)
    (expected,) = torch.autograd.grad(theirs[0].sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)


def test_float32_logits_of_bfloat16_inputs_are_not_rounded() -> None:
    """In bfloat16 logits of 16 and more are up to 0.06 off."""
    hidden, weight, targets, temperature = inputs(torch.bfloat16, num_tokens=64, hidden=32, vocab=300)
    weight = (weight.detach() * 2).requires_grad_()
    exact = oracle(hidden.float(), weight.float(), targets, temperature)
    mixture = torch.linspace(-1, 1, 64)
    for block_elements in (1000, 100_000):
        wide = logprobs_and_entropy(
            hidden, weight, targets, temperature, float32_logits=True, block_elements=block_elements
        )
        rounded = logprobs_and_entropy(hidden, weight, targets, temperature, block_elements=block_elements)
        for ours, theirs in zip(wide, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert float((rounded[0] - exact[0]).detach().abs().max()) > 0.02
        expected = torch.autograd.grad((exact[0] * mixture + exact[1]).sum(), (hidden, weight), retain_graph=True)
        for gradient, reference in zip(
            torch.autograd.grad((wide[0] * mixture + wide[1]).sum(), (hidden, weight)), expected, strict=True
        ):
            assert gradient.dtype == torch.bfloat16
            assert float((gradient - reference).norm() / reference.norm()) < 0.01
        said = distribution(
            hidden, weight, targets, temperature, Wanted(top_k=3), float32_logits=True, block_elements=block_elements
        )
        torch.testing.assert_close(said.logprobs_M, exact[0], rtol=1e-5, atol=1e-5)


def test_no_scored_token_gives_empty_outputs_and_zero_gradients() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    logprobs, _ = logprobs_and_entropy(hidden[:0], weight, targets[:0], temperature[:0])
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    assert logprobs.shape == (0,)
    assert not gradient.any()


def test_entropy_is_zeros_unless_asked_for() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    assert not logprobs_and_entropy(hidden, weight, targets, temperature, entropy=False)[1].any()


def test_temperature_flattens_the_distribution() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    cold, hot = (logprobs_and_entropy(hidden, weight, targets, torch.full((7,), t))[1] for t in (0.5, 2.0))
    assert bool((hot > cold).all())


def test_a_frozen_output_layer_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    whole = torch.autograd.grad(logprobs_and_entropy(hidden, weight, targets, temperature)[0].sum(), hidden)[0]
    frozen = torch.autograd.grad(logprobs_and_entropy(hidden, weight.detach(), targets, temperature)[0].sum(), hidden)[
        0
    ]
    assert torch.equal(frozen, whole)


def test_extreme_logits_and_a_block_that_holds_almost_nothing_stay_finite() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    hidden, weight = (hidden.detach() * 100).requires_grad_(), weight.detach().requires_grad_()
    ours = logprobs_and_entropy(hidden, weight, targets, temperature, block_elements=7)
    theirs = oracle(hidden, weight, targets, temperature)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-4)
    gradients = torch.autograd.grad((ours[0] + ours[1]).sum(), (hidden, weight))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("cuts", [(0, 11), (0, 6, 11), (0, 6, 11, 11), (0, 1, 2, 10, 11)])
@pytest.mark.parametrize(("entropy", "cap"), [(True, None), (False, None), (True, 1.5)])
def test_ranks_that_share_the_vocabulary_agree_with_one_that_has_it_all(
    cuts: tuple[int, ...], entropy: bool, cap: float | None
) -> None:
    """Each rank is a thread with a Gloo group of its own; parts are uneven, one may be empty."""
    hidden, weight, targets, temperature = inputs(torch.float64)
    mixture = torch.linspace(-1, 1, 7, dtype=torch.float64)
    store, world_size = HashStore(), len(cuts) - 1

    def run(weight_VH: torch.Tensor, vocab: VocabShard | None) -> list[torch.Tensor]:
        h, w = hidden.detach().clone().requires_grad_(), weight_VH.detach().clone().requires_grad_()
        outputs = logprobs_and_entropy(
            h, w, targets, temperature, entropy=entropy, vocab=vocab, cap=cap, block_elements=21
        )
        gradients = torch.autograd.grad((outputs[0] * mixture + outputs[1] * mixture.flip(0)).sum(), (h, w))
        return [*(output.detach() for output in outputs), *gradients]

    def rank(number: int) -> list[torch.Tensor]:
        # all_reduce takes the bare back end, too
        group = cast(dist.ProcessGroup, ProcessGroupGloo(store, number, world_size, timedelta(seconds=30)))
        return run(weight[cuts[number] : cuts[number + 1]], VocabShard(group, cuts[number]))

    whole = run(weight, None)
    with ThreadPoolExecutor(world_size) as ranks:
        parts = list(ranks.map(rank, range(world_size)))
    for logprobs, entropies, grad_hidden, _ in parts:
        for mine, reference in zip((logprobs, entropies, grad_hidden), whole[:3], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[3] for part in parts]), whole[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block_elements", [1, 21, 35, 1000])
def test_several_targets_of_a_token_get_the_logprobs_and_gradients_of_whole_logits(block_elements: int) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)
    temperature, targets_MK = temperature.double(), several_targets(targets)
    logprobs, entropies = logprobs_and_entropy(hidden, weight, targets_MK, temperature, block_elements=block_elements)
    log_p = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    mixture = torch.linspace(-1, 1, targets_MK.numel(), dtype=torch.float64).view(targets_MK.shape)
    expected = (log_p.gather(1, targets_MK) * mixture).sum() - (log_p.exp() * log_p).sum()
    torch.testing.assert_close((logprobs * mixture).sum() + entropies.sum(), expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((logprobs * mixture).sum() + entropies.sum(), (hidden, weight))
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entropy", [True, False])
def test_the_backward_of_several_targets_passes_gradcheck(entropy: bool) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)

    def outputs(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs, entropies = logprobs_and_entropy(
            h, w, several_targets(targets), temperature.double(), entropy=entropy, block_elements=28
        )
        return (logprobs, entropies) if entropy else (logprobs,)

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


@pytest.mark.parametrize("block_elements", [1, 21, 35, 1000])
@pytest.mark.parametrize("num_ids", [None, 6])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_ranking_and_the_squares_are_those_of_the_whole_softmax(
    block_elements: int, num_ids: int | None, cap: float | None
) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)
    wanted = Wanted(top_k=4, num_ids=num_ids, squares=True)
    ours = distribution(hidden, weight, targets, temperature.double(), wanted, cap=cap, block_elements=block_elements)
    logits = hidden @ weight.T if cap is None else cap * torch.tanh(hidden @ weight.T / cap)
    log_p = (logits / temperature.double()[:, None]).log_softmax(-1).detach()
    top = log_p[:, :num_ids].topk(4, 1)
    assert torch.equal(ours.top_ids_Mk, top.indices)
    torch.testing.assert_close(ours.top_logprobs_Mk, top.values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.sum_squared_probs_M, log_p.exp().square().sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.logprobs_M, log_p.gather(1, targets[:, None])[:, 0], rtol=1e-12, atol=1e-12)


def test_no_scored_token_has_an_empty_ranking() -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    ours = distribution(hidden[:0], weight, targets[:0], temperature[:0], Wanted(top_k=3, squares=True))
    assert ours.top_ids_Mk.shape == ours.top_logprobs_Mk.shape == (0, 3)
    assert ours.sum_squared_probs_M.shape == (0,)


@pytest.mark.parametrize("cuts", [(0, 11), (0, 6, 11), (0, 6, 11, 11), (0, 1, 2, 10, 11)])
def test_ranks_that_share_the_vocabulary_rank_it_together(cuts: tuple[int, ...]) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)
    targets_MK, store, world_size = several_targets(targets), HashStore(), len(cuts) - 1
    mixture = torch.linspace(-1, 1, targets_MK.numel(), dtype=torch.float64).view(targets_MK.shape)

    def run(weight_VH: torch.Tensor, vocab: VocabShard | None) -> list[torch.Tensor]:
        h, w = hidden.detach().clone().requires_grad_(), weight_VH.detach().clone().requires_grad_()
        logprobs, _ = logprobs_and_entropy(h, w, targets_MK, temperature, vocab=vocab, block_elements=21)
        (gradient,) = torch.autograd.grad((logprobs * mixture).sum(), h)
        ranked = distribution(h, w, targets, temperature, Wanted(top_k=3, squares=True), vocab=vocab, block_elements=21)
        return [logprobs.detach(), gradient, *vars(ranked).values()]

    def rank(number: int) -> list[torch.Tensor]:
        group = cast(dist.ProcessGroup, ProcessGroupGloo(store, number, world_size, timedelta(seconds=30)))
        return run(weight[cuts[number] : cuts[number + 1]], VocabShard(group, cuts[number]))

    whole = run(weight, None)
    with ThreadPoolExecutor(world_size) as ranks:
        for part in ranks.map(rank, range(world_size)):
            for mine, reference in zip(part, whole, strict=True):
                torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
