"""Episodes that the rollout steps under a chat template that shows earlier turns otherwise: a segment for each time it
does. The real replica, pull loop, store and client around a scripted engine and a served environment.
"""

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Answer, Message
from rolecall.environment.checks import environment_fits
from rolecall.errors import ConfigError
from rolecall.scoring.items import score_item
from rolecall.settings import RunSettings
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import trajectory_pb2
from rolecall.wire import decode_tensor
from services.rollout.sampling import SampleRequest
from tests.contract.environment_peers import client_of, environment
from tests.contract.test_rollout_episodes import LetterEngine, Talk, check_row, rollout_in
from tests.fixtures_store import StoreUnderTest
from tests.smallest import smallest_tree
from tests.tiny_tokenizer import THINKING_TEMPLATE, write_tokenizer
from tests.waiting import until

THOUGHT = "<think>\nhm\n</think>\n\n"


class Thinker(LetterEngine):
    """A scripted engine that thinks before it says words of letters, but in some turns."""

    def __init__(self, tokenizer: ChatTokenizer, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._thought = tokenizer.encode(THOUGHT)

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        said, logprob = super()._next(request, position)
        thinks = request.seed % 4 and position < len(self._thought)
        return (self._thought[position], logprob) if thinks else (said, logprob)


class Asking(Talk):
    """A talk whose answers come as a tool's or as a user's, who spell special tokens."""

    def reset(self, task: Any, seed: int) -> str:
        opening = super().reset(task, seed)
        self.asks = random.Random(seed)
        return opening

    def step(self, action: Action) -> Answer:
        answer = super().step(action)
        assert isinstance(answer, Answer)
        if answer.is_over:
            return answer
        said = f"go on <|im_end|> {self.turns}" if self.asks.random() < 0.3 else f"go on {self.turns}"
        return Answer([Message(self.asks.choice(["user", "tool"]), said)], answer.reward)


TURNS: dict[str, Any] = {"turn_rewards": True, "roles": ("user", "tool")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    return tmp_path


@pytest.fixture(autouse=True)
def _well() -> None:
    Talk.failing = staticmethod(lambda: None)


Row = tuple[trajectory_pb2.RowRef, dict[str, Any], trajectory_pb2.TrajectoryMeta]


async def played(store: StoreUnderTest, folder: Path, **settings: Any) -> list[Row]:
    """The rows of 6 groups of 4 episodes."""
    rows: list[Row] = []
    async with environment(Asking, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address, engine=Thinker, **settings) as rollout:
            rollout.admit(6, max_tokens=1000)
            await rollout.publish(1)
            for group in await rollout.committed(6):
                read = store.rows.read(group.rows, SAMPLED_COLUMNS)
                rows += zip(group.rows, read, store.rows.read_meta(group.rows), strict=True)
        await until(lambda: sessions.num_open == 0)
    assert store.balance() == (6, 0, 0, 6)
    return rows


async def test_every_turn_reads_what_the_template_shows_and_is_trained_once(
    store: StoreUnderTest, folder: Path
) -> None:
    """Against the slow oracle: for each turn the whole conversation, rendered once more."""
    tokenizer = ChatTokenizer(folder)
    num_forks, num_extended = 0, 0
    for ref, row, meta in await played(store, folder):
        check_row(row, meta)
        talk = [{"role": each.role, "content": each.content} for each in meta.episode.messages]
        spoken = [place for place, message in enumerate(talk) if message["role"] == "assistant"]
        bounds = [0, *ref.segment_starts, ref.num_tokens]
        begun = [[turn for turn in meta.episode.turns if a <= turn.start < b] for a, b in pairwise(bounds)]
        assert all(begun), "no segment without a turn"
        assert len(spoken) == len(meta.episode.turns) - 1, "the last segment shows the whole conversation"
        turns = [(a, turn) for (a, _), each in zip(pairwise(bounds), begun, strict=True) for turn in each]
        for number, (start, turn) in enumerate(turns):
            before = talk[: spoken[number]] if number < len(spoken) else talk
            assert tokenizer.spell(row["token_ids"][start : turn.start].tolist()) == tokenizer.render(before)
        num_forks += len(ref.segment_starts)
        num_extended += len(turns) - len(begun)
        tokens = meta.episode.tokens
        assert tokens.num_calls == len(turns) == round(8 * meta.episode.reward.value)
        assert tokens.num_sampled == tokens.num_trained == row["response_mask"].sum()
        assert not tokens.masked
        expected = {"first": 1, "template": len(ref.segment_starts)}
        assert dict(tokens.branches) == {cause: num for cause, num in expected.items() if num}
    assert num_forks > 0, "thinking was dropped at a question"
    assert num_extended > 0, "and went on through a tool's answer"


async def test_rewards_stand_on_the_last_tokens_of_their_turns_in_whatever_segment(
    store: StoreUnderTest, folder: Path
) -> None:
    for _, row, meta in await played(store, folder):
        mask = row["response_mask"].astype(bool)
        earned = np.zeros(len(mask), np.float32)
        item = score_item(meta, row["token_ids"])
        earned[mask] = decode_tensor(item.environment_reward.token_rewards, "token_rewards")
        num_turns = len(meta.episode.turns)
        for number, turn in enumerate(meta.episode.turns, 1):
            assert earned[turn.end - 1] == (0.25 if number % 2 and number < num_turns else 0.0)
        assert earned.sum() == 0.25 * (num_turns // 2)


async def test_what_a_row_has_no_room_for_is_counted_and_its_rewards_stay(store: StoreUnderTest, folder: Path) -> None:
    full = 0
    for ref, row, meta in await played(store, folder, max_row_tokens=250):
        check_row(row, meta)
        tokens = meta.episode.tokens
        assert ref.num_tokens <= 250 or not ref.segment_starts, "one segment is always kept"
        assert tokens.num_trained == row["response_mask"].sum() > 0
        assert tokens.num_sampled == tokens.num_trained + tokens.masked["row_full"]
        num_turns = round(8 * meta.episode.reward.value)
        assert tokens.num_calls == num_turns
        assert sum(turn.reward for turn in meta.episode.turns) == 0.25 * (num_turns // 2)
        full += len(meta.episode.turns) < num_turns
    assert full


async def test_a_run_that_does_not_say_for_what_a_row_has_room_is_refused_before_it_samples(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Asking, **TURNS) as (address, _):
        settings = RunSettings.model_validate(
            smallest_tree(
                folder,
                model={"path": str(folder)},
                environments={"game": {"address": address}},
                reward={"components": {"won": {"scorer": {"kind": "environment", "token_rewards": True}}}},
            )
        )
        async with client_of(address) as client:
            with pytest.raises(
                ConfigError, match=r"'counting'; environments\.game\.max_row_tokens is not set: the chat"
            ):
                await environment_fits(settings, "game")(client._channel)
        async with rollout_in(store, folder, address, engine=Thinker, problem="it does not say so") as rollout:
            rollout.admit(1)
            await rollout.publish(1)
            with pytest.raises(ConfigError, match="it does not say so"):
                await asyncio.wait_for(rollout.pulling, 60)


async def test_a_conversation_as_it_is_shown_has_the_budget_of_tokens(store: StoreUnderTest, folder: Path) -> None:
    ends = set()
    async with environment(Asking, **TURNS) as (address, _):
        async with rollout_in(store, folder, address, engine=Thinker) as rollout:
            rollout.admit(4, max_tokens=90)
            await rollout.publish(1)
            for group in await rollout.committed(4):
                for ref, meta in zip(group.rows, store.rows.read_meta(group.rows), strict=True):
                    bounds = [0, *ref.segment_starts, ref.num_tokens]
                    assert all(b - a <= meta.num_prompt_tokens + 90 for a, b in pairwise(bounds))
                    ends.add(meta.episode.ended_by)
                    if meta.episode.ended_by == "tokens":
                        assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
                        assert meta.episode.reward.value == 0.875, "graded as it stands"
    assert ends == {"tokens", "terminated"}
