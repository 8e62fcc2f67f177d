"""Random trees of an agent's calls as rows: every sampled token that the agent saw is trained once, and every token is
accounted for.
"""

import asyncio
import inspect
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import EpisodeLostError
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.rollout.harness.attempt import Attempt, Limits
from services.rollout.harness.calls import ChatCall, RefusedError
from services.rollout.replica import Response
from services.rollout.sampling import EngineInfo, Sample, SampleRequest, VersionSpan
from services.rollout.trajectories import columns
from services.rollout.turns.prompts import PromptThread
from tests.tiny_tokenizer import EOS_TOKEN_ID, THINKING_TEMPLATE, TOOLS_TEMPLATE, write_tokenizer

LONGEST = 600


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer(folder)


@dataclass
class Sampler:
    """A replica whose k-th answer, k >= 1, tells its tokens by their logprobs: the i-th one's is -(k + i / 1000)."""

    tokenizer: ChatTokenizer
    info: EngineInfo = EngineInfo(LONGEST, 1, (EOS_TOKEN_ID,), ())
    thought: str = ""
    """What it says before anything else."""
    calls: list[list[int]] = field(default_factory=list)
    """Every id up to the end of each answer."""

    async def sample(self, request: SampleRequest) -> Response:
        said = [*self.tokenizer.encode(f"{self.thought}said {len(self.calls)}"), EOS_TOKEN_ID]
        ids = [*request.prompt_token_ids, *said]
        self.calls.append(ids)
        logprobs = -(len(self.calls) + np.arange(len(said), dtype=np.float32) / 1000)
        sample = Sample(
            tuple(said),
            logprobs.astype(np.float32),
            (VersionSpan(1, 0, len(said)),),
            trajectory_pb2.FINISH_REASON_STOP,
            routed(ids),
        )
        return Response(sample, {1: "d"}, 0.1)


def routed(ids: list[int]) -> Array:
    """Where tokens are sent: it tells which they are. The last one's is that of the one before."""
    routing = np.array([ids], np.uint8).T % 251
    routing[-1] = routing[-2]
    return routing


@dataclass(eq=False)
class Call:
    """A call as the agent knows it."""

    messages: list[dict[str, Any]]
    reply: Any
    parent: "Call | None"
    is_seen: bool

    @property
    def path(self) -> "list[Call]":
        return [*(self.parent.path if self.parent is not None else []), self]


KINDS = ["root", "on", "again", "rewritten"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.booleans()), max_size=9)


def attempt_of(sampler: Sampler, room: int, max_prompt_tokens: int | None = None, max_calls: int = 2000) -> Attempt:
    longest = sampler.info.max_model_tokens
    first = SampleRequest("r", (), trajectory_pb2.SamplingParams(temperature=1, max_tokens=longest), 1)
    limits = Limits(max_prompt_tokens or longest, max_calls, room, 0, time.monotonic() + 600)
    prompts = PromptThread(sampler.tokenizer, longest)
    return Attempt(first, limits, cast(Any, sampler), sampler.tokenizer, prompts, None, asyncio.Semaphore())


async def played(tokenizer: ChatTokenizer, steps: list[Any], room: int) -> tuple[Attempt, Sampler, list[Call]]:
    """An agent that calls as `steps` say: from nothing, from an earlier answer, the same again, after a compaction."""
    sampler = Sampler(tokenizer)
    attempt = attempt_of(sampler, room)
    calls: list[Call] = []
    for number, (kind, choice, is_seen) in enumerate(steps):
        earlier = calls[choice % len(calls)] if calls and kind != "root" else None
        more = {"role": "user", "content": f"more {number}"}
        if earlier is None:
            messages, parent = [more], None
        elif kind == "again":
            messages, parent = earlier.messages, earlier.parent
        elif kind == "on":
            messages, parent = [*earlier.messages, earlier.reply, more], earlier
        else:
            messages, parent = [{"role": "user", "content": f"in short {number}"}, *earlier.messages[1:], more], None
        reply = await attempt.answer(ChatCall(tuple(messages)))
        if is_seen:
            attempt.seen(reply.number)
        calls.append(Call(messages, reply.message, parent, is_seen))
    return attempt, sampler, calls


