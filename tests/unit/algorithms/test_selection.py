"""The tokens that Clip-Cov and KL-Cov single out, against numbers worked by hand, against loops, and however the
mini-batch is cut.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.selection import Order, Tokens, num_selected, order, token_keys
from rolecall.settings import CovarianceLoss
from rolecall.wire import Array

LOSSES: list[CovarianceLoss] = [
    CovarianceLoss(kind="kl_cov", fraction=0.2),
    CovarianceLoss(kind="clip_cov", fraction=0.2, cov_low=0.1, cov_high=1.0, clip_eps_low=0.5, clip_eps_high=0.5),
]


def select(loss: CovarianceLoss, parts: list[Tokens]) -> list[Array]:
    """bool [M] for every part, as ranks would agree on it."""
    sums = sum((part.sums() for part in parts), np.zeros(3))
    num, orders = num_selected(loss, int(sums[0])), [order(loss, part, sums) for part in parts]
    firsts = [each.first(num) for each in orders]
    last = Order(
        np.concatenate([each.ranks_M for each in firsts]), np.concatenate([each.keys_M for each in firsts])
    ).first(num)
    return [each.up_to(last) for each in orders]


def draw(num: int, seed: int) -> Tokens:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=num)
    return Tokens(
        logprobs, logprobs + rng.normal(scale=0.4, size=num), rng.normal(size=num), rng.integers(0, 2**62, num)
    )


def part_of(tokens: Tokens, index: Array) -> Tokens:
    return Tokens(*(column[index] for column in vars(tokens).values()))


def test_the_largest_covariances_are_taken_by_kl_cov() -> None:
    # means -2 and 0: covariances 1, -0.5, 0, 2, 0
    tokens = Tokens(
        np.array([-1.0, -1.0, -2.0, -4.0, -2.0]), np.zeros(5), np.array([1.0, -0.5, 2.0, -1.0, -1.5]), np.arange(5)
    )
    assert order(CovarianceLoss(kind="kl_cov"), tokens, tokens.sums()).ranks_M.tolist() == [-1.0, 0.5, 0.0, -2.0, 0.0]
    assert select(CovarianceLoss(kind="kl_cov", fraction=0.4), [tokens])[0].tolist() == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert select(CovarianceLoss(kind="kl_cov"), [tokens])[0].tolist() == [False, False, False, True, False]


def test_clip_cov_draws_by_keys_among_the_tokens_within_its_bounds() -> None:
    logprobs, advantages = np.array([-1.0, -1.0, -2.0, -4.0, -2.0]), np.array([1.0, -0.5, 2.0, -1.0, -1.5])
    loss = CovarianceLoss(kind="clip_cov", fraction=0.2, cov_low=0.5, cov_high=3.0)
    # of tokens 0 and 3, the one with the smaller key
    for keys, expected in (([5, 1, 2, 9, 0], 0), ([9, 1, 2, 5, 0], 3)):
        tokens = Tokens(logprobs, logprobs, advantages, np.array(keys))
        assert np.flatnonzero(select(loss, [tokens])[0]).tolist() == [expected]
    assert np.flatnonzero(select(loss.model_copy(update={"cov_high": 1.5, "fraction": 1.0}), [tokens])[0]).tolist() == [
        0
    ]


def test_clip_cov_leaves_out_what_ppos_clip_already_took() -> None:
    logprobs, advantages = np.array([-1.0, -3.0]), np.array([1.0, -1.0])  # covariance 1 both
    loss = CovarianceLoss(kind="clip_cov", fraction=1.0, cov_low=0.5, clip_eps_low=0.2, clip_eps_high=0.2)
    for old, expected in (
        ([-1.0, -3.0], [True, True]),
        ([-1.3, -3.0], [False, True]),
        ([-1.0, -2.7], [True, False]),
        ([-0.7, -3.3], [True, True]),
    ):
        assert select(loss, [Tokens(logprobs, np.array(old), advantages, np.arange(2))])[0].tolist() == expected


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
@given(num=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_choice_does_not_depend_on_how_the_minibatch_is_cut(
    loss: CovarianceLoss, num: int, seed: int, data: st.DataObject
) -> None:
    tokens = draw(num, seed)
    whole = set(tokens.keys_M[select(loss, [tokens])[0]].tolist())
    shuffled = np.array(data.draw(st.permutations(range(num))), dtype=np.int64)
    cuts = sorted(data.draw(st.sets(st.integers(0, num), max_size=4)))
    parts = [part_of(tokens, index) for index in np.split(shuffled, cuts)]
    chosen = [
        key for part, taken_M in zip(parts, select(loss, parts), strict=True) for key in part.keys_M[taken_M].tolist()
    ]
    assert sorted(chosen) == sorted(whole)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
@given(num=st.integers(3, 60), seed=st.integers(0, 2**32 - 1))
def test_the_choice_is_that_of_a_sort_token_by_token(loss: CovarianceLoss, num: int, seed: int) -> None:
    # Of two tokens both have the same covariance, and rounding decides.
    tokens = draw(num, seed)
    logprobs, old, advantages, keys = (column.tolist() for column in vars(tokens).values())
    covariance = [
        (p - sum(logprobs) / num) * (a - sum(advantages) / num) for p, a in zip(logprobs, advantages, strict=True)
    ]
    if loss.kind == "kl_cov":
        candidates = sorted(range(num), key=lambda t: -covariance[t])
    else:
        free = [
            (a > 0 and np.exp(p - o) <= 1.5) or (a < 0 and np.exp(p - o) >= 0.5)
            for p, o, a in zip(logprobs, old, advantages, strict=True)
        ]
        candidates = sorted((t for t in range(num) if free[t] and 0.1 < covariance[t] < 1.0), key=lambda t: keys[t])
    expected = candidates[: max(int(loss.fraction * num), 1)]
    assert np.flatnonzero(select(loss, [tokens])[0]).tolist() == sorted(expected)


def test_a_minibatch_without_candidates_selects_nothing() -> None:
    nothing = Tokens(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    alike = Tokens(np.full(3, -1.0), np.full(3, -1.0), np.ones(3), np.arange(3))
    for loss in LOSSES:
        assert not select(loss, [nothing])[0].any()
    assert not select(LOSSES[1], [alike])[0].any()


def test_keys_depend_on_trajectory_and_index_alone_and_look_random() -> None:
    keys = token_keys("7/3/12/0", 4096)
    assert token_keys("7/3/12/0", 5).tolist() == keys[:5].tolist()
    assert not set(keys.tolist()) & set(token_keys("7/4/12/0", 4096).tolist())
    assert keys.dtype == np.int64
    assert (keys >= 0).all()
    assert len(set(keys.tolist())) == 4096
    assert abs((keys / 2.0**63).mean() - 0.5) < 0.02
