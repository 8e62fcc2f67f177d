"""Calls of tools in what a policy said: read by a parser, held to the session's tools.

Owns what of a turn is a call, and what makes one malformed: that is the policy's fault, is answered in words and never
reaches the environment. Which parser reads a model's calls, `environment.tool_parser` names; that it reads what the
run's chat template shows is tried once, at the start.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from rolecall.data.continuation import PROBE_CALL, PROBE_TOOL, ChatMessage, mark_of, shown_call
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, EpisodeLostError
from rolecall.v1 import environment_pb2

logger = logging.getLogger(__name__)

ToolSchema: TypeAlias = Mapping[str, Any]
"""A tool as chat templates are given it: {"type": "function", "function": {name, description, parameters}}."""
ReadCalls: TypeAlias = Callable[[str, Sequence[ToolSchema]], list[tuple[str, str]]]
"""Reads the calls of these tools in a text, special tokens included, as (name, JSON text of its arguments)."""
OPENS, CLOSES = "<think>", "</think>"
"""How a policy's thinking begins, in what it says or at the end of its prompt, and how it ends."""
_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that say whether it opens thinking."""


@dataclass(frozen=True)
class Heard:
    """The calls of one turn, or why they cannot be read."""

    calls: tuple[environment_pb2.ToolCall, ...] = ()
    problem: str = ""
    """What the policy is told in place of an answer; empty: nothing is wrong."""
    told: ChatMessage | None = None
    """The turn as chat templates are given it, where special tokens mark its calls, which its text has not; None: its
    text says it all.
    """


class ToolCalls:
    """The reader of calls for one run's parser and template."""

    def __init__(self, tokenizer: ChatTokenizer, read: ReadCalls, parser: str) -> None:
        """ConfigError when `read`, which is named `parser`, does not read the calls that the template shows."""
        self._tokenizer = tokenizer
        self._read = read
        shown = shown_call(tokenizer)
        self._marker = mark_of(shown)
        """How the template begins a call; None: it shows none, and text that is no call is text."""
        if shown and _plain(read(shown, [PROBE_TOOL])) != [PROBE_CALL]:
            raise ConfigError(
                f"environment.tool_parser: {parser} does not read what the chat template shows as a call, {shown!r}; "
                "name the parser of the model's family"
            )

    def of_session(self, tools: Sequence[ToolSchema]) -> "SessionCalls":
        """The reader of one session's calls."""
        return SessionCalls(self._tokenizer, self._read, self._marker, tools)


