"""Agents that speak Anthropic's Messages or OpenAI's Responses, by those companies' own clients: what they say goes on
from the engine's own ids as in chat completions, and what is refused they understand.
"""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from rolecall.environment import Agent, Answer, Policy
from tests.contract import test_rollout_tools as tools
from tests.contract.test_rollout_episodes import check_row
from tests.contract.test_rollout_harness import are_conversations, played
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import TOOLS_TEMPLATE, write_tokenizer

LOOK = {"type": "object", "properties": {"for": {"type": "string"}}, "required": ["for"]}
SAID: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def of_anthropic(policy: Policy, **options: Any) -> Anthropic:
    return Anthropic(base_url=policy.base_url.removesuffix("/v1"), api_key=policy.api_key, **options)


def of_openai(policy: Policy, **options: Any) -> OpenAI:
    return OpenAI(base_url=policy.base_url, api_key=policy.api_key, **options)


def message_of(client: Anthropic, said: list[Any], *, streams: bool = False, **fields: Any) -> anthropic.types.Message:
    asked: dict[str, Any] = {"max_tokens": 1000, "model": "any", "messages": said, **fields}
    if not streams:
        answer: anthropic.types.Message = client.messages.create(**asked)
        return answer
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def response_of(client: OpenAI, said: Any, *, streams: bool = False, **fields: Any) -> openai.types.responses.Response:
    if not streams:
        answer: openai.types.responses.Response = client.responses.create(model="any", input=said, **fields)
        return answer
    with client.responses.stream(model="any", input=said, **fields) as stream:
        return stream.get_final_response()


class Talking(Agent):
    """An agent that talks on as often as its seed says, streamed or not."""

    def run(self, policy: Policy) -> float | Answer | None:
        draw = random.Random(self.seed)
        self.num_turns, self.streams = draw.randint(1, 6), draw.random() < 0.5
        words = [f"talk {self.num_turns}", *(f"go on {turn}" for turn in range(1, self.num_turns))]
        self.talk(policy, words)
        return self.num_turns / 8

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        raise NotImplementedError


class OfMessages(Talking):
    """By Anthropic's client."""

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        said: list[Any] = []
        with of_anthropic(policy) as client:
            for text in words:
                said.append({"role": "user", "content": text})
                answer = message_of(client, said, streams=self.streams)
                assert answer.stop_reason in ("end_turn", "max_tokens")
                assert answer.usage.output_tokens > 0
                said.append({"role": "assistant", "content": answer.content})


class OfBearer(Talking):
    """By Anthropic's client with a bearer token, and blocks of text."""

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        said: list[Any] = []
        root = policy.base_url.removesuffix("/v1")
        with Anthropic(base_url=root, auth_token=policy.api_key, api_key=None) as client:
            for text in words:
                said.append({"role": "user", "content": [{"type": "text", "text": text}]})
                answer = message_of(
                    client, said, thinking={"type": "enabled", "budget_tokens": 1024}, extra_body={"top_k": 1}
                )
                said.append({"role": "assistant", "content": answer.content})


class OfItems(Talking):
    """By OpenAI's Responses, each time with all that was said."""

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        said: list[Any] = []
        with of_openai(policy) as client:
            for text in words:
                said.append({"role": "user", "content": text})
                answer = response_of(client, said, streams=self.streams, store=False)
                assert answer.status in ("completed", "incomplete")
                said += answer.output


class OfChain(Talking):
    """By OpenAI's Responses, each naming the one before."""

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        before: Any = None
        with of_openai(policy) as client:
            for text in words:
                answer = response_of(client, text, streams=self.streams, previous_response_id=before)
                before = answer.id


class OfReferences(Talking):
    """By OpenAI's Responses, naming items that are stored in place of sending them."""

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        said: list[Any] = []
        with of_openai(policy) as client:
            for text in words:
                said.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
                answer = response_of(client, said)
                said += [{"type": "item_reference", "id": item.id} for item in answer.output]


class OfAll(Talking):
    """By each client in turns: one conversation all the same."""

    def talk(self, policy: Policy, words: Sequence[str]) -> None:
        said: list[Any] = []
        with of_openai(policy) as client, of_anthropic(policy) as other:
            for turn, text in enumerate(words):
                said.append({"role": "user", "content": text})
                if turn % 3 == 0:
                    chosen = client.chat.completions.create(model="any", messages=said)
                    heard = chosen.choices[0].message.content or ""
                elif turn % 3 == 1:
                    heard = response_of(client, said).output_text
                else:
                    heard = "".join(block.text for block in message_of(other, said).content if block.type == "text")
                said.append({"role": "assistant", "content": heard})


