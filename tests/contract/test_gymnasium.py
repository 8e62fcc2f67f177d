"""Gymnasium's own environments behind the contract: what they answer in text, and that they keep the rules."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from rolecall.commands.conformance import examine_environment
from rolecall.conformance.environment.rows import read_file
from rolecall.conformance.peer import Peer
from rolecall.data.images.files import open_image
from rolecall.environment import Action, Answer, ImageMessage, Task
from rolecall.environment.gymnasium import UNREADABLE, Gymnasium, image_of
from tests.contract.environment_peers import environment
from tests.contract.kits import ROOT, UNLISTED, broken, skipped

TASK = Task("t")


def lake(**made: Any) -> Gymnasium[int, int]:
    return Gymnasium(gymnasium.make("FrozenLake-v1", **made), str, lambda text: int(text) if text.isdigit() else None)


def table(**made: Any) -> Gymnasium[tuple[int, int, int], int]:
    return Gymnasium(
        gymnasium.make("Blackjack-v1", **made),
        lambda hand: f"You have {hand[0]}, the dealer shows {hand[1]}.",
        lambda text: {"stick": 0, "hit": 1}.get(text),
    )


def taken(env: Gymnasium[Any, Any], text: str) -> Answer:
    answer = env.step(Action(text))
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_a_slippery_lake_is_crossed_as_by_gymnasium_itself(seed: int) -> None:
    """Chance and all: every observation, reward and end."""
    env, other = lake(), gymnasium.make("FrozenLake-v1")
    assert env.reset(TASK, seed) == str(other.reset(seed=seed)[0])
    is_over = False
    for turn in range(100):
        if is_over:
            break
        answer = taken(env, str(turn % 4))
        observation, reward, terminated, truncated, _ = other.step(turn % 4)
        assert answer == Answer(str(observation), float(reward), terminated, truncated and not terminated)
        is_over = terminated or truncated
    assert is_over
    env.close()


class Pixels(gymnasium.Env[Any, int]):
    """An environment that is looked at, one column of a 4 x 6 image brighter after each step."""

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.seen = np.zeros((4, 6, 3), np.uint8)
        return self.seen, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.seen[:, action] = (255, 0, 9)
        return self.seen, 0.0, False, False, {}


def test_pixels_are_shown_as_an_image() -> None:
    env = Gymnasium(Pixels(), lambda pixels: ImageMessage("user", ("You see:", image_of(pixels))), int)
    env.reset(TASK, 0)
    (message,) = [taken(env, "2").messages]
    assert isinstance(message, ImageMessage)
    said, image = message.parts
    assert said == "You see:"
    assert not isinstance(image, str)
    shown = np.asarray(open_image(image.data))
    assert shown.shape == (4, 6, 3)
    assert shown[:, 2].tolist() == [[255, 0, 9]] * 4
    assert not shown[:, 3:].any()


def test_a_hand_of_blackjack_is_played_to_its_reward() -> None:
    env = table()
    assert str(env.reset(TASK, 3)).startswith("You have ")
    answer = taken(env, "stick")
    assert answer.is_over
    assert answer.reward in (-1.0, 0.0, 1.0)


def test_an_episode_that_gymnasium_cuts_short_is_truncated_and_one_that_ends_then_is_not() -> None:
    cut = lake(max_episode_steps=2, is_slippery=False)
    cut.reset(TASK, 0)
    assert not taken(cut, "2").is_truncated
    assert (taken(cut, "2").is_truncated, cut.grade()) == (True, 0.0)
    both = table(max_episode_steps=1)
    both.reset(TASK, 0)
    answer = taken(both, "stick")
    assert (answer.is_over, answer.is_truncated) == (True, False)


def test_a_text_that_means_no_action_steps_nothing() -> None:
    env = lake(is_slippery=False)
    env.reset(TASK, 0)
    assert env.step(Action("Where am I?")) == UNREADABLE
    assert taken(env, "2").messages == "1"


async def test_the_example_keeps_every_rule() -> None:
    from examples.frozen_lake.lake import make

    described: dict[str, Any] = {"turn_rewards": True, "deterministic": True, "lease_s": 2.0}
    async with environment(make, **described) as (address, _):
        report = await examine_environment(Peer(address), read_file(ROOT / "examples/frozen_lake/items.jsonl"))
    assert broken(report) == [], report.text()
    assert skipped(report) == {"calls.token", "reset.task", "failure.status", "failure.final", *UNLISTED}
