"""What sampler and trainer disagree by, against numbers worked by hand and a loop, however the batch is cut."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.correction.mismatch import Mismatch, MismatchSums, mismatch, mismatch_sums, spread


def measured(
    sampler: list[list[float]], trainer: list[list[float]], masks: list[list[bool]] | None = None
) -> Mismatch | None:
    """Of ragged probabilities."""
    index = torch.tensor([s for s, row in enumerate(sampler) for _ in row])
    sampled, trained = (
        torch.tensor([p for row in rows for p in row], dtype=torch.float64).log() for rows in (sampler, trainer)
    )
    mask = torch.tensor(
        [flag for row in masks or [[True] * len(row) for row in sampler] for flag in row], dtype=torch.bool
    )
    return mismatch(mismatch_sums(sampled, trained, mask, index, len(sampler)))


def test_mismatch_by_hand() -> None:
    """Two responses: probabilities (1/2, 1/4) and (1/2) of the sampler, (1/4, 1/4) and (1) of the trainer; ratios 1/2,
    1, 2; of responses 1/2, 2.
    """
    result = measured([[0.5, 0.25], [0.5]], [[0.25, 0.25], [1.0]])
    assert result is not None
    assert result.kl_k1 == pytest.approx(0.0, abs=1e-12)  # ln 2 + 0 - ln 2
    assert result.kl == pytest.approx((0.5 - 1 + math.log(2) + 0 + 2 - 1 - math.log(2)) / 3)
    assert result.reverse_kl == pytest.approx(((-0.5 * math.log(2) + 0.5) + 0 + (2 * math.log(2) - 1)) / 3)
    assert result.sampler_perplexity == pytest.approx(16 ** (1 / 3))
    assert result.trainer_perplexity == pytest.approx(16 ** (1 / 3))
    assert result.ess_tokens == pytest.approx(3.5**2 / (0.25 + 1 + 4) / 3)
    assert result.ess_sequences == pytest.approx(2.5**2 / (0.25 + 4) / 2)
    assert result.correlation == pytest.approx(np.corrcoef([0.5, 0.25, 0.5], [0.25, 0.25, 1.0])[0, 1])


def test_equal_policies_are_on_policy_in_every_number() -> None:
    result = measured([[0.5, 0.25], [0.125]], [[0.5, 0.25], [0.125]])
    assert result is not None
    assert (result.kl, result.kl_k1, result.reverse_kl) == (0, 0, 0)
    assert result.sampler_perplexity == result.trainer_perplexity
    assert (result.ess_tokens, result.ess_sequences, result.correlation) == pytest.approx((1, 1, 1))


def test_tokens_outside_the_mask_and_responses_without_a_token_do_not_count() -> None:
    masked = measured([[0.5, 0.9], [0.1]], [[0.25, 0.1], [0.9]], [[True, False], [False]])
    assert masked == measured([[0.5]], [[0.25]])
    assert masked is not None
    assert masked.ess_sequences == 1.0


def test_nothing_is_said_of_no_tokens_nor_of_the_correlation_of_a_constant() -> None:
    assert measured([[0.5]], [[0.5]], [[False]]) is None
    assert mismatch(MismatchSums()) is None
    constant = measured([[0.5, 0.5]], [[0.4, 0.6]])
    assert constant is not None
    assert constant.correlation is None


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def slow(sampler: list[list[float]], trainer: list[list[float]], masks: list[list[bool]]) -> dict[str, float]:
    """The definitions, as loops over the logprobs."""
    pairs = [
        [(s, t) for s, t, flag in zip(*rows, strict=True) if flag] for rows in zip(sampler, trainer, masks, strict=True)
    ]
    tokens = [pair for row in pairs for pair in row]
    ratios = [math.exp(t - s) for s, t in tokens]
    sequences = [math.exp(sum(t - s for s, t in row)) for row in pairs if row]
    return {
        "kl": sum(r - 1 - math.log(r) for r in ratios) / len(tokens),
        "kl_k1": sum(s - t for s, t in tokens) / len(tokens),
        "reverse_kl": sum(r * math.log(r) - r + 1 for r in ratios) / len(tokens),
        "sampler_perplexity": math.prod(math.exp(-s / len(tokens)) for s, _ in tokens),
        "trainer_perplexity": math.prod(math.exp(-t / len(tokens)) for _, t in tokens),
        "ess_tokens": sum(ratios) ** 2 / sum(r * r for r in ratios) / len(tokens),
        "ess_sequences": sum(sequences) ** 2 / sum(r * r for r in sequences) / len(sequences),
    }


@given(LENGTHS, st.integers(0, 2**32 - 1), st.data())
def test_sums_of_parts_amount_to_what_a_loop_finds_in_the_whole(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    sampler = [rng.uniform(-4, 0, n).tolist() for n in lengths]
    trainer = [(np.array(row) + rng.normal(0, 0.3, len(row))).tolist() for row in sampler]
    masks = [(rng.random(n) < 0.7).tolist() for n in lengths]
    masks[0][0] = True
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {0, len(lengths)})
    total = MismatchSums()
    for start, stop in pairwise(cuts):
        index = torch.tensor([s for s, row in enumerate(sampler[start:stop]) for _ in row])
        sampled, trained = (
            torch.tensor([x for row in rows[start:stop] for x in row], dtype=torch.float64)
            for rows in (sampler, trainer)
        )
        mask = torch.tensor([flag for row in masks[start:stop] for flag in row], dtype=torch.bool)
        total += mismatch_sums(sampled, trained, mask, index, stop - start)
    result = mismatch(total)
    assert result is not None
    assert {name: value for name, value in vars(result).items() if name != "correlation"} == pytest.approx(
        slow(sampler, trainer, masks), rel=1e-6, abs=1e-9
    )
    pairs = [
        (s, t) for rows in zip(sampler, trainer, masks, strict=True) for s, t, flag in zip(*rows, strict=True) if flag
    ]
    if len(pairs) > 2:
        assert result.correlation == pytest.approx(np.corrcoef(np.exp(np.array(pairs).T))[0, 1], abs=1e-6)


def test_the_spread_gives_the_tails_of_the_gaps() -> None:
    sampler, trainer = torch.zeros(2000), torch.zeros(2000)
    trainer[0], trainer[1], trainer[2], trainer[3] = 0.4, -0.2, 0.1, 99.0
    mask = torch.ones(2000, dtype=torch.bool)
    mask[3] = False
    result = spread(sampler, trainer, mask)
    assert result is not None
    assert (result.mean_abs, result.p999_abs, result.max_abs) == pytest.approx((0.7 / 1999, 0.2, 0.4))
    assert (result.ratio_min, result.ratio_p01, result.ratio_p99, result.ratio_max) == pytest.approx(
        (math.exp(-0.2), 1, 1, math.exp(0.4))
    )
    assert spread(sampler, trainer, ~torch.ones(2000, dtype=torch.bool)) is None


def test_a_stray_token_makes_no_number_infinite() -> None:
    result = mismatch(
        mismatch_sums(
            torch.tensor([-1e4, -1.0]),
            torch.tensor([-1.0, -1.0]),
            torch.ones(2, dtype=torch.bool),
            torch.zeros(2, dtype=torch.int64),
            1,
        )
    )
    assert result is not None
    assert all(math.isfinite(value) for name, value in vars(result).items() if name != "correlation")