@pytest.mark.parametrize("agent", [OfMessages, OfBearer, OfItems, OfChain, OfReferences, OfAll])
async def test_an_agents_row_is_its_conversation_in_every_dialect(
    store: StoreUnderTest, folder: Path, agent: type[Agent]
) -> None:
    are_conversations(await played(store, folder, agent), folder)


# --- tools --------------------------------------------------------------------------------------------


class LooksByMessages(Agent):
    """An agent that looks things up as often as the policy wants, by Anthropic's client."""

    def run(self, policy: Policy) -> float | Answer | None:
        tool: Any = {"name": "look", "description": "Looks.", "input_schema": LOOK}
        said: list[Any] = list(SAID)
        with of_anthropic(policy) as client:
            for turn in range(3):
                system: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": BILLING.format(turn)}]
                counted = client.messages.count_tokens(model="any", messages=said, system=system, tools=[tool])
                answer = message_of(client, said, streams=turn % 2 == 1, tools=[tool], system=system)
                assert counted.input_tokens == answer.usage.input_tokens
                said.append({"role": "assistant", "content": answer.content})
                uses = [block for block in answer.content if block.type == "tool_use"]
                assert (answer.stop_reason == "tool_use") == bool(uses) == (turn < 2)
                found = [{"type": "tool_result", "tool_use_id": use.id, "content": look(use.input)} for use in uses]
                said.append({"role": "user", "content": found})
        return 0.5


BILLING = "x-anthropic-billing-header: cch={};"


class LooksByItems(Agent):
    """The same by OpenAI's Responses, each time with all that was said."""

    def run(self, policy: Policy) -> float | Answer | None:
        said: list[Any] = list(SAID)
        with of_openai(policy) as client:
            for turn in range(3):
                answer = response_of(client, said, streams=turn % 2 == 1, tools=[FUNCTION], instructions="Be brief.")
                said += [*map(self.sent, answer.output), *looked_up(answer)]
                assert bool(looked_up(answer)) == (turn < 2)
        return 0.5

    def sent(self, item: Any) -> Any:
        """An item of an answer as the agent sends it back."""
        return item


class LooksByChain(Agent):
    """The same, each naming the one before, with instructions that hold for one answer alone."""

    def run(self, policy: Policy) -> float | Answer | None:
        said: Any = "hello"
        before: Any = None
        with of_openai(policy) as client:
            for turn in range(3):
                fields: dict[str, Any] = {"tools": [FUNCTION], "instructions": "Be brief."}
                answer = response_of(client, said, streams=turn % 2 == 1, previous_response_id=before, **fields)
                said, before = looked_up(answer), answer.id
        return 0.5


class LooksByChat(Agent):
    """The same by chat completions."""

    def run(self, policy: Policy) -> float | Answer | None:
        said: list[Any] = [{"role": "system", "content": "Be brief."}, *SAID]
        tools: Any = [{"type": "function", "function": {name: FUNCTION[name] for name in FUNCTION if name != "type"}}]
        with of_openai(policy) as client:
            for turn in range(3):
                answer = client.chat.completions.create(model="any", messages=said, tools=tools).choices[0].message
                message = answer.model_dump(exclude_none=True)
                calls = message.get("tool_calls", [])
                assert bool(calls) == (turn < 2)
                assert all(re.fullmatch("[a-z0-9]{9}", each["id"]) for each in calls)
                said.append(message)
                for each in calls:
                    value = json.loads(each["function"]["arguments"])
                    each["function"]["arguments"] = self.written(value)
                    said.append({"role": "tool", "tool_call_id": each["id"], "content": look(value)})
        return 0.5

    def written(self, arguments: Any) -> str:
        """The arguments of a call as the agent sends them back."""
        return json.dumps(arguments)


class WritesChatAnew(LooksByChat):
    """The same as a client in JavaScript: it keeps values, and writes them in its own way."""

    def written(self, arguments: Any) -> str:
        return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)


class WritesItemsAnew(LooksByItems):
    """Such a client of Responses."""

    def sent(self, item: Any) -> Any:
        if item.type != "function_call":
            return item
        arguments = json.dumps(json.loads(item.arguments), separators=(",", ":"), ensure_ascii=False)
        return {**item.model_dump(), "arguments": arguments}


FUNCTION: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": LOOK}