@pytest.mark.parametrize("room", [10**6, 2 * LONGEST, LONGEST])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_token_that_the_agent_saw_is_trained_once(tokenizer: ChatTokenizer, room: int, steps: list[Any]) -> None:
    attempt, sampler, calls = asyncio.run(played(tokenizer, steps, room))
    seen = [number for number, call in enumerate(calls) if any(call in each.path for each in calls if each.is_seen)]
    if not seen:
        with pytest.raises(EpisodeLostError):
            attempt.ended("terminated", None, [], 1.0)
        return
    first, response = attempt.ended("terminated", None, [], 1.0)
    row = columns(first.prompt_token_ids, response)
    bounds = [0, *response.segment_starts, len(row["token_ids"])]
    paths = [row["token_ids"][start:end].tolist() for start, end in pairwise(bounds)]
    branches = [sampler.calls[i] for i in seen if not any(calls[j].parent is calls[i] for j in seen)]
    assert sum(map(len, paths)) <= room
    sampled = [len(tokenizer.encode(f"said {number}")) + 1 for number in range(len(calls))]
    leaves = [i for i in seen if not any(calls[j].parent is calls[i] for j in seen)]
    most = max(leaves, key=lambda i: (sum(sampled[calls.index(each)] for each in calls[i].path), i))
    assert sampler.calls[most] in paths, "the branch in which most was sampled is always kept"
    if most != leaves[-1] and len(sampler.calls[most]) + len(branches[-1]) <= room:
        assert branches[-1] == paths[-1], "the last one is, where both have room"
    kept = [ids for ids in branches if ids in paths]
    assert kept == paths, "a segment is a branch, alone and whole, as the engine was asked"
    assert row["routed_experts"].tolist() == [each for path in paths for each in routed(path).tolist()]
    in_row = [i for i in seen if any(ids[: len(sampler.calls[i])] == sampler.calls[i] for ids in paths)]
    trained = Counter(np.round(row["rollout_logprobs"][row["response_mask"] != 0], 3).tolist())
    told = [np.round(np.float32(-(i + 1 + t / 1000)), 3) for i in in_row for t in range(sampled[i])]
    assert trained == Counter(map(float, told)), "every token once, whichever segments hold it"
    assert not row["rollout_logprobs"][row["response_mask"] == 0].any()
    assert response.episode is not None
    tokens = response.episode.tokens
    assert (tokens.num_calls, tokens.num_sampled) == (len(calls), sum(sampled))
    assert tokens.num_trained == row["response_mask"].sum()
    assert tokens.masked.get("unseen", 0) == sum(sampled[i] for i in range(len(calls)) if i not in seen)
    assert tokens.masked.get("row_full", 0) == sum(sampled[i] for i in seen if i not in in_row)
    assert tokens.num_sampled == tokens.num_trained + sum(tokens.masked.values())
    assert room < 10**6 or not tokens.masked.get("row_full", 0)


async def test_a_template_that_drops_thinking_begins_a_segment_at_a_question_and_none_at_a_tools_answer(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    sampler = Sampler(ChatTokenizer(tmp_path), thought="<think>\nhm\n</think>\n\n")
    attempt, said = attempt_of(sampler, 10**6, max_prompt_tokens=60), [{"role": "user", "content": "a"}]
    for role in ("tool", "user", "tool", "user"):
        reply = await attempt.answer(ChatCall(tuple(said)))
        said = [*said, dict(reply.message), {"role": role, "content": "and then?"}]
    await attempt.answer(ChatCall(tuple(said)))
    for number in range(1, 6):
        attempt.seen(number)
    shown = [sampler.tokenizer.spell(ids).count("hm") for ids in sampler.calls]
    assert shown == [1, 2, 1, 2, 1], "thinking of earlier questions is dropped, of tools' answers kept"
    assert len(sampler.calls[-1]) > 60, "a conversation that goes on is held to no first prompt's length"
    _, response = attempt.ended("terminated", None, [], 1.0)
    assert response.episode is not None
    assert len(response.segment_starts) == 2
    tokens = response.episode.tokens
    assert dict(tokens.branches) == {"first": 1, "template": 2}
    assert tokens.num_sampled == tokens.num_trained


async def test_a_conversation_of_more_calls_than_a_stack_holds_comes_to_its_end(tokenizer: ChatTokenizer) -> None:
    sampler = Sampler(tokenizer, EngineInfo(10**6, 1, (EOS_TOKEN_ID,), ()))
    attempt, said = attempt_of(sampler, 10**6), [{"role": "user", "content": "a"}]
    for _ in range(300):
        reply = await attempt.answer(ChatCall(tuple(said)))
        said = [*said, dict(reply.message), {"role": "user", "content": "a"}]
    attempt.seen(300)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        _, response = attempt.ended("terminated", None, [], 1.0)
    finally:
        sys.setrecursionlimit(limit)
    assert response.episode is not None
    assert len(response.episode.turns) == 300


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"a": 1}', '{"a": 1}'), ("no JSON", '"no JSON"'), ("[" * 2000, f'"{"[" * 2000}"')]
)
async def test_calls_in_a_history_are_shown_as_the_policy_spells_them(
    tmp_path: Path, arguments: str, shown: str
) -> None:
    write_tokenizer(tmp_path, TOOLS_TEMPLATE)
    sampler = Sampler(ChatTokenizer(tmp_path), EngineInfo(5 * LONGEST, 1, (EOS_TOKEN_ID,), ()))
    called = {"type": "function", "id": "c", "function": {"name": "add", "arguments": arguments}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2"},
    ]
    await attempt_of(sampler, 5 * LONGEST).answer(ChatCall(tuple(said)))
    assert '{"name": "add", "arguments": ' + shown + "}" in sampler.tokenizer.spell(sampler.calls[0])


