"""Conversations of `rolecall sft`: the tokens and masks of the episodes that they are, and what is refused.

The slow oracle is a rollout's own tree of turns (services/rollout/turns/tree.py), played turn by turn by a policy whose
words are spelled by hand, template by template.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall.data.continuation import Continuation
from rolecall.data.conversations import Conversations, parse_conversation
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.rollout.replica import Response
from services.rollout.sampling import Sample, SampleRequest, VersionSpan
from services.rollout.trajectories import columns
from services.rollout.turns.tool_calls import ToolCalls
from services.rollout.turns.tree import Tree, TurnPrompt
from tests.tiny_tokenizer import (
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    QWEN3_TEMPLATE,
    THINKING_TEMPLATE,
    TOOLS_TEMPLATE,
    write_tokenizer,
)

Message: TypeAlias = dict[str, Any]

LONGEST = 10**6
LLAMA = (
    "{% for message in messages %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}"
    "{% endif %}{% set function = message.tool_calls[0].function %}"
    "{{ '<|im_start|>assistant\n\n' + ({'name': function.name, 'parameters': function.arguments} | tojson) }}"
    "{% else %}{{ '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\n\n' }}"
    "{% if tools and loop.first %}{{ (tools | tojson) + '\n' }}{% endif %}{{ message.content | trim }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
"""Like Llama 3.1's: a turn is a text, without the space around it, or one call."""
MISTRAL = (
    "{% set last = namespace(asked=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ (' ' + message.content) if message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<|pad|>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% else %}{% if tools and loop.index0 == last.asked %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}"
    "{{ '<|im_start|>[' + message.role + ']' + message.content + '[/]' }}{% endif %}{% endfor %}"
)
"""Like Mistral's: a special token marks calls, a text begins with a space, tools stand before the last question."""


def hermes(said: Message) -> str:
    return str(said["content"]) + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls_of(said))


def qwen3(said: Message) -> str:
    text = "\n".join([*filter(None, [said["content"]]), *(f"<tool_call>\n{x}\n</tool_call>" for x in calls_of(said))])
    return f"<think>\n{said.get('reasoning_content', '')}\n</think>\n\n{text}"


def llama(said: Message) -> str:
    return next(iter(calls_of(said, "parameters")), said["content"].strip())


def mistral(said: Message) -> str:
    return (f" {said['content']}" if said["content"] else "") + "".join(f"<|pad|>{call}" for call in calls_of(said))


def calls_of(said: Message, arguments: str = "arguments") -> list[str]:
    functions = [call["function"] for call in said.get("tool_calls", [])]
    spoken = [{"name": each["name"], arguments: json.loads(each["arguments"])} for each in functions]
    return [json.dumps(each, ensure_ascii=False) for each in spoken]


@dataclass(frozen=True)
class Family:
    """A chat template, and how a policy of its family writes."""

    template: str
    spell: Callable[[Message], str]
    call: str
    """What a call stands in, as a regular expression."""
    thinks: bool = False
    is_either: bool = False
    """Whether a turn is a text or one call."""
    kwargs: str = "{}"


FAMILIES = {
    "hermes": Family(TOOLS_TEMPLATE, hermes, r"<tool_call>\n(.*?)\n</tool_call>"),
    "qwen3": Family(QWEN3_TEMPLATE, qwen3, r"<tool_call>\n(.*?)\n</tool_call>", thinks=True),
    "qwen3, not thinking": Family(
        QWEN3_TEMPLATE,
        lambda said: qwen3(said).partition("</think>\n\n")[2],
        r"<tool_call>\n(.*?)\n</tool_call>",
        kwargs='{"enable_thinking": false}',
    ),
    "llama": Family(LLAMA, llama, r'(\{"name".*\})', is_either=True),
    "mistral": Family(MISTRAL, mistral, r"<\|pad\|>(\{[^|]*\})"),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("look", "add")
]


