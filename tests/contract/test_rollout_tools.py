"""Calls of tools in episodes: the real replica, store, client and server around an engine that says what a test wrote.

What vLLM's parsers make of a text, tests/integration/test_tool_parsers.py holds; here a few lines stand for one.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Agent, Answer, Env, Message, Opening, Task, Tool
from rolecall.environment.client import open_environment
from rolecall.errors import ConfigError, EpisodeLostError
from rolecall.settings import EnvironmentSection, RpcSection
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import trajectory_pb2
from services.rollout.episodes import Episodes, EpisodeSettings
from services.rollout.groups import MixedGroups
from services.rollout.harness.endpoint import Endpoint
from services.rollout.replica import Replica
from services.rollout.sampling import SampleRequest
from services.rollout.scripted import ScriptedEngine
from services.rollout.turns.observations import Observations
from services.rollout.turns.prompts import PromptThread
from services.rollout.turns.tool_calls import Heard, ReadCalls, ToolCalls, ToolSchema
from tests.contract.environment_peers import environment
from tests.contract.rollout_replica import ReplicaUnderTest, replica_under_test
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import EOS_TOKEN_ID, TOOLS_TEMPLATE, write_tokenizer

ADD = Tool(
    "add",
    "Adds two whole numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
LARGE = 2**60 + 1


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(text: str, tools: Sequence[ToolSchema]) -> list[tuple[str, str]]:
    """A stand-in for vLLM's parser: all calls or none."""
    try:
        found = [json.loads(body) for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        return [(each["name"], json.dumps(each["arguments"])) for each in found]
    except (ValueError, KeyError):
        return []


class Saying(ScriptedEngine):
    """A scripted engine that says one text in each turn, the last one again."""

    def __init__(self, tokenizer: ChatTokenizer, texts: Sequence[str]) -> None:
        super().__init__(eos_token_id=EOS_TOKEN_ID, max_model_tokens=4000)
        self._ids = [[*tokenizer.encode(text), EOS_TOKEN_ID] for text in texts]

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        turn = int(request.request_id.rpartition(".")[2])
        return self._ids[min(turn, len(self._ids)) - 1][position], -0.5


class Adder(Env):
    """An environment that adds, and ends with the first turn that calls nothing. It keeps what it heard."""

    heard: list[Action] = []

    def reset(self, task: Task, seed: int) -> Opening:
        return Opening("how much?", tools=(ADD,))

    def step(self, action: Action) -> Answer:
        Adder.heard.append(action)
        if not action.tool_calls:
            return Answer(reward=1.0, is_over=True)
        sums = [int(each.arguments["a"]) + int(each.arguments["b"]) for each in action.tool_calls]
        return Answer([Message("tool", str(value)) for value in sums])

    def grade(self) -> float:
        return 0.25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, TOOLS_TEMPLATE)
    Adder.heard = []
    return tmp_path


@asynccontextmanager
async def rollout(
    store: StoreUnderTest,
    folder: Path,
    texts: Sequence[str],
    make: Callable[[], Env] = Adder,
    reads: ReadCalls = read,
    **settings: Any,
) -> AsyncIterator[ReplicaUnderTest]:
    tokenizer = ChatTokenizer(folder)
    sizes = {
        "responses_per_group": 4,
        "max_prompt_tokens": 400,
        "max_turns": 16,
        "max_row_tokens": 10**5,
        "max_malformed": 3,
        "max_attempts": 3,
        "max_image_bytes": 0,
    }
    chosen = EpisodeSettings(run="test", environment="game", **{**sizes, "budget_s": 60.0, **settings})
    runs_episodes = isinstance(make, type) and issubclass(make, Agent)
    async with environment(make, roles=("user", "tool"), runs_episodes=runs_episodes) as (address, _):

        def sampler(replica: Replica) -> MixedGroups:
            client = open_environment(EnvironmentSection(address=address), RpcSection())
            endpoint = Endpoint("127.0.0.1:0", RpcSection(), host=None)
            prompts = PromptThread(tokenizer, replica.info.max_model_tokens)
            uncut = Observations(prompts.tokenizer, None, "middle")
            episodes = Episodes(
                chosen,
                replica,
                client,
                tokenizer,
                ToolCalls(tokenizer, reads, "test"),
                endpoint,
                prompts,
                uncut,
                lambda *_: None,
            )
            return MixedGroups(replica, {"game": episodes}, endpoint.close)

        engine = Saying(tokenizer, texts)
        async with replica_under_test(
            store, folder, engine, lease_s=1.5, sampler=sampler, environment="game"
        ) as replica:
            yield replica


