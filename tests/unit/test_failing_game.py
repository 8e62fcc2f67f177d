"""The parts of the study of failing episodes: which games are lost, and what an estimator makes of those."""

import numpy as np
import pytest

from benchmarks.failing_game import LOST, FailingGuess, grpo_of_found
from rolecall.algorithms.advantages import Groups, ScoredBatch
from rolecall.environment import Action, Answer, Task


def batch(rewards: list[float]) -> ScoredBatch:
    """One group, of responses of two tokens that are trained on."""
    masks = [np.array([0, 1, 1], np.uint8) for _ in rewards]
    return ScoredBatch.of_rows([7] * len(rewards), [np.array([0, 0, r], np.float32) for r in rewards], masks, masks)


def test_what_is_lost_leaves_the_baseline_or_stays_in_it_and_is_never_trained_on() -> None:
    scored = batch([1, LOST, 0, 1])
    left_out, masked = grpo_of_found(scored, in_baseline=False), grpo_of_found(scored, in_baseline=True)
    of_three = Groups(np.array([7] * 3)).normalized(np.array([1.0, 0, 1]))
    of_four = Groups(np.array([7] * 4)).normalized(np.array([1.0, 0, 0, 1]))
    for estimate, expected in (
        (left_out, [of_three[0], 0, of_three[1], of_three[2]]),
        (masked, of_four * [1, 0, 1, 1]),
    ):
        assert np.allclose(estimate.advantages_N, scored.spread(np.array(expected)))


@pytest.mark.parametrize(("way", "reward"), [("zero", 0.0), ("masked", LOST), ("left out", LOST)])
def test_a_lost_game_has_the_reward_of_its_way(monkeypatch: pytest.MonkeyPatch, way: str, reward: float) -> None:
    monkeypatch.setattr(FailingGuess, "share_of_turns", 1.0)
    monkeypatch.setattr(FailingGuess, "way", way)
    game = FailingGuess()
    game.reset(Task("train-3", ground_truth="3"), seed=5)
    assert game.step(Action("3")) == Answer("over", reward=reward, is_over=True)


def test_games_that_are_played_again_are_lost_anew_and_held_out_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingGuess, "share_of_turns", 0.5)
    game = FailingGuess()

    def is_lost(uid: str) -> bool:
        game.reset(Task(uid, ground_truth="3"), seed=6)
        try:
            return game.step(Action("3")) != Answer("right", reward=1.0, is_over=True)
        except RuntimeError:
            return True

    assert {is_lost("train-3") for _ in range(50)} == {True, False}
    assert not any(is_lost("heldout-3") for _ in range(50))