@dataclass(frozen=True)
class Rig:
    """The template of a family in a tokenizer."""

    family: Family
    tokenizer: ChatTokenizer
    conversations: Conversations
    continuation: Continuation

    @staticmethod
    def of(folder: Path, family: Family) -> "Rig":
        write_tokenizer(folder, family.template)
        tokenizer = ChatTokenizer(folder, json.loads(family.kwargs))
        return Rig(family, tokenizer, Conversations(tokenizer, EOS_TOKEN_ID), Continuation(tokenizer))

    def trained(self, messages: list[Message], tools: Sequence[Any] = TOOLS) -> list[dict[str, Array]]:
        return [each.columns() for each in self.conversations.segments(*parse_conversation(messages, tools, "line 1"))]

    def spelled(self, messages: list[Message], tools: Sequence[Any] = TOOLS) -> list[list[str]]:
        """What is trained of each segment, in runs."""
        found = []
        for segment in self.trained(messages, tools):
            mask, ids = segment["loss_mask"], segment["token_ids"]
            cuts = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
            found.append([self.tokenizer.spell(ids[cut].tolist()) for cut in cuts if mask[cut[0]]])
        return found

    def played(self, messages: list[Message], tools: Sequence[Any]) -> list[dict[str, Array]]:
        """The segments of the episode in which the policy says what the assistant says here."""
        own = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        first = SampleRequest("r", (), trajectory_pb2.SamplingParams(temperature=1, max_tokens=LONGEST), 1)
        tree = Tree(first, self.continuation, LONGEST, own)
        reader = ToolCalls(self.tokenizer, self._read, "test").of_session(tools) if tools else None
        told: tuple[Message, ...] = tuple(messages[:own])
        prompt, shown = TurnPrompt(None, told, tree.rendered(told, tools), LONGEST, "first"), told
        for index, message in enumerate(messages):
            if index < own or message["role"] != "assistant":
                continue
            ids = (*self.tokenizer.encode(self.family.spell(message)), EOS_TOKEN_ID)
            number, _ = tree.request(prompt, len(ids))
            sample = Sample(
                ids,
                np.zeros(len(ids), np.float32),
                (VersionSpan(1, 0, len(ids)),),
                trajectory_pb2.FINISH_REASON_STOP,
                None,
            )
            turn = tree.sampled(number, prompt, Response(sample, {1: "d"}, 0.1), self.tokenizer.decode(ids))
            turn.is_seen = True
            heard = []
            for each in messages[index + 1 :]:
                if each["role"] == "assistant":
                    break
                heard.append(each)
            turn.calls_told = reader.hear(prompt.token_ids, ids, is_cut=False).told if reader is not None else None
            said = {"role": "assistant", "content": turn.text}
            shown = (*shown, dict(turn.told), *heard)
            if heard:
                prompt = tree.after(turn, (*prompt.messages, said, *heard), tools, shown)
        request, response = tree.ended("terminated", None, turn_rewards=False, row_messages=[], generation_s=0.0)
        row = columns(list(request.prompt_token_ids), response)
        return [
            dict(zip(row, parts, strict=True))
            for parts in zip(*(np.split(row[name], response.segment_starts) for name in row), strict=True)
        ]

    def _read(self, text: str, tools: Sequence[Any]) -> list[tuple[str, str]]:
        found = [json.loads(call) for call in re.findall(self.family.call, text)]
        return [(each["name"], json.dumps(each.get("arguments", each.get("parameters")))) for each in found]


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig.of(tmp_path_factory.mktemp("tokenizer"), FAMILIES[request.param])


WORDS = st.lists(st.sampled_from(["a", "é", "b c", "{", "\n", "x"]), max_size=4).map("".join).map(str.strip)
HEARD = st.lists(st.sampled_from(["a", "<|im_end|>", "<|im_start|>", " ", "é", "\n", "[/]"]), max_size=4).map("".join)
ANSWERS = st.lists(st.tuples(st.sampled_from(["user", "tool"]), HEARD), min_size=1, max_size=2)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "add"]), st.dictionaries(st.just("x"), WORDS)), max_size=2)
TURNS = st.lists(st.tuples(WORDS, WORDS, CALLS, ANSWERS), min_size=1, max_size=5)