async def played(store: StoreUnderTest, under_test: ReplicaUnderTest) -> list[trajectory_pb2.TrajectoryMeta]:
    """The metas of one group."""
    under_test.admit(1, max_tokens=2000)
    await under_test.publish(1)
    (group,) = await under_test.committed(1)
    return store.rows.read_meta(group.rows)


MARKED_TEMPLATE = (
    "{% set last = namespace(asked=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.role == 'assistant' and loop.index0 < last.asked %}{{ 'then: ' }}{% endif %}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<|pad|> ' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template whose calls a special token marks, and which shows turns before a question otherwise."""


def read_marked(text: str, tools: Sequence[ToolSchema]) -> list[tuple[str, str]]:
    """Reads calls as that template shows them."""
    found = [json.loads(body) for body in text.removesuffix("<|im_end|>").split("<|pad|>")[1:]]
    return [
        (each["name"], each["arguments"] if isinstance(each["arguments"], str) else json.dumps(each["arguments"]))
        for each in found
    ]


class Asking(Adder):
    """It answers a call as a tool, and asks on."""

    def step(self, action: Action) -> Answer:
        answer = super().step(action)
        if answer.is_over:
            return answer
        assert isinstance(answer.messages, list)
        return Answer([*answer.messages, Message("user", "and now?")])


async def test_calls_that_special_tokens_mark_are_shown_again_in_a_segment(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, MARKED_TEMPLATE)
    tokenizer, marked = ChatTokenizer(tmp_path), '<|pad|> {"name": "add", "arguments": {"a": 1, "b": 2}}'
    texts = [f"I call {marked}", f"{marked}{marked}", "3"]
    async with rollout(store, tmp_path, texts, Asking, reads=read_marked) as under_test:
        under_test.admit(1, max_tokens=2000)
        await under_test.publish(1)
        (group,) = await under_test.committed(1)
        (row, *_), (meta, *_) = store.rows.read(group.rows, SAMPLED_COLUMNS), store.rows.read_meta(group.rows)
    assert dict(meta.episode.tokens.branches) == {"first": 1, "template": 2}
    *_, start = group.rows[0].segment_starts
    shown = tokenizer.spell(row["token_ids"][start:].tolist())
    assert f"assistant\nthen: I call {marked}<|im_end|>" in shown, "what was said, and its call with its mark"
    assert f"assistant\nthen: {marked}{marked}<|im_end|>" in shown
    spoken = [message.content for message in meta.episode.messages if message.role == "assistant"]
    assert spoken[0] == 'I call  {"name": "add", "arguments": {"a": 1, "b": 2}}', "as people read it"


async def test_calls_reach_the_environment_and_its_answers_the_policy(store: StoreUnderTest, folder: Path) -> None:
    texts = [f"Let me see. {call(a=1, b=2)}\n{call(a=LARGE, b=0)}", "It is 3."]
    async with rollout(store, folder, texts) as under_test:
        metas = await played(store, under_test)
    for meta in metas:
        assert [(said.role, said.content) for said in meta.episode.messages] == [
            ("user", "how much?"),
            ("assistant", texts[0]),
            ("tool", "3"),
            ("tool", str(LARGE)),
        ], "whole numbers stay whole"
        assert (meta.response_text, meta.episode.ended_by) == ("It is 3.", "terminated")
        assert (meta.episode.num_tool_calls, meta.episode.num_malformed) == (2, 0)
        assert meta.episode.reward.value == 1.0
    assert all(action.text in texts for action in Adder.heard)


async def test_the_row_is_the_templates_rendering_with_the_tools_in_the_prompt(
    store: StoreUnderTest, folder: Path
) -> None:
    texts = [call(a=1, b=2), "3"]
    tokenizer = ChatTokenizer(folder)
    async with rollout(store, folder, texts) as under_test:
        under_test.admit(1, max_tokens=2000)
        await under_test.publish(1)
        (group,) = await under_test.committed(1)
        function = {"name": ADD.name, "description": ADD.description, "parameters": ADD.input_schema}
        tools = [{"type": "function", "function": function}]
        for row, meta in zip(
            store.rows.read(group.rows, ("token_ids",)), store.rows.read_meta(group.rows), strict=True
        ):
            said = [{"role": each.role, "content": each.content} for each in meta.episode.messages]
            said.append({"role": "assistant", "content": meta.response_text})
            oracle = tokenizer.render(said, generate=False, tools=tools).removesuffix("\n")
            assert tokenizer.spell(row["token_ids"].tolist()) == oracle


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>\n{"name": "add", ', "The call after <tool_call> could not be read."),
        (call("sub", a=1, b=2), "There is no tool 'sub'; there are add."),
        (call(a=1), "The arguments of add do not fit: 'b' is a required property."),
        (call(a=1, b="two"), "The arguments of add do not fit: 'two' is not of type 'integer'."),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "The arguments of add are no object."),
    ],
)
async def test_a_malformed_call_is_answered_in_words_and_never_reaches_the_environment(
    store: StoreUnderTest, folder: Path, text: str, words: str
) -> None:
    async with rollout(store, folder, [text, call(a=2, b=2), "4"]) as under_test:
        metas = await played(store, under_test)
    for meta in metas:
        said = [(each.role, each.content) for each in meta.episode.messages]
        assert said[1:] == [("assistant", text), ("tool", words), ("assistant", call(a=2, b=2)), ("tool", "4")]
        assert (meta.episode.num_malformed, meta.episode.num_tool_calls, len(meta.episode.turns)) == (1, 1, 3)
        assert meta.episode.ended_by == "terminated"
    assert all(action.text != text for action in Adder.heard)


