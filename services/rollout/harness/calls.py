"""Calls of the policy and its answers as plain values, and what every dialect reads of a request alike.

Owns which fields are left unheeded: the run's own sampling settings rule, whatever a client asks. A dialect is a file
that translates: a request's body to a ChatCall, a Reply to what its clients expect. Knows no server and no tokens.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from services.rollout.turns.tool_calls import schema_problem

MODEL = "policy"
"""Name of the policy at the endpoint, whatever was asked for."""
ChatMessage: TypeAlias = Mapping[str, Any]
"""A message as chat templates are given it, in the one form in which two are compared. Its content is text, or a list
of parts where it shows images, each of which says the digest of its file.
"""
Files: TypeAlias = dict[str, bytes]
"""The files of images by their digest."""
ImageOf: TypeAlias = Callable[[Mapping[str, Any]], bytes | None]
"""The reader of a dialect's own parts: the file of an image, None for a part that is none."""
DIGEST = "digest"
"""Name under which a part that is an image says the digest of its file."""
Event: TypeAlias = tuple[str, Any]
"""An event of a stream: its name, empty for none, and what goes with it: text, or a value for JSON."""


class RefusedError(Exception):
    """An answer to a client that is none of the policy: a status that SDKs do not repeat, and OpenAI's code for why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class ChatCall:
    """One call of the policy."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that it shows the policy, as chat templates are given them."""
    max_tokens: int | None = None
    """Most tokens that the client wants."""
    streams: bool = False
    wants_usage: bool = False
    """Whether a stream of chat completions ends with the numbers of tokens."""
    unheeded: tuple[str, ...] = ()
    """Fields it came with that are left unheeded."""
    num_instructions: int = 0
    """Messages at its beginning that a call which names it as its previous one does not take over."""
    is_stored: bool = True
    """Whether a later call may name it as its previous one."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The files of the images that came with it, by their digest."""


@dataclass(frozen=True)
class Reply:
    """An answer of the policy to one call."""

    number: int
    """Number of the call within its episode, from 1 on."""
    message: ChatMessage
    """The message that later calls must have to go on from it."""
    finish_reason: str
    """"stop", "length" or "tool_calls"."""
    num_prompt_tokens: int
    num_tokens: int

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools in it, each with id and function."""
        return list(self.message.get("tool_calls", ()))


Answered: TypeAlias = Mapping[int, tuple[ChatCall, Reply]]
"""The calls of an episode that were answered, by their number."""


class Dialect(Protocol):
    """A translation between what clients of one API send and read, and the policy's calls and answers."""

    def read(self, body: bytes, answered: Answered) -> ChatCall:
        """The call in the body of a request. RefusedError says what cannot be answered."""
        ...

    def whole(self, call: ChatCall, reply: Reply) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def events(self, call: ChatCall, reply: Reply) -> Iterator[Event]:
        """The answer as a stream."""
        ...

    def refusal(self, error: RefusedError) -> dict[str, Any]:
        """The body of an answer that is none of the policy."""
        ...

    def failure(self, error: RefusedError) -> Event:
        """The same in a stream that has begun."""
        ...


def bad(message: str) -> RefusedError:
    """A request that cannot be answered however often it is made."""
    return RefusedError(400, "invalid_request", message)


def as_key(value: Any) -> str:
    """The text by which messages, or tools, are compared."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def fields_of(body: bytes) -> dict[str, Any]:
    """The object in a body. RefusedError where there is none."""
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half a character, too, which no tokenizer reads
        raise bad(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise bad("the body is no object")
    return fields


def listed(fields: Mapping[str, Any], name: str) -> list[Any]:
    """A field that is a list, empty where it is absent. RefusedError where it is something else."""
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise bad(f"{name} is no list")
    return value


def at_least_one(fields: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is set, a whole number of at least 1; None where none is. RefusedError where it is
    something else.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise bad(f"{name} must be a whole number of at least 1")
        return value
    return None


def set_of(fields: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns which of these names have a field that is set."""
    return tuple(name for name in names if fields.get(name) is not None)


def text_of(content: Any, kinds: tuple[str, ...]) -> str:
    """Text, of parts of these kinds one after another. RefusedError for any other part."""
    text = content_of(content, kinds, lambda _: None, {})
    assert isinstance(text, str)
    return text