def call(name: str, arguments: str = "{}") -> Message:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, asked=HEARD, with_tools=st.booleans())
def test_a_conversation_is_the_episode_in_which_the_policy_said_it(
    rig: Rig, turns: list[Any], asked: str, with_tools: bool
) -> None:
    messages: list[Message] = [{"role": "user", "content": f"{asked}?"}]
    for text, thought, calls, answers in turns:
        made = calls[:1] if rig.family.is_either else calls
        said: Message = {"role": "assistant", "content": text or ("" if made and with_tools else "said")}
        if made and with_tools:
            said["tool_calls"] = [call(name, json.dumps(arguments)) for name, arguments in made]
            said["content"] = "" if rig.family.is_either else said["content"]
        if rig.family.thinks and thought:
            said["reasoning_content"] = thought
        messages += [said, *({"role": role, "content": content} for role, content in answers)]
    del messages[-len(turns[-1][3]) :]
    tools = TOOLS if with_tools else []
    found, expected = rig.trained(messages, tools), rig.played(messages, tools)
    assert [segment["token_ids"].tolist() for segment in found] == [each["token_ids"].tolist() for each in expected]
    for name in ("loss_mask", "response_mask"):
        assert [each[name].tolist() for each in found] == [each["response_mask"].tolist() for each in expected]


def rig_of(folder: Path, template: str, spell: Callable[[Message], str] = hermes) -> Rig:
    return Rig.of(folder, Family(template, spell, "(?!)"))


def asked(*more: Message) -> list[Message]:
    return [{"role": "user", "content": "a"}, *more]