async def test_three_in_a_row_end_the_episode_graded_as_it_stands(store: StoreUnderTest, folder: Path) -> None:
    async with rollout(store, folder, ["<tool_call>", "<tool_call>", call(a=1, b=1), "<tool_call>"]) as under_test:
        metas = await played(store, under_test)
    for meta in metas:
        assert (len(meta.episode.turns), meta.episode.num_malformed) == (6, 5), "two, then a good one, then three"
        assert meta.episode.ended_by == "malformed"
        assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert meta.episode.reward.value == 0.25


def test_a_parser_that_does_not_read_what_the_template_shows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="xml does not read what the chat template shows as a call, '<tool_call>"):
        ToolCalls(ChatTokenizer(folder), lambda text, tools: [], "xml")


ASKS, THINKS = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"


def heard_of(folder: Path, text: str, tool: Tool = ADD, read: ReadCalls = read, prompt: str = ASKS) -> Heard:
    """What is heard of a turn."""
    tokenizer = ChatTokenizer(folder)
    schema = {"name": tool.name, "description": "", "parameters": tool.input_schema}
    session = ToolCalls(tokenizer, read, "test").of_session([{"type": "function", "function": schema}])
    return session.hear(tokenizer.encode(prompt), tokenizer.encode(text), is_cut=True)


def heard(folder: Path, text: str, tool: Tool = ADD, read: ReadCalls = read) -> str:
    """What the policy is told of a turn."""
    return heard_of(folder, text, tool, read).problem


