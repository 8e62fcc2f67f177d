"""The number game in an environment that loses a share of its training episodes, and an estimator that leaves those
out: what failing_episodes.py compares. Held-out games are never lost.

python -m benchmarks.failing_game ADDRESS SHARE WAY        # WAY: one of WAYS
"""

import random
import sys
import threading
from collections import Counter

import numpy as np

from examples.guess_number.game import MAX_GUESSES, Guess
from rolecall.algorithms.advantages import Estimate, Groups, ScoredBatch
from rolecall.environment import Action, Answer, Task, serve

WAYS = ("zero", "masked", "left out", "again")
"""What becomes of a lost episode: a reward of 0; nothing of it trained, but its 0 in the baseline; out of the group; it
is played again.
"""
TURNS = 3
"""Turns of the game of which SHARE are lost; shorter ones less, longer ones more."""
LOST = -1.0
"""Stands for the reward of an episode that was lost."""


class FailingGuess(Guess):
    """A game each of whose calls may be its last, as where a container dies: the longer a game, the likelier it is
    lost. What is lost follows from seed, attempt and turn.
    """

    share_of_turns = 0.0
    way = "again"
    _attempts: Counter[int] = Counter()
    _lock = threading.Lock()

    def reset(self, task: Task, seed: int) -> str:
        """Draws whether each turn is lost."""
        with self._lock:
            self._attempts[seed] += 1
            rng = random.Random(f"{seed}/{self._attempts[seed]}")
        is_reliable = task.uid.startswith("heldout")
        self.is_lost_at = [not is_reliable and rng.random() < self.share_of_turns for _ in range(MAX_GUESSES)]
        return str(super().reset(task, seed))

    def step(self, action: Action) -> Answer:
        """Plays, or loses the game."""
        answer: Answer = super().step(action)
        if not self.is_lost_at[self.num_guesses - 1]:
            return answer
        if self.way == "again":
            raise RuntimeError("the game is lost")
        return Answer("over", reward=0.0 if self.way == "zero" else LOST, is_over=True)


def grpo_of_found(batch: ScoredBatch, *, in_baseline: bool) -> Estimate:
    """GRPO in which lost trajectories are not trained on; `in_baseline`: they count in their group with 0."""
    found_B = batch.totals_B != LOST
    rewards_B = np.where(found_B, batch.totals_B, 0.0)
    # a lost one that leaves its group is a group of its own
    gids_B = batch.gids_B if in_baseline else np.where(found_B, batch.gids_B, -1 - np.arange(found_B.size))
    return Estimate(batch.spread(np.where(found_B, Groups(gids_B).normalized(rewards_B), 0.0)))


if __name__ == "__main__":
    address, share, FailingGuess.way = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    FailingGuess.share_of_turns = 1 - (1 - share) ** (1 / TURNS)
    sys.exit(serve(FailingGuess, address, name="failing-game", range=(LOST, 1), max_sessions=512))
