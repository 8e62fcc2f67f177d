"""Chunked logprobs and entropy against log_softmax over whole logits, and their hand-written gradient against finite differences."""

import pytest
import torch

from rolecall.training.logprobs import logprobs_and_entropy


def inputs(dtype: torch.dtype, num_tokens: int = 7, hidden: int = 5, vocab: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(num_tokens, hidden, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    temperature = torch.rand(num_tokens, generator=generator) + 0.5
    return hidden_states, weight, targets, temperature


def oracle(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T).float() / temperature[:, None]
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_any_chunking_agrees_with_the_whole_logits_forward_and_backward(chunk_tokens: int) -> None:
    hidden, weight, targets, temperature = inputs(torch.float32)
    ours = logprobs_and_entropy(hidden, weight, targets, temperature, chunk_elements=11 * chunk_tokens)
    theirs = oracle(hidden, weight, targets, temperature)
    mixture = torch.linspace(-1, 1, 7)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((ours[0] * mixture + ours[1] * mixture.flip(0)).sum(), (hidden, weight))
    expected = torch.autograd.grad((theirs[0] * mixture + theirs[1] * mixture.flip(0)).sum(), (hidden, weight))
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entropy", [True, False])
def test_the_hand_written_backward_passes_gradcheck(entropy: bool) -> None:
    hidden, weight, targets, temperature = inputs(torch.float64)

    def outputs(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs, entropies = logprobs_and_entropy(h, w, targets, temperature.double(), entropy=entropy, chunk_elements=33)
        return (logprobs, entropies) if entropy else (logprobs,)

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_bfloat16_computes_its_softmax_in_float32() -> None:
    hidden, weight, targets, temperature = inputs(torch.bfloat16)
    ours = logprobs_and_entropy(hidden, weight, targets, temperature)
    theirs = oracle(hidden, weight, targets, temperature)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(ours[0].sum(), weight)
    (expected,) = torch.autograd.grad(theirs[0].sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)


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