@pytest.mark.parametrize(
    ("prompt", "text", "sums"),
    [
        (ASKS, f"<think>\nI could {call(a=1, b=1)}, and won't.\n</think>\n\nIt is 2.", []),
        (ASKS, "<think>\nNo <tool_call> here.\n</think>\n\nIt is 2.", []),
        (ASKS, f"<think>\n{call(a=1, b=1)}\n</think>\n\n{call(a=2, b=2)}", [2]),
        (ASKS, f"<think>\n{call(a=1, b=1)}", []),
        (ASKS, f"<think>\nhm\n</think>\n<think>\n{call(a=1, b=1)}", []),
        (THINKS, f"I could {call(a=1, b=1)}.\n</think>\n\n{call(a=2, b=2)}", [2]),
        (THINKS, call(a=1, b=1), []),
        (f"{THINKS}\n</think>\n\n", call(a=1, b=1), [1]),
        ("<|im_start|>user\n<think><|im_end|>\n" + ASKS, call(a=1, b=1), [1]),
        (ASKS, f"I use <think> tags. {call(a=1, b=1)}", [1]),
    ],
)
def test_what_is_thought_calls_nothing(folder: Path, prompt: str, text: str, sums: list[int]) -> None:
    found = heard_of(folder, text, prompt=prompt)
    assert [json.loads(each.arguments)["a"] for each in found.calls] == sums
    assert not found.problem


def test_arguments_may_speak_of_thinking(folder: Path) -> None:
    for text in ("<think>", "split at </think> here"):
        for before in ("", "<think>\nhm\n</think>\n\n"):
            found = heard_of(folder, before + call(text=text), Tool("add", "", {"type": "object"}))
            assert [json.loads(each.arguments) for each in found.calls] == [{"text": text}]


def test_a_turn_is_shown_again_with_its_thoughts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, MARKED_TEMPLATE)
    thought, marked = "<think>\nno <|pad|> yet\n</think>\n\n", '<|pad|> {"name": "add", "arguments": {"a": 1, "b": 2}}'
    found = heard_of(tmp_path, f"{thought}I call {marked}", read=read_marked)
    assert found.told is not None
    assert found.told["content"] == f"{thought}I call "
    assert len(found.told["tool_calls"]) == len(found.calls) == 1


def test_a_parser_that_raises_and_arguments_without_end_are_the_policys_fault(folder: Path) -> None:
    def raising(text: str, tools: Sequence[ToolSchema]) -> list[tuple[str, str]]:
        if "a text that nobody foresaw" in text:
            raise IndexError
        return read(text, tools)

    def nested(text: str, tools: Sequence[ToolSchema]) -> list[tuple[str, str]]:
        return [("add", "[" * 100_000)] if "deep" in text else read(text, tools)

    assert heard(folder, "a text that nobody foresaw", read=raising) == "The call could not be read."
    assert heard(folder, "deep", read=nested).startswith("The arguments of add are too deep")
    price = Tool("price", "", {"type": "object", "properties": {"of": {"type": "number", "multipleOf": 0.01}}})
    large = '<tool_call>\n{"name": "price", "arguments": {"of": %s}}\n</tool_call>'
    assert heard(folder, large % ("1" * 400), price).startswith("The arguments of price are too deep")
    assert heard(folder, large % "1e999", price).startswith("The arguments of price are no JSON")
    assert heard(folder, large % '"\\ud83d"', price).startswith("The arguments of price are no JSON")
    assert not heard(folder, large % "0.25", price)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "a thing"}, "is no JSON Schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "refers to nothing"),
        ({"$schema": 5}, "is no JSON Schema"),
    ],
)
def test_a_tool_whose_schema_is_none_is_the_environments_fault(
    folder: Path, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(EpisodeLostError, match=words):
        heard(folder, call(a=1), Tool("add", "", schema))


DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 7))
NO_PYTHON = {"type": "string", "pattern": r"^\p{L}+$"}
PAIR = {"type": "array", "items": [{"type": "number"}, {"type": "number"}]}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"$schema": DRAFT_7, "properties": {"a": PAIR}}, [1, 2], [1, "two"]),
        ({"$schema": DRAFT_4, "properties": {"a": {"minimum": 0, "exclusiveMinimum": True}}}, 1, 0),
        ({"$schema": "urn:of:nobody", "properties": {"a": {"type": "string"}}}, "b", 1),
        ({"properties": {"a": NO_PYTHON}}, "é", 1),
        ({"$schema": DRAFT_7, "properties": {"a": NO_PYTHON}}, "1", 1),
        ({"properties": {"a": {"anyOf": [NO_PYTHON, {"$ref": "#/$defs/b"}]}}, "$defs": {"b": NO_PYTHON}}, "1", 1),
        ({"properties": {"a": {"type": "object", "patternProperties": {r"\p{L}": False}}}}, {"b": 1}, 1),
    ],
)
def test_schemas_are_of_their_own_draft_and_patterns_of_another_language_hold_nobody(
    folder: Path, schema: dict[str, Any], fits: Any, does_not: Any
) -> None:
    tool = Tool("add", "", {"type": "object", **schema})
    assert not heard(folder, call(a=fits), tool)
    assert "The arguments of add do not fit" in heard(folder, call(a=does_not), tool)