class SessionCalls:
    """The reader of the calls of one session's tools."""

    def __init__(
        self, tokenizer: ChatTokenizer, read: ReadCalls, marker: str | None, tools: Sequence[ToolSchema]
    ) -> None:
        """EpisodeLostError when the schema of a tool is none: whoever shows it is to blame, not the policy."""
        self._tokenizer = tokenizer
        self._read = read
        self._marker = marker
        self._tools = tools
        self._validators: dict[str, Any] = {}
        for tool in tools:
            function = tool["function"]
            problem = schema_problem(function["parameters"])
            if problem:
                raise EpisodeLostError(
                    f"the input_schema of the environment's tool {function['name']!r} is no JSON Schema: {problem}"
                )
            self._validators[function["name"]] = _validator(function["parameters"])

    def hear(self, prompt: Sequence[int], token_ids: Sequence[int], *, is_cut: bool) -> Heard:
        """The calls in a turn that was sampled from `prompt` as `token_ids`, whose last one ended it unless it
        `is_cut`. What was thought calls nothing.
        """
        text = self._tokenizer.spell(token_ids if is_cut else token_ids[:-1])
        said = self._said(prompt, text)
        try:
            calls = self._read(said, self._tools)
        except Exception as error:  # the entry point of a parser that is not ours, at text that nobody foresaw
            logger.warning("a parser of tool calls raised %r", error)
            return Heard(problem="The call could not be read.")
        if not calls and self._marker is not None and self._marker in said:
            return Heard(problem=f"The call after {self._marker} could not be read.")
        for name, arguments in calls:
            problem = self._problem(name, arguments)
            if problem:
                return Heard(problem=problem)
        found = tuple(environment_pb2.ToolCall(name=name, arguments=arguments) for name, arguments in calls)
        if not found or self._marker is None or self._marker not in said:
            return Heard(found)
        is_lost = self._marker not in self._tokenizer.decode(token_ids)
        content = text.removesuffix(said) + said.partition(self._marker)[0]
        return Heard(found, told=_told(content, calls) if is_lost else None)

    def _said(self, prompt: Sequence[int], text: str) -> str:
        """The part of a turn behind its thinking; empty where that was never closed."""
        thinks = self._tokenizer.spell(prompt[-_TAIL_TOKENS:]).rstrip().endswith(OPENS)
        while thinks or text.lstrip().startswith(OPENS):
            thinks = False
            _, _, text = text.partition(CLOSES)
        return text

    def _problem(self, name: str, arguments: str) -> str:
        """Returns what the policy is told of a call that no tool can take; empty for one that can be taken."""
        validator = self._validators.get(name)
        if validator is None:
            return f"There is no tool {name!r}; there are {', '.join(sorted(self._validators))}."
        try:
            value = json.loads(arguments)
            if not isinstance(value, dict):
                return f"The arguments of {name} are no object."
            # what no JSON has, numbers that are not finite and half characters, reaches no environment
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            validator.validate(value)
        except (ArithmeticError, RecursionError):
            return f"The arguments of {name} are too deep, or their numbers too large."
        except ValueError as error:
            return f"The arguments of {name} are no JSON: {error}."
        except ValidationError as error:
            return f"The arguments of {name} do not fit: {error.message}."
        except Unresolvable as error:
            raise EpisodeLostError(
                f"the schema of the environment's tool {name!r} refers to nothing: {error}"
            ) from error
        return ""


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Returns why a schema is no JSON Schema; None when it is one."""
    return _schema_problem(json.dumps(schema, sort_keys=True))


@lru_cache(maxsize=1024)  # an agent shows its tools at each call, and a check takes milliseconds
def _schema_problem(schema: str) -> str | None:
    try:
        # no format is looked at: a pattern may be one of another language
        _draft(value := json.loads(schema)).check_schema(value, format_checker=FormatChecker(formats=()))
    except SchemaError as error:
        return str(error.message)
    except RecursionError:
        return "it is nested too deeply"
    return None


def _validator(schema: Mapping[str, Any]) -> Any:
    """The validator of arguments by a schema that is one. A keyword with a pattern that is none of Python's is left
    unheeded.
    """
    draft = _draft(schema)
    lenient = extend(draft, {name: _lenient(check) for name, check in draft.VALIDATORS.items()})
    own = {name: value for name, value in schema.items() if name != "$schema"}  # by which jsonschema takes its own
    return lenient(own, registry=Registry())  # an empty registry: references to elsewhere are not followed


def _draft(schema: Mapping[str, Any]) -> Any:
    """The validator of the draft that a schema names; of the newest where it names none that is known."""
    named = schema if isinstance(schema.get("$schema"), str) else {}
    return validator_for(named, default=Draft202012Validator)


def _lenient(check: Callable[..., Iterator[ValidationError] | None]) -> Callable[..., Iterator[ValidationError]]:
    """A check of a keyword that finds nothing where a pattern cannot be compiled."""

    def checked(*args: Any) -> Iterator[ValidationError]:
        try:
            yield from check(*args) or ()
        except re.error as error:
            logger.debug("a pattern of a tool's schema is left unheeded: %s", error)

    return checked


def tool_schemas(tools: Sequence[environment_pb2.Tool]) -> list[ToolSchema]:
    """The tools of a session, which the client believed, as chat templates are given them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.input_schema),
            },
        }
        for tool in tools
    ]


def _told(content: str, calls: Sequence[tuple[str, str]]) -> ChatMessage:
    """A turn that said `content` and then made these calls, as chat templates are given it."""
    shown = [
        # nine letters and digits: there are templates that take no other id
        {"type": "function", "id": f"call{number:05}", "function": {"name": name, "arguments": json.loads(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": shown}


def _plain(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]
