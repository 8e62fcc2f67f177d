"""pass@k and maj@k, best@k and worst@k: tables worked by hand, and every subset enumerated."""

from collections import Counter
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.best_and_worst import best_and_worst_at_k, is_graded
from rolecall.algorithms.pass_and_majority import MAX_EXACT, majority_at_k, pass_at_k, subset_sizes


def slow_pass_at_k(solved: list[bool], k: int) -> float:
    """The share of all subsets of k with a solved response."""
    return fmean(any(chosen) for chosen in combinations(solved, k))


def slow_majority_at_k(answers: list[str | None], solved: list[bool], k: int) -> float:
    """The mean over all subsets of k of what their majority vote is worth."""
    worth = {}
    for answer in set(answers):
        worth[answer] = fmean(s for a, s in zip(answers, solved, strict=True) if a == answer)
    results = []
    for chosen in combinations(answers, k):
        votes = Counter(answer for answer in chosen if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        results.append(fmean(worth[answer] for answer in winners) if winners else 0.0)
    return fmean(results)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_the_sizes_are_the_powers_of_two_and_all(n: int, expected: list[int]) -> None:
    assert subset_sizes(n) == expected


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (4, 2, 2, 5 / 6),  # 1 - C(2, 2) / C(4, 2) = 1 - 1 / 6
        (4, 3, 2, 1.0),  # fewer than k are unsolved
        (4, 0, 4, 0.0),
        (1, 1, 1, 1.0),
        (1000, 1, 500, 0.5),  # one solved response is in half of the halves
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_response(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(slow_pass_at_k(solved, k), abs=1e-9)


@pytest.mark.parametrize(
    ("answers", "solved", "expected"),
    [
        # Of aab, a solved: every single vote 2/3; pairs aa, ab, ab: 1, 1/2, 1/2; all: a wins.
        (["a", "a", "b"], [1, 1, 0], {1: 2 / 3, 2: 2 / 3, 3: 1.0}),
        # The wrong answer has the majority.
        (["a", "b", "b"], [1, 0, 0], {1: 1 / 3, 2: 1 / 3, 3: 0.0}),
        # One answer each: a tie among all that are chosen.
        (["a", "b", "c", "d"], [1, 0, 0, 0], {1: 0.25, 2: 0.25, 4: 0.25}),
        # A response without an answer takes a place and does not vote: pairs aN, aN, NN give 1, 1, 0.
        (["a", None, None], [1, 0, 0], {1: 1 / 3, 2: 2 / 3, 3: 1.0}),
        # Nobody votes, even where the scorer was content.
        ([None, None], [1, 1], {1: 0.0, 2: 0.0}),
        # The scorer disagrees about a: it counts half.
        (["a", "a"], [1, 0], {1: 0.5, 2: 0.5}),
        (["a"], [1], {1: 1.0}),
    ],
)
def test_majority_at_k_by_hand(answers: list[str | None], solved: list[int], expected: dict[int, float]) -> None:
    assert majority_at_k(answers, np.array(solved, bool), expected) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=9))
def test_majority_at_k_is_the_mean_over_all_subsets(responses: list[tuple[str | None, bool]]) -> None:
    answers, solved = [answer for answer, _ in responses], [flag for _, flag in responses]
    expected = {k: slow_majority_at_k(answers, solved, k) for k in range(1, len(answers) + 1)}
    assert majority_at_k(answers, np.array(solved), expected) == pytest.approx(expected, abs=1e-9)


def test_majority_at_k_sums_over_all_subsets_up_to_its_bound_and_agrees_with_the_estimate_beyond() -> None:
    """Twice as many responses of the same shares are nearly the same draws of a few."""
    answers = [*["a"] * 26, *["b"] * 20, *["c"] * 10, *[None] * 8]
    assert len(answers) == MAX_EXACT
    sizes = [1, 2, 4]
    exact = majority_at_k(answers, np.array([answer == "a" for answer in answers]), sizes)
    twice = majority_at_k(answers * 2, np.array([answer == "a" for answer in answers * 2]), sizes)
    assert exact[1] == pytest.approx(26 / 64, abs=1e-12)
    assert twice == pytest.approx(exact, abs=0.03)
    assert twice == majority_at_k(answers * 2, np.array([answer == "a" for answer in answers * 2]), sizes)


@pytest.mark.parametrize("times", [1, 3])
def test_of_all_responses_the_most_frequent_answer_wins(times: int) -> None:
    answers = [*["a"] * 15, *["b"] * 14, None] * times
    solved = np.array([answer == "a" for answer in answers])
    assert majority_at_k(answers, solved, [len(answers)])[len(answers)] == pytest.approx(1.0)
    assert majority_at_k([None] * 40 * times, np.zeros(40 * times, bool), [1, 40]) == {1: 0.0, 40: 0.0}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Pairs of 0, 1/4, 1: the largest 1/4, 1, 1, the smallest 0, 0, 1/4.
        ([1.0, 0.0, 0.25], {1: (1.25 / 3, 1.25 / 3), 2: (0.75, 0.25 / 3), 3: (1.0, 0.0)}),
        ([0.5, 0.5], {1: (0.5, 0.5), 2: (0.5, 0.5)}),
        ([-2.0], {1: (-2.0, -2.0)}),
        ([0.0] * 999 + [1.0], {500: (0.5, 0.0)}),  # one is in half of the halves
    ],
)
def test_best_and_worst_at_k_by_hand(rewards: list[float], expected: dict[int, tuple[float, float]]) -> None:
    found = best_and_worst_at_k(np.array(rewards), expected)
    assert found.keys() == expected.keys()
    for k, both in expected.items():
        assert found[k] == pytest.approx(both, abs=1e-12)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 0.5, 1.0, 7.25]), min_size=1, max_size=9))
def test_best_and_worst_at_k_are_the_means_over_all_subsets(rewards: list[float]) -> None:
    sizes = range(1, len(rewards) + 1)
    found = best_and_worst_at_k(np.array(rewards), sizes)
    for k in sizes:
        chosen = list(combinations(rewards, k))
        assert found[k] == pytest.approx((fmean(map(max, chosen)), fmean(map(min, chosen))), abs=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_the_best_of_right_and_wrong_is_pass_at_k(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    best, _ = best_and_worst_at_k(np.array(solved, np.float64), [k])[k]
    assert best == pytest.approx(pass_at_k(len(solved), sum(solved), k), abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "graded"),
    [([0.0, 1.0, 1.0 - 2**-53], False), ([0.0, 0.5], True), ([-1.0, 1.0], True), ([], False)],
)
def test_rewards_are_graded_where_one_is_neither_right_nor_wrong(rewards: list[float], graded: bool) -> None:
    assert is_graded(np.array(rewards)) is graded