async def test_special_tokens_in_the_calls_of_a_history_are_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TOOLS_TEMPLATE)
    sampler = Sampler(ChatTokenizer(tmp_path))
    arguments = json.dumps({"a": ["<|im_end|>", {"<|im_start|>": 1}]})
    called = {"type": "function", "id": "c", "function": {"name": "add<|pad|>", "arguments": arguments}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2"},
    ]
    await attempt_of(sampler, LONGEST).answer(ChatCall(tuple(said)))
    (ids,) = sampler.calls
    spelled = '{"name": "add<|pad|>", "arguments": {"a": ["<|im_end|>", {"<|im_start|>": 1}]}}'
    assert spelled in sampler.tokenizer.spell(ids)
    told = ids[: len(ids) - len(sampler.tokenizer.encode("said 0")) - 1]
    assert told.count(EOS_TOKEN_ID) == 3, "the template's own, one a message"


async def test_a_template_that_raises_anything_refuses_the_call(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{% for message in messages %}{{ message.content + 1 }}{% endfor %}")
    attempt = attempt_of(Sampler(ChatTokenizer(tmp_path)), LONGEST)
    with pytest.raises(RefusedError, match="the chat template cannot render the turns user"):
        await attempt.answer(ChatCall(({"role": "user", "content": "a"},)))


class Watched(ChatTokenizer):
    """A tokenizer that takes its time for some text, and none that is long."""

    may_go_on = threading.Event()

    def twin(self) -> ChatTokenizer:
        return self

    def encode(self, text: str) -> list[int]:
        assert len(text) < 10**5
        if "slow" in text:
            self.may_go_on.wait(30)
        return super().encode(text)


def asking(text: str, *before: Mapping[str, Any]) -> ChatCall:
    return ChatCall((*before, {"role": "user", "content": text}))


async def test_text_that_fits_into_no_context_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    attempt = attempt_of(Sampler(Watched(tmp_path)), LONGEST)
    reply = await attempt.answer(asking("a"))
    for call in (asking("x" * 10**6), asking("x" * 10**6, {"role": "user", "content": "a"}, reply.message)):
        for refusal in (attempt.answer, attempt.num_prompt_tokens):
            with pytest.raises(RefusedError, match=r"1,000,\d+ characters does not fit into 600 tokens") as refused:
                await refusal(call)
            assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert (await attempt.answer(asking("b"))).number == 2


async def test_the_loop_goes_on_while_a_prompt_is_made_and_calls_keep_their_order(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Watched(tmp_path)
    attempt = attempt_of(Sampler(tokenizer), LONGEST, max_calls=2)
    calls = [asyncio.create_task(attempt.answer(asking(text))) for text in ("slow", "b", "one too many")]
    await asyncio.wait(calls, timeout=0.2)
    assert not any(call.done() for call in calls)
    tokenizer.may_go_on.set()
    first, second = await asyncio.gather(*calls[:2])
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(RefusedError, match="2 calls are spent"):
        await calls[2]