def said(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def test_the_loss_is_on_every_turn_of_the_assistant_and_its_end(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, TOOLS_TEMPLATE)
    talk = asked(
        said("b", tool_calls=[call("add", '{"x": 1}')]), {"role": "tool", "content": "2"}, said("c"), *asked(said("d"))
    )
    (turns,) = rig.spelled(talk)
    made = '\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    assert turns == [f"b{made}<|im_end|>", "c<|im_end|>", "d<|im_end|>"]
    (segment,) = rig.trained(talk)
    shown = [{**each, "content": each["content"] + (made if "tool_calls" in each else "")} for each in talk]
    whole = rig.tokenizer.render([{k: m[k] for k in ("role", "content")} for m in shown], generate=False, tools=TOOLS)
    assert rig.tokenizer.spell(segment["token_ids"].tolist()) == whole.removesuffix("\n"), (
        "all that stands between is context"
    )


def test_a_turn_of_weight_0_is_context(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, CHAT_TEMPLATE)
    assert rig.spelled(asked(said("b", weight=0), *asked(said("c", weight=1))), []) == [["c<|im_end|>"]]


def test_thinking_is_trained_where_it_was_thought_though_the_template_drops_it_later(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, THINKING_TEMPLATE)
    thought = "<think>\nhm\n</think>\n\n"
    talk = asked(
        said(f"{thought}b"), {"role": "tool", "content": "t"}, said(f"{thought}c"), *asked(said(f"{thought}d"))
    )
    assert rig.spelled(talk, []) == [
        [f"{thought}b<|im_end|>", f"{thought}c<|im_end|>"],
        [f"{thought}d<|im_end|>"],
    ], "a segment for each question"
    first, second = rig.trained(talk, [])
    assert rig.tokenizer.spell(first["token_ids"].tolist()).count("hm") == 2
    assert rig.tokenizer.spell(second["token_ids"].tolist()).count("hm") == 1


def test_segments_in_which_nothing_is_trained_are_left_out(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, THINKING_TEMPLATE)
    thought = "<think>\nhm\n</think>\n\n"
    assert len(rig.trained(asked(said(f"{thought}b", weight=0), *asked(said(f"{thought}c"))), [])) == 1


def test_a_model_that_ends_by_another_token_than_the_template_is_trained_on_its_own(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, CHAT_TEMPLATE)
    base = Conversations(rig.tokenizer, end=0)
    (segment,) = base.segments(*parse_conversation(asked(said("b"), *asked(said("c"))), None, "line 1"))
    assert "b<|pad|><|im_end|>\n<|im_start|>user" in rig.tokenizer.spell(segment.token_ids), "as a rollout has it"


@pytest.mark.parametrize(
    ("template", "turn", "words"),
    [
        (CHAT_TEMPLATE, said("b"), r"does not show the tools \['look', 'add'\]"),
        (LLAMA, said("b", tool_calls=[call("add")]), "message 2: the chat template does not show all of the turn, 'b'"),
        (LLAMA, said("", tool_calls=[call("add")] * 2), "one call at a time"),
        (TOOLS_TEMPLATE, said("b", reasoning_content="hm"), "does not show all of the turn, 'hm'"),
        (TOOLS_TEMPLATE, said("b<|im_end|>c"), "spells the token that ends it"),
        (TOOLS_TEMPLATE.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}"),
         said("<think>hm</think>b"), "does not show all of the turn"),
        (TOOLS_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}"), said("b"), "otherwise than it begins"),
        (TOOLS_TEMPLATE.replace("</tool_call>'", "</tool_call><|pad|>'").replace("'<|im_end|>\n' }}{% endfor %}",
         "('' if message.tool_calls else '<|im_end|>') + '\n' }}{% endfor %}"),
         said("", tool_calls=[call("add")]), "ends the turn otherwise"),
    ],
    ids=["tools", "text beside a call", "two calls", "reasoning", "an end", "thinking", "an opened thought", "its end"],
)  # fmt: skip
def test_a_turn_whose_tokens_cannot_be_told_is_refused(
    tmp_path: Path, template: str, turn: Message, words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        rig_of(tmp_path, template).trained(asked(turn))


@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        ([said("b")], None, "begins with a turn of the assistant"),
        (asked(said("b"), said("c")), None, "messages 2 and 3 are both the assistant's"),
        (asked(said("b", weight=0)), None, "no turn of the assistant is trained"),
        (asked(said("b", weight=2)), None, "message 2: its weight is 2; write 0"),
        (asked(said(" ")), None, "message 2: its content is no text"),
        (asked(said("b", reasoning_content=1)), None, "message 2: its reasoning_content is no text"),
        (asked({"role": "tool", "content": [{"type": "image"}]}, said("b")), None, "message 2: its content is no text"),
        ([{"content": "a"}, said("b")], None, "message 1: not {role: text"),
        (asked({"role": "user", "content": "a", "tool_calls": [1]}, said("b")), None, "the assistant's alone"),
        (asked(said("", tool_calls=["add"])), TOOLS, "message 2: a call is not {function"),
        (asked(said("", tool_calls=[call("add", "x=1")])), TOOLS, "message 2: the arguments 'x=1' are no JSON"),
        (asked(said("", tool_calls=[call("add", "[1]")])), TOOLS, "message 2: a call is not {function"),
        (
            asked(said("", tool_calls=[call("sub")])),
            TOOLS,
            r"calls 'sub', which is none of the tools \['look', 'add'\]",
        ),
        (asked(said("", tool_calls=[call("add")])), None, r"none of the tools \[\] of the row's field 'tools'"),
        (asked(said("b")), {"name": "add"}, "field 'tools': a dict, not a list of tools"),
        (asked(said("b")), [{"name": "add"}], "field 'tools': a tool is not {type: function"),
        (asked(said("b")), "[", "field 'tools': no JSON"),
        (asked(said("b")), "[" * 100_000, "field 'tools': no JSON"),
        (asked(said("", tool_calls=[call("add", "[" * 100_000)])), TOOLS, "are no JSON"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(messages: list[Message], tools: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^line 1.*{words}"):
        parse_conversation(messages, tools, "line 1")


def test_rows_of_columns_are_read_too() -> None:
    """Where a column is null because another row has something, and tools are text."""
    talk = asked(said("b", tool_calls=None, weight=None), {"role": "user", "content": "c", "tool_calls": []}, said("d"))
    parsed = parse_conversation(talk, json.dumps(TOOLS), "line 1")
    assert parsed == (tuple(asked(said("b"), {"role": "user", "content": "c"}, said("d"))), TOOLS)
