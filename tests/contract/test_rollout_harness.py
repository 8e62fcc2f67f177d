"""Episodes that the environment's own agent runs: the real replica, pull loop, store, endpoint and environment around a
scripted engine, and OpenAI's own client in the agent.
"""

import random
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Agent, Answer, Policy
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import rollout_pb2, trajectory_pb2
from tests.contract.environment_peers import environment
from tests.contract.test_rollout_episodes import check_messages, check_row, publish_under_work, rollout_in
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


RUNS: dict[str, Any] = {"runs_episodes": True}


class Talker(Agent):
    """An agent that talks on as often as its seed says, by OpenAI's client, streamed or not."""

    def run(self, policy: Policy) -> float | Answer | None:
        draw = random.Random(self.seed)
        num_turns, streams = draw.randint(1, 6), draw.random() < 0.5
        said: list[Any] = [{"role": "user", "content": f"talk {num_turns}"}]
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            assert [model.id for model in client.models.list()] == [policy.model]
            for turn in range(num_turns):
                if turn:
                    said.append({"role": "user", "content": f"go on {turn}"})
                said.append({"role": "assistant", "content": asked(client, said, streams=streams)})
        return num_turns / 8


def asked(client: OpenAI, said: list[Any], *, streams: bool = False, **fields: Any) -> str:
    """What the policy says."""
    if not streams:
        answer = client.chat.completions.create(model="any", messages=said, **fields)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        return answer.choices[0].message.content or ""
    parts, finish_reasons = [], []
    with client.chat.completions.create(model="any", messages=said, stream=True, **fields) as events:
        for event in events:
            parts.append(event.choices[0].delta.content or "")
            finish_reasons.append(event.choices[0].finish_reason)
    assert finish_reasons[-1] in ("stop", "length")
    assert set(finish_reasons[:-1]) == {None}
    return "".join(parts)


async def played(
    store: StoreUnderTest, folder: Path, agent: type[Agent], num: int = 4, **settings: Any
) -> list[tuple[Any, trajectory_pb2.TrajectoryMeta]]:
    """The rows and META of `num` groups of 4 that `agent` ran."""
    async with environment(agent, **RUNS) as (address, sessions):
        async with rollout_in(store, folder, address, **settings) as rollout:
            rollout.admit(num, max_tokens=600)
            await rollout.publish(1)
            found: list[tuple[Any, trajectory_pb2.TrajectoryMeta]] = []
            for group in await rollout.committed(num):
                found += zip(
                    store.rows.read(group.rows, SAMPLED_COLUMNS), store.rows.read_meta(group.rows), strict=True
                )
        await until(lambda: sessions.num_open == 0)
    assert store.balance() == (num, 0, 0, num)
    return found


async def test_an_agents_row_is_its_conversation_token_by_token(store: StoreUnderTest, folder: Path) -> None:
    are_conversations(await played(store, folder, Talker), folder)


def are_conversations(rows: list[tuple[Any, trajectory_pb2.TrajectoryMeta]], folder: Path) -> None:
    """Against the slow oracle: the whole conversation rendered and tokenized once more."""
    tokenizer = ChatTokenizer(folder)
    for row, meta in rows:
        check_row(row, meta)
        check_messages(meta)
        last = trajectory_pb2.Message(role="assistant", content=meta.response_text)
        spoken = [{"role": each.role, "content": each.content} for each in [*meta.episode.messages, last]]
        oracle = tokenizer.encode(tokenizer.render(spoken, generate=False).removesuffix("\n"))
        assert row["token_ids"].tolist() == oracle, "the template's own words, and nothing else"
        assert meta.episode.ended_by == "terminated"
        num_turns = len(meta.episode.turns)
        assert num_turns == round(8 * meta.episode.reward.value)
        tokens = meta.episode.tokens
        assert tokens.num_calls == num_turns
        assert tokens.num_sampled == tokens.num_trained == row["response_mask"].sum()
        assert dict(tokens.branches) == {"first": 1}
        assert not tokens.masked


