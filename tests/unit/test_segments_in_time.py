"""GAE over the segments of stepped episodes, against a slow oracle that plays each episode's turns in time order."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rolecall.algorithms.advantages import ScoredBatch, estimate
from rolecall.data.continuation import Continuation
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.scoring.items import score_item
from rolecall.settings import GaeAdvantage
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array, decode_tensor
from services.rollout.replica import Response
from services.rollout.sampling import SampleRequest
from services.rollout.trajectories import columns
from services.rollout.turns.tree import Tree, TurnPrompt
from tests.tiny_tokenizer import THINKING_TEMPLATE, write_tokenizer
from tests.unit.test_segments import Sampler

LONGEST_TURN = 40
"""Tokens of the longest turn here."""
LAST_REWARD = 2.0
"""What the environment gives at the end, beside what turns earned."""


@dataclass(frozen=True)
class Step:
    """A turn of the policy, and what the environment does then."""

    thinks: bool
    role: str
    """Who answers it."""
    reward: float | None


STEPS = st.lists(
    st.builds(
        Step, st.booleans(), st.sampled_from(["user", "user", "tool"]), st.none() | st.sampled_from([-1.0, 0.5, 3.0])
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, THINKING_TEMPLATE)
    return ChatTokenizer(folder)


async def played(tokenizer: ChatTokenizer, steps: Sequence[Step], room: int) -> tuple[list[int], Response, list[int]]:
    """The prompt and the whole of an episode, and the tokens of each of its turns as they came. It ends where a row,
    which has room for a conversation, would have none for this one.
    """
    sampler, continuation = Sampler(tokenizer), Continuation(tokenizer)
    first = SampleRequest("r", (), trajectory_pb2.SamplingParams(temperature=1), 1)
    tree = Tree(first, continuation, room)
    said: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    prompt, sizes = TurnPrompt(None, tuple(said), continuation.opening(said), 10**6, "first"), list[int]()
    for step in steps:
        sampler.thought = "<think>\nhm\n</think>\n\n" if step.thinks else ""
        if len(prompt.token_ids) + LONGEST_TURN > room:
            break
        number, request = tree.request(prompt, prompt.room)
        response = await sampler.sample(request)
        sizes.append(len(response.sample.token_ids))
        assert sizes[-1] <= LONGEST_TURN
        turn = tree.sampled(number, prompt, response, tokenizer.decode(response.sample.token_ids))
        turn.is_seen, turn.reward = True, step.reward
        told = [{"role": "assistant", "content": turn.text}, {"role": step.role, "content": "on"}]
        prompt = tree.after(turn, (*prompt.messages, *told), ())
    reward = trajectory_pb2.EpisodeReward(value=LAST_REWARD)
    request, whole = tree.ended("turns", reward, turn_rewards=True, row_messages=(), generation_s=1.0)
    return list(request.prompt_token_ids), whole, sizes


def rewards_of(row: dict[str, Array], whole: Response) -> Array:
    """The row's rewards as the reward service places them: turns' on their last tokens, the episode's on the last."""
    assert whole.episode is not None
    item = score_item(trajectory_pb2.TrajectoryMeta(id="g/0", episode=whole.episode), row["token_ids"])
    rewards, mask = np.zeros(len(row["token_ids"])), row["response_mask"] != 0
    rewards[mask] = decode_tensor(item.environment_reward.token_rewards, "token_rewards")
    rewards[np.flatnonzero(mask)[-1]] += item.environment_reward.value
    return rewards


def in_time_order(
    steps: Sequence[Step], sizes: Sequence[int], kept: Sequence[int], values: Array, bootstrap: float, section: Any
) -> list[tuple[float, float]]:
    """Advantage and return of each token of the turns `kept`, in the order in which they were sampled. What a turn
    that is not kept earned is the one's before it, or else the first one's.
    """
    earned = dict.fromkeys(kept, 0.0)
    for number, step in enumerate(steps):
        earned[max((each for each in kept if each <= number), default=kept[0])] += step.reward or 0.0
    earned[kept[-1]] += LAST_REWARD
    tokens = [(number, place) for number in kept for place in range(sizes[number])]
    found, following, running = list[tuple[float, float]](), bootstrap, 0.0
    for number, place in reversed(tokens):
        reward, value = earned[number] if place == sizes[number] - 1 else 0.0, float(values[number, place])
        running = reward + section.gamma * following - value + section.gamma * section.gae_lambda * running
        following = value
        found.append((running, running + value))
    return found[::-1]


@pytest.mark.parametrize("room", [10**6, 250])
@settings(deadline=None, max_examples=60)
@example(
    steps=[Step(False, "user", None)] * 7 + [Step(True, "user", -1.0)],
    gamma=1.0,
    gae_lambda=0.0,
    bootstraps=False,
    seed=0,
)
@given(steps=STEPS, gamma=st.floats(0.1, 1), gae_lambda=st.floats(0, 1), bootstraps=st.booleans(), seed=st.integers(0))
def test_gae_over_forked_segments_is_that_of_the_turns_in_the_order_of_time(
    tokenizer: ChatTokenizer,
    room: int,
    steps: list[Step],
    gamma: float,
    gae_lambda: float,
    bootstraps: bool,
    seed: int,
) -> None:
    prompt, whole, sizes = asyncio.run(played(tokenizer, steps, room))
    row, rng, steps = columns(prompt, whole), np.random.default_rng(seed), steps[: len(sizes)]
    mask = row["response_mask"]
    # the twin of the engine tells by a logprob which turn's which token it is
    told = np.round(-row["rollout_logprobs"][mask != 0].astype(np.float64), 3)
    numbers = np.floor(told).astype(int) - 1
    places = np.round((told - numbers - 1) * 1000).astype(int)
    of_turns, bootstrap = rng.normal(size=(len(steps), max(sizes))), float(rng.normal())
    values = rng.normal(size=mask.size)  # a critic has values of what is repeated and of what was heard, too
    values[mask != 0] = of_turns[numbers, places]
    section = GaeAdvantage(gamma=gamma, gae_lambda=gae_lambda, whiten=False, bootstrap_truncated=bootstraps)
    batch = ScoredBatch.of_rows(
        [0], [rewards_of(row, whole)], [mask], [mask], {"values": [values], "bootstrap_value": [np.array([bootstrap])]}
    )
    result = estimate(section, batch)
    kept = sorted(set(numbers.tolist()))
    assert room < 10**6 or kept == list(range(len(steps)))
    slow = np.array(in_time_order(steps, sizes, kept, of_turns, bootstrap * bootstraps, section))
    np.testing.assert_allclose(result.advantages_N[mask != 0], slow[:, 0], atol=1e-9)
    assert result.returns_N is not None
    np.testing.assert_allclose(result.returns_N[mask != 0], slow[:, 1], atol=1e-9)
    assert not result.advantages_N[mask == 0].any(), "what a segment repeats is stepped over"


def test_the_episodes_here_do_fork(tokenizer: ChatTokenizer) -> None:
    steps = [Step(thinks=True, role="user", reward=1.0)] * 4
    _, whole, _ = asyncio.run(played(tokenizer, steps, 10**6))
    assert len(whole.segment_starts) == 3
    _, short, _ = asyncio.run(played(tokenizer, steps, 250))
    assert short.episode is not None
    assert short.episode.tokens.masked["row_full"]
