"""vLLM's own parsers of tool calls behind ours: what a model family spells is read, held to the tools, or told as
malformed.
"""

from pathlib import Path
from typing import Any

import pytest

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from services.rollout.turns.tool_calls import Heard
from tests.tiny_tokenizer import CHAT_TEMPLATE, EOS_TOKEN_ID, TOOLS_TEMPLATE, write_tokenizer

_JSON = "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}"
_XML = (
    "'<function=' + call.function.name + '>\n' }}{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\n' + value + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}"
)
XML_TEMPLATE = TOOLS_TEMPLATE.replace(_JSON, _XML)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)


def hear(folder: Path, parser: str, template: str, text: str) -> Heard:
    """What is heard of a turn that said `text`."""
    from services.rollout.turns.vllm_parsers import tool_calls_of  # seconds of imports, not for those who only collect

    write_tokenizer(folder, template)
    tokenizer = ChatTokenizer(folder)
    session = tool_calls_of(parser, tokenizer).of_session([ADD])
    return session.hear((), [*tokenizer.encode(text), EOS_TOKEN_ID], is_cut=False)


@pytest.mark.parametrize(
    ("parser", "template", "text"),
    [
        ("hermes", TOOLS_TEMPLATE, f"Let me see.\n{JSON_CALL}"),
        ("qwen3_json", TOOLS_TEMPLATE, f"{JSON_CALL}\n{JSON_CALL}"),
        ("qwen3_coder", XML_TEMPLATE, f"Let me see.\n{XML_CALL}"),
        ("pythonic", CHAT_TEMPLATE, "[add(a=1, b=2)]"),
    ],
)
def test_a_familys_calls_are_read_by_its_parser(tmp_path: Path, parser: str, template: str, text: str) -> None:
    heard = hear(tmp_path, parser, template, text)
    assert not heard.problem
    assert {(call.name, call.arguments.replace(" ", "")) for call in heard.calls} == {("add", '{"a":1,"b":2}')}
    assert len(heard.calls) == max(1, text.count("<tool_call>"))


@pytest.mark.parametrize(
    ("parser", "template", "text", "words"),
    [
        ("hermes", TOOLS_TEMPLATE, '<tool_call>\n{"name": "add"', "The call after <tool_call> could not be read."),
        ("hermes", TOOLS_TEMPLATE, JSON_CALL.replace("add", "sub"), "There is no tool 'sub'; there are add."),
        ("qwen3_coder", XML_TEMPLATE, XML_CALL.replace("2", "two"), "do not fit: 'two' is not of type 'integer'."),
    ],
)
def test_what_is_no_call_of_a_tool_is_told(tmp_path: Path, parser: str, template: str, text: str, words: str) -> None:
    heard = hear(tmp_path, parser, template, text)
    assert words in heard.problem
    assert not heard.calls


@pytest.mark.parametrize("text", ["It is 3.", "{}"])
def test_text_is_no_call(tmp_path: Path, text: str) -> None:
    assert hear(tmp_path, "hermes", TOOLS_TEMPLATE, text) == Heard()


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        ("qwen3_coder", "qwen3_coder does not read what the chat template shows as a call, '<tool_call>"),
        ("openai", "openai cannot be used: GptOssToolParser is a stub"),
        ("mistral", "mistral cannot be used: "),
        ("none_such", "none_such cannot be used: "),
    ],
)
def test_parsers_that_do_not_fit_are_refused_at_the_start(tmp_path: Path, parser: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hear(tmp_path, parser, TOOLS_TEMPLATE, "")