class Steady(Agent):
    """An agent that talks for four turns, every other streamed."""

    def run(self, policy: Policy) -> float | Answer | None:
        said: list[Any] = [{"role": "user", "content": "talk"}]
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            for turn in range(4):
                said.append({"role": "assistant", "content": asked(client, said, streams=turn % 2 == 1)})
                said.append({"role": "user", "content": "go on"})
        return 0.5


async def test_a_publish_in_the_middle_of_a_run_keeps_it_and_its_tokens_say_who_sampled_them(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Steady, **RUNS) as (address, sessions):
        async with rollout_in(store, folder, address, token_s=0.02) as rollout:
            rollout.admit(2, max_tokens=600)
            await rollout.publish(1)
            await until(lambda: rollout.replica.num_sampled_tokens > 40)
            await publish_under_work(rollout)
            groups = await rollout.committed(2)
            await until(lambda: sessions.num_open == 0)
    rows = [row for group in groups for row in store.rows.read(group.rows, SAMPLED_COLUMNS)]
    metas = [meta for group in groups for meta in store.rows.read_meta(group.rows)]
    for row, meta in zip(rows, metas, strict=True):
        check_row(row, meta)
        assert len(meta.episode.turns) == 4
        assert meta.episode.tokens.num_sampled == meta.episode.tokens.num_trained == row["response_mask"].sum()
        sampled = row["policy_versions"][row["response_mask"].astype(bool)].tolist()
        assert sampled == sorted(sampled), "versions never go back"
    assert any({span.policy_version for span in meta.spans} == {1, 2} for meta in metas)
    assert store.balance() == (2, 0, 0, 2)


async def test_a_publish_that_aborts_hands_a_run_back_and_it_is_run_again(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Steady, **RUNS) as (address, sessions):
        async with rollout_in(store, folder, address, token_s=0.02) as rollout:
            rollout.admit(2, max_tokens=600)
            await rollout.publish(1)
            await until(lambda: rollout.replica.num_sampled_tokens > 40)
            await publish_under_work(rollout, rollout_pb2.PAUSE_MODE_ABORT)
            metas = [meta for group in await rollout.committed(2) for meta in store.rows.read_meta(group.rows)]
        await until(lambda: sessions.num_open == 0)
    assert all(len(meta.episode.turns) == 4 for meta in metas)
    assert any({span.policy_version for span in meta.spans} == {2} for meta in metas)
    assert store.balance() == (2, 0, 0, 2)


class Compacting(Agent):
    """An agent that forgets, asks aside, and goes back to an earlier point."""

    def run(self, policy: Policy) -> float | Answer | None:
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            first: list[Any] = [{"role": "user", "content": "first"}]
            first.append({"role": "assistant", "content": asked(client, first)})
            one = [*first, {"role": "user", "content": "one"}]
            one.append({"role": "assistant", "content": asked(client, one)})
            other = [*first, {"role": "user", "content": "other"}]
            other.append({"role": "assistant", "content": asked(client, other)})
            other.append({"role": "user", "content": "more"})
            asked(client, other)
            asked(client, [{"role": "user", "content": "a title, please"}])
        return 0.5


async def test_every_branch_is_a_segment_and_every_sampled_token_is_trained_once(
    store: StoreUnderTest, folder: Path
) -> None:
    tokenizer = ChatTokenizer(folder)
    found = await played(store, folder, Compacting)
    refs = [ref for _, group in store.ledger.read_committed("0", 10, 0) for ref in group.rows]
    for ref, row in zip(refs, store.rows.read(refs, SAMPLED_COLUMNS), strict=True):
        bounds = [0, *ref.segment_starts, ref.num_tokens]
        texts = [tokenizer.spell(row["token_ids"][start:end].tolist()) for start, end in pairwise(bounds)]
        assert [text.count("<|im_start|>assistant") for text in texts] == [2, 3, 1]
        asked_for = [
            [word for word in ("first", "one", "other", "more", "title") if f"{word}" in text] for text in texts
        ]
        assert [words[-1] for words in asked_for] == ["one", "more", "title"]
        assert len({text.split("<|im_end|>")[1] for text in texts[:2]}) == 1, "what they share stands in both"
    for row, meta in found:
        check_row(row, meta)
        tokens = meta.episode.tokens
        assert tokens.num_calls == len(meta.episode.turns) == 5
        assert dict(tokens.branches) == {"first": 1, "fork": 1, "history": 1}
        assert tokens.num_trained == tokens.num_sampled == row["response_mask"].sum() > 0
        assert not tokens.masked
        assert [each.content for each in meta.episode.messages] == ["a title, please"]