def look(arguments: Any) -> str:
    assert arguments["for"] in ("é", "NaN")
    return f"{arguments['for']} is there"


def looked_up(answer: openai.types.responses.Response) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": look(json.loads(item.arguments))}
        for item in answer.output
        if item.type == "function_call"
    ]


NINE_TEMPLATE = TOOLS_TEMPLATE.replace(
    "{% for call in message.tool_calls or [] %}",
    "{% for call in message.tool_calls or [] %}"
    "{% if call.id | length != 9 or not call.id.isalnum() %}{{ raise_exception('no such id') }}{% endif %}",
)
"""It shows calls whose ids have nine letters and digits, as Mistral's templates do."""


@pytest.mark.parametrize(
    "agent", [LooksByMessages, LooksByItems, LooksByChain, LooksByChat, WritesChatAnew, WritesItemsAnew]
)
async def test_calls_of_tools_go_on_from_the_policys_own_words(
    store: StoreUnderTest, tmp_path: Path, agent: type[Agent]
) -> None:
    write_tokenizer(tmp_path, NINE_TEMPLATE)
    call = tools.call("look", **{"for": "é"})
    texts = [f"Let me see. {call}\n{tools.call('look', **{'for': 'NaN'})}", call, "It is there."]
    async with tools.rollout(store, tmp_path, texts, agent) as rollout:
        for meta in await tools.played(store, rollout):
            tokens = meta.episode.tokens
            assert dict(tokens.branches) == {"first": 1}
            assert tokens.num_calls == len(meta.episode.turns) == 3
            assert tokens.num_sampled == tokens.num_trained
            roles = [said.role for said in meta.episode.messages]
            assert roles[-6:] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
            assert (meta.response_text, meta.episode.num_tool_calls) == ("It is there.", 3)


# --- what is repeated, refused and spent --------------------------------------------------------------


class Impatient(Agent):
    """An agent whose clients give up soon and ask again by themselves, as SDKs do. The same body is another call in
    another dialect.
    """

    def run(self, policy: Policy) -> float | Answer | None:
        with of_anthropic(policy, timeout=0.1, max_retries=50) as client:
            message_of(client, SAID)
        with of_openai(policy, timeout=0.1, max_retries=50) as other:
            response_of(other, SAID)
        body = {"model": "any", "messages": SAID, "max_tokens": 4}
        with httpx.Client(headers={"x-api-key": policy.api_key, "x-stainless-retry-count": "1"}, timeout=60) as both:
            for path in ("messages", "chat/completions"):
                assert both.post(f"{policy.base_url}/{path}", json=body).status_code == 200
        return 0.5


async def test_what_either_sdk_repeats_is_sampled_once(store: StoreUnderTest, folder: Path) -> None:
    for row, meta in await played(store, folder, Impatient, num=1, token_s=0.05, generation_timeout_s=60.0):
        check_row(row, meta)
        assert meta.episode.tokens.num_calls == 4
        assert not meta.episode.tokens.masked, "each of the four is trained"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
OF_MESSAGES: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": SAID, "max_tokens": 0},
    {"messages": [{"role": "robot", "content": "a"}]},
    {"messages": [{"role": "user", "content": [IMAGE]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
    {"messages": [*SAID, {"role": "assistant", "content": "I"}]},
    {"messages": [*SAID, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}, *SAID]},
    {"messages": SAID, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"messages": SAID, "tools": [{"name": "a", "input_schema": {"type": 1}}]},
    {"messages": SAID, "mcp_servers": [{"type": "url"}]},
    {"messages": SAID, "system": [IMAGE]},
    {"messages": SAID, "system": 1},
]
OF_RESPONSES: list[dict[str, Any]] = [
    {"input": []},
    {"input": {}},
    {"input": "a", "background": True},
    {"input": "a", "conversation": "c"},
    {"input": "a", "instructions": ["a"]},
    {"input": "a", "max_output_tokens": "1"},
    {"input": "a", "previous_response_id": "resp_9"},
    {"input": "a", "previous_response_id": 9},
    {"input": "a", "tools": [{"type": "web_search"}]},
    {"input": [1]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"type": "reasoning", "id": "r", "summary": []}]},
    {"input": [{"type": "item_reference", "id": "msg_9"}]},
    {"input": [{"type": "function_call", "call_id": "a"}]},
]