def content_of(content: Any, kinds: tuple[str, ...], image_of: ImageOf, files: Files) -> str | list[Mapping[str, str]]:
    """Text, of parts of these kinds one after another; or parts, texts and images in turn, where `image_of` finds an
    image among them. Adds its file to `files`. RefusedError for any other part.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad("the content of a message is neither text nor parts")
    parts, texts = list[Mapping[str, str]](), list[str]()
    for part in [*content, None]:
        file = image_of(part) if isinstance(part, dict) else None
        if file is None and part is not None:
            texts.append(_text(part, kinds))
            continue
        if file is not None or parts:
            text, texts = "".join(texts), []
            parts += [{"type": "text", "text": text}] if text else []
        if file is not None:
            digest = hashlib.sha256(file).hexdigest()
            files[digest] = file
            parts.append({"type": "image", DIGEST: digest})
    return parts or "".join(texts)


def digests_of(message: ChatMessage) -> list[str]:
    """The digests of the images that a message shows, in order."""
    content = message["content"]
    return [] if isinstance(content, str) else [part[DIGEST] for part in content if DIGEST in part]


def file_in(url: Any) -> bytes:
    """The file in a URL of the kind data:image/png;base64,... RefusedError for any other: nothing is fetched."""
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise bad(
            f"an image is given as {str(url)[:80]!r}: send the file itself, as data:image/png;base64,... (nothing is "
            "fetched here)"
        )
    return file_of(data)


def file_of(data: Any) -> bytes:
    """The bytes in base64. RefusedError where it is none."""
    try:
        file = base64.b64decode(data, validate=True) if isinstance(data, str) else b""
    except ValueError as error:
        raise bad(f"an image is no base64: {error}") from error
    if not file:
        raise bad("an image has no data")
    return file


def _text(part: Any, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(part.get("text"), str):
        raise bad(f"a part of a message is {kind!r}, which is not read here; text is, and images of a user or a tool")
    return str(part["text"])


def call_id(number: int, index: int) -> str:
    """The id of a call of a tool: the number of the policy's call, and its place in the answer. Nine letters and
    digits, for there are templates that take no other id.
    """
    return f"c{number:05}x{index:02}"


def called(id: Any, name: Any, arguments: Any, answered: Answered) -> dict[str, Any]:
    """A call of a tool as messages have it; `arguments`: JSON text. The policy's own words where the call is one of the
    policy's with the same value, for clients read a value and write it in their own way.
    """
    if not isinstance(name, str):
        raise bad("a call of a tool names no function")
    text = arguments if isinstance(arguments, str) else "{}"
    number = number_in(id, "c")
    for call in answered[number][1].tool_calls if number in answered else ():
        said = call["function"]
        if (call["id"], said["name"]) == (id, name) and _value_key(said["arguments"]) == _value_key(text):
            return call
    return {"id": str(id or ""), "type": "function", "function": {"name": name, "arguments": text}}


def _value_key(text: str) -> str:
    """The text by which values are compared: their numbers alone, so that 1.0 is 1. What is no JSON is itself."""
    try:
        return as_key(json.loads(text, parse_float=_number))
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def shown_tool(name: Any, description: Any, parameters: Any) -> Mapping[str, Any]:
    """A tool as chat templates are given it. RefusedError for one without a name or with a schema that is none."""
    if not isinstance(name, str):
        raise bad("a tool is no function with a name; others are not known")
    schema = parameters or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise bad(f"the parameters of the tool {name!r} are no object")
    problem = schema_problem(schema)
    if problem:
        raise bad(f"the parameters of the tool {name!r} are no JSON Schema: {problem}")
    return {
        "type": "function",
        "function": {"name": name, "description": str(description or ""), "parameters": schema},
    }


def number_in(id: Any, kind: str) -> int:
    """The number of the call that an id names which was made of it, as 3 in "resp_3" of the kind "resp_"; 0 for any
    other. Ids of calls of tools, "c00003x00", are of the kind "c".
    """
    found = re.fullmatch(rf"{kind}([0-9]{{1,9}})(x[0-9]+)?", id) if isinstance(id, str) else None
    return int(found[1]) if found else 0