async def test_a_row_without_room_says_what_it_leaves_out(store: StoreUnderTest, folder: Path) -> None:
    full = 0
    for row, meta in await played(store, folder, Compacting, max_row_tokens=150):
        check_row(row, meta)
        tokens = meta.episode.tokens
        assert len(row["token_ids"]) <= 150 or len(meta.episode.turns) == 1
        assert tokens.num_sampled == tokens.num_trained + tokens.masked["row_full"]
        assert tokens.num_trained == row["response_mask"].sum()
        full += tokens.masked["row_full"] > 0
    assert full


class Replaced(Agent):
    """An agent whose first run of each place fails, and which keeps the seconds that each run was given."""

    given: defaultdict[int, list[float]] = defaultdict(list)
    lost: dict[int, float] = {}
    """Seconds that the lost runs took."""

    def run(self, policy: Policy) -> float | Answer | None:
        began_at = time.monotonic()
        Replaced.given[self.seed].append(policy.deadline_s)
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            asked(client, [{"role": "user", "content": "more"}])
        if self.seed not in Replaced.lost:
            time.sleep(0.3)
            Replaced.lost[self.seed] = time.monotonic() - began_at
            raise RuntimeError("the sandbox died")
        return 0.5


async def test_an_episode_in_place_of_a_lost_one_has_what_is_left_of_the_time(
    store: StoreUnderTest, folder: Path
) -> None:
    Replaced.given.clear()
    Replaced.lost.clear()
    await played(store, folder, Replaced, num=1, budget_s=45.0)
    assert len(Replaced.given) == 4
    for seed, (first, second) in Replaced.given.items():
        assert second <= first - Replaced.lost[seed]


async def test_a_lost_episode_without_time_has_none_in_its_place_and_the_group_says_so(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Replaced, **RUNS) as (address, sessions):
        async with rollout_in(store, folder, address, budget_s=0.0) as rollout:
            rollout.admit(1, max_tokens=600)
            await rollout.publish(1)
            (letter,) = await until(lambda: store.ledger.reap([]))
        assert "no other is begun in its place" in letter.error
        assert "end it as it stands" in letter.error, "and why it was lost"
        await until(lambda: sessions.num_open == 0)


class Greedy(Agent):
    """An agent that wants its own sampling, and more calls than it may have."""

    def run(self, policy: Policy) -> float | Answer | None:
        said: list[Any] = [{"role": "user", "content": "more"}]
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=2) as client:
            with pytest.raises(openai.BadRequestError, match="n must be 1"):
                asked(client, said, n=2)
            for streams in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    asked(client, [{"role": "user", "content": "x" * 500}], streams=streams)
                assert caught.value.code == "context_length_exceeded"
            for _ in range(policy.max_calls):
                said.append({"role": "assistant", "content": asked(client, said, temperature=0, top_p=0.1)})
                said.append({"role": "user", "content": "more"})
            with pytest.raises(openai.PermissionDeniedError) as refused:
                asked(client, said)
            assert refused.value.code == "episode_over"
        return Answer(reward=0.25)


async def test_a_spent_budget_is_refused_in_words_and_truncates(store: StoreUnderTest, folder: Path) -> None:
    for row, meta in await played(store, folder, Greedy, max_turns=3):
        check_row(row, meta)
        assert meta.episode.ended_by == "turns"
        assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert meta.episode.reward.value == 0.25
        assert len(meta.episode.turns) == 3
        assert meta.sampling.temperature == 1.0
