"""Calls of tools in what a policy said: read by a parser, held to the session's tools.

Owns what of a turn is a call, and what makes one malformed: that is the policy's fault, is answered in words and never
reaches the environment. Which parser reads a model's calls, `environments.*.tool_parser` names; that it reads what the
run's chat template shows is tried once, at the start. Bound: a call is held to its tool's schema by MAX_CHECKS quick
checks, for the rollout's loop waits meanwhile; what they do not see, the tool answers.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Check: TypeAlias = Callable[..., Iterable[ValidationError] | None]
"""A check of one keyword, as jsonschema has it: validator, the keyword's value, the instance, the schema."""
OPENS, CLOSES = "<think>", "</think>"
"""How a policy's thinking begins, in what it says or at the end of its prompt, and how it ends."""
MAX_CHECKS = 50_000
"""Keywords that are looked at in the arguments of one call, for about a second. A schema that refers to itself may
ask for twice as many with each level of the arguments.
"""
_UNHEEDED = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")
"""Keywords that are not looked at: Python's regular expressions may take for ever, and the last two match them, too."""
_TURNING = ("not", "oneOf", "if", "contains", "disallow")
"""Keywords that may refuse arguments because something within them fits."""
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
                f"environments.*.tool_parser: {parser} does not read what the chat template shows as a call, "
                f"{shown!r}; name the parser of the model's family"
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
        self._fits: dict[str, _Fit] = {}
        for tool in tools:
            function = tool["function"]
            problem = schema_problem(function["parameters"])
            if problem:
                raise EpisodeLostError(
                    f"the input_schema of the environment's tool {function['name']!r} is no JSON Schema: {problem}"
                )
            self._fits[function["name"]] = _Fit(function["parameters"])

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
        fit = self._fits.get(name)
        if fit is None:
            return f"There is no tool {name!r}; there are {', '.join(sorted(self._fits))}."
        try:
            value = json.loads(arguments)
            if not isinstance(value, dict):
                return f"The arguments of {name} are no object."
            # what no JSON has, numbers that are not finite and half characters, reaches no environment
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            fit.validate(value)
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


class _TooManyChecksError(Exception):
    """Arguments need more than MAX_CHECKS."""


class _Fit:
    """The fit of arguments to a schema that is one, as far as it is seen soon. Used from one thread."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        draft = _draft(schema)
        checks = {**draft.VALIDATORS, "uniqueItems": _unique}
        own = json.loads(json.dumps(schema), object_hook=_of_no_draft)
        # an empty registry: references to elsewhere are not followed
        self._validator = extend(draft, {name: self._bounded(name, check) for name, check in checks.items()})(
            own, registry=Registry()
        )
        self._num_left = 0
        """Checks that may still be made."""
        self._num_unheeded = 0
        """Keywords that were not looked at."""

    def validate(self, value: Any) -> None:
        """ValidationError says what does not fit; Unresolvable, RecursionError, ArithmeticError."""
        self._num_left = MAX_CHECKS
        try:
            self._validator.validate(value)
        except _TooManyChecksError:
            logger.debug("a call of a tool has more arguments than are looked at")

    def _bounded(self, name: str, check: Check) -> Check:
        """A check of the keyword `name` that counts, and finds nothing where that depends on what is not looked at."""

        def checked(validator: Any, wanted: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
            self._num_left -= 1
            if self._num_left < 0:
                raise _TooManyChecksError
            if name in _UNHEEDED or (name == "additionalProperties" and "patternProperties" in schema):
                self._num_unheeded += 1
                return
            num_unheeded = self._num_unheeded
            errors = check(validator, wanted, value, schema) or ()
            if name in _TURNING:
                errors = [*errors]
                if self._num_unheeded > num_unheeded:
                    return
            yield from errors

        return checked


def _unique(_: Any, wanted: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    """The check of uniqueItems by the items' texts; jsonschema compares each with each."""
    if wanted and isinstance(value, list) and len({json.dumps(each, sort_keys=True) for each in value}) < len(value):
        yield ValidationError(f"{value!r} has non-unique elements")


def _of_no_draft(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema without `$schema`, by which jsonschema would take a validator of its own for it."""
    return {name: value for name, value in part.items() if name != "$schema" or not isinstance(value, str)}


def _draft(schema: Mapping[str, Any]) -> Any:
    """The validator of the draft that a schema names; of the newest where it names none that is known."""
    named = schema if isinstance(schema.get("$schema"), str) else {}
    return validator_for(named, default=Draft202012Validator)


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