def test_a_part_of_another_draft_with_a_pattern_of_another_language_raises_nothing(folder: Path) -> None:
    part = {"$schema": DRAFT_7, **NO_PYTHON}
    assert not heard(folder, call(a="1"), Tool("add", "", {"type": "object", "properties": {"a": part}}))


MAIL = r"^([a-zA-Z0-9_\.\-])+\@(([a-zA-Z0-9\-])+\.)+([a-zA-Z0-9]{2,4})+$"
"""A pattern of addresses, much copied, that takes Python twice as long with each letter but one."""
ARGS = {"items": {"$ref": "#/$defs/f"}}
FILTER: dict[str, Any] = {
    "anyOf": [{"properties": {"op": {"const": "a"}, "args": ARGS}}, {"properties": {"args": ARGS}}]
}
"""A schema that looks at what lies within twice, at each level."""


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "string", "pattern": MAIL}, f"bob@example.{'a' * 80}!"),
        ({"$schema": DRAFT_7, "type": "string", "pattern": MAIL}, f"bob@example.{'a' * 80}!"),
        ({"patternProperties": {MAIL: False}}, {f"bob@example.{'a' * 80}!": 1}),
        ({"patternProperties": {MAIL: False}, "additionalProperties": False}, {f"bob@example.{'a' * 80}!": 1}),
        (
            {"allOf": [{"patternProperties": {MAIL: False}}], "unevaluatedProperties": False},
            {f"bob@example.{'a' * 80}!": 1},
        ),
        ({"$ref": "#/$defs/f"}, json.loads('{"op": "b", "args": [' * 30 + "1" + "]}" * 30)),
        ({"type": "array", "uniqueItems": True}, [{"a": number} for number in range(10_000)]),
    ],
)
def test_a_schema_that_would_take_for_ever_holds_nobody_up_and_leaves_the_answer_to_the_tool(
    folder: Path, part: dict[str, Any], value: Any
) -> None:
    tool = Tool("add", "", {"type": "object", "properties": {"a": part}, "$defs": {"f": FILTER}})
    assert not heard(folder, call(a=value), tool)


@pytest.mark.parametrize(
    "part",
    [
        {"not": {"pattern": "^x"}},
        {"not": {"not": {"pattern": "^y"}}},
        {"oneOf": [{"pattern": "^x"}, {"pattern": "^y"}]},
        {"if": {"pattern": "^x"}, "then": {"minLength": 9}},
    ],
)
def test_what_would_not_fit_because_a_pattern_does_arrives(folder: Path, part: dict[str, Any]) -> None:
    tool = Tool("add", "", {"type": "object", "properties": {"a": {"type": "string", **part}}})
    assert not heard(folder, call(a="y"), tool)
    assert "do not fit" in heard(folder, call(a=1), tool)


def test_items_are_unique_by_what_they_say(folder: Path) -> None:
    tool = Tool("add", "", {"type": "object", "properties": {"a": {"uniqueItems": True}}})
    assert not heard(folder, call(a=[1, True, "1", {"a": 1}, {"a": 2}]), tool)
    assert "non-unique" in heard(folder, call(a=[{"a": 1, "b": 2}, {"b": 2, "a": 1}]), tool)