class Refused(Agent):
    """An agent that asks for what nobody gives, and then for more than its budget."""

    def run(self, policy: Policy) -> float | Answer | None:
        with httpx.Client(base_url=policy.base_url, headers={"x-api-key": policy.api_key}, timeout=60) as client:
            for path, bodies in (("/messages", OF_MESSAGES), ("/responses", OF_RESPONSES)):
                for body in bodies:
                    answer = client.post(path, json=body)
                    assert answer.status_code == 400, body
                    assert answer.json()["error"]["message"]
                large = client.post(path, content=b" " * (16 * 2**20 + 1))
                assert (large.status_code, "type" in large.json()) == (413, path == "/messages")
        with of_anthropic(policy) as client, of_openai(policy) as other:
            with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded"):
                message_of(client, [{"role": "user", "content": "x" * 500}])
            assert client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "x" * 500}])
            kept = response_of(other, "hello", store=False)
            with pytest.raises(openai.BadRequestError) as caught:
                response_of(other, "more", previous_response_id=kept.id)
            assert caught.value.code == "previous_response_not_found"
            cut = response_of(other, "hello", max_output_tokens=1)
            assert cut.usage is not None
            assert cut.usage.output_tokens == message_of(client, SAID, max_tokens=1).usage.output_tokens == 1
            with pytest.raises(anthropic.PermissionDeniedError, match="episode_over"):
                message_of(client, SAID)
            with pytest.raises(anthropic.PermissionDeniedError, match="episode_over"):
                message_of(client, SAID, streams=True)
            with pytest.raises(openai.PermissionDeniedError, match="spent"):
                response_of(other, "hello", streams=True)
        with of_anthropic(Policy(policy.base_url, "guessed", "", 1, 1, 1.0)) as client:
            with pytest.raises(anthropic.AuthenticationError):
                message_of(client, SAID)
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.count_tokens(model="any", messages=SAID)
        return 0.5


async def test_what_is_refused_is_said_in_the_dialects_own_words(store: StoreUnderTest, folder: Path) -> None:
    for _, meta in await played(store, folder, Refused, num=1, max_turns=3):
        assert meta.episode.tokens.num_calls == 3
        assert meta.episode.ended_by == "turns"


class Cut(Agent):
    """An agent that wants one word."""

    def run(self, policy: Policy) -> float | Answer | None:
        with of_anthropic(policy) as client, of_openai(policy) as other:
            for streams in (False, True):
                assert message_of(client, SAID, streams=streams, max_tokens=1).stop_reason == "max_tokens"
            cut = response_of(other, "hello", max_output_tokens=1)
            assert cut.incomplete_details is not None
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            with other.responses.create(model="any", input="hello", max_output_tokens=1, stream=True) as events:
                assert [event.type for event in events][-1] == "response.incomplete"
        return 0.5


async def test_an_answer_that_is_cut_says_so(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TOOLS_TEMPLATE)
    async with tools.rollout(store, tmp_path, ["I see."], Cut) as rollout:
        assert {meta.episode.tokens.num_sampled for meta in await tools.played(store, rollout)} == {4}


class Streaming(Agent):
    """An agent that keeps the names of the events of its four streams."""

    kept: list[list[list[str]]] = []

    def run(self, policy: Policy) -> float | Answer | None:
        bodies: dict[str, dict[str, Any]] = {
            "messages": {"messages": SAID, "stream": True, "tools": [{"name": "look", "input_schema": LOOK}]},
            "responses": {"input": "hello", "stream": True, "tools": [FUNCTION]},
        }
        told: list[list[str]] = []
        with httpx.Client(base_url=policy.base_url, headers={"x-api-key": policy.api_key}, timeout=60) as client:
            for path in ("messages", "responses", "messages", "responses"):
                lines = client.post(f"/{path}", json=bodies[path]).text.splitlines()
                data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
                named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
                assert named == [each["type"] for each in data]
                if path == "responses":
                    assert [each["sequence_number"] for each in data] == list(range(len(data)))
                told.append(named)
        self.kept.append(told)
        return 0.5


async def test_streams_are_told_in_the_events_of_their_dialect(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TOOLS_TEMPLATE)
    call = tools.call("look", **{"for": "é"})
    async with tools.rollout(store, tmp_path, ["I see.", "I see.", call], Streaming) as rollout:
        await tools.played(store, rollout)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    of_message = ["message_start", *block, "message_delta", "message_stop"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    of_text, of_call = (
        [f"response.{each}" for each in ("created", "in_progress", "output_item.added", *inside, *END)]
        for inside in (text, arguments)
    )
    assert Streaming.kept == 4 * [[of_message, of_text, of_message, of_call]]


END = ("output_item.done", "completed")
