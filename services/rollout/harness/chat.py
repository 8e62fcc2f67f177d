"""OpenAI's chat completions as plain values: what a client asks, and what it is answered. Pure functions.

Owns which fields of a request are read, refused or left unheeded: the run's own sampling settings rule, whatever a
client asks. Knows no server and no tokens.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

MODEL = "policy"
"""Name of the policy at the endpoint, whatever was asked for."""
UNHEEDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "min_tokens",
    "response_format",
    "logprobs",
    "top_logprobs",
    "tool_choice",
)
"""Fields that would change what is sampled, or tell more of it; they are left unheeded, and said so once."""
ChatMessage: TypeAlias = Mapping[str, Any]
"""A message as chat templates are given it, in the one form in which two are compared."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RefusedError(Exception):
    """An answer to a client that is no completion: a status that SDKs do not repeat, and OpenAI's code for why."""

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
    """Whether a stream ends with the numbers of tokens."""
    unheeded: tuple[str, ...] = ()
    """Fields it came with that are left unheeded."""


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


def read_call(body: bytes) -> ChatCall:
    """The call in the body of a request. RefusedError says what cannot be answered."""
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half a character, too, which no tokenizer reads
        raise _bad(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _bad("the body is no object")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message")
    if fields.get("n") not in (None, 1):
        raise _bad("n must be 1: ask again for another answer")
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise _bad("max_completion_tokens must be a whole number of at least 1")
    options = fields.get("stream_options") or {}
    return ChatCall(
        messages=tuple(_message(message) for message in messages),
        tools=tuple(_tool(tool) for tool in _listed(fields, "tools")),
        max_tokens=limit,
        streams=bool(fields.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        unheeded=tuple(name for name in UNHEEDED if fields.get(name) is not None),
    )


def as_key(value: Any) -> str:
    """The text by which messages, or tools, are compared."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def completion(reply: Reply) -> dict[str, Any]:
    """The answer to a call that does not stream."""
    choice = {"index": 0, "message": _shown(reply), "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply, *, wants_usage: bool) -> Iterator[dict[str, Any]]:
    """The answer to a call that streams: who speaks, what is said, why it ended, and the numbers of tokens."""
    head = _head(reply, "chat.completion.chunk")
    said = _shown(reply)
    calls = [{**call, "index": index} for index, call in enumerate(said.pop("tool_calls", []))]
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    if said["content"]:
        deltas.append(({"content": said["content"]}, None))
    if calls:
        deltas.append(({"tool_calls": calls}, None))
    deltas.append(({}, reply.finish_reason))
    for delta, finish_reason in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        yield {**head, "choices": [choice]}
    if wants_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def refusal(error: RefusedError) -> dict[str, Any]:
    """The body of an answer that is no completion."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def models() -> dict[str, Any]:
    """The answer to who is there."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rolecall"}]}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": 0, "model": MODEL}


def _shown(reply: Reply) -> dict[str, Any]:
    return {**reply.message, "refusal": None}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }


def _message(message: Any) -> ChatMessage:
    if not isinstance(message, dict):
        raise _bad("a message is no object")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise _bad(f"messages of the role {message.get('role')!r} are not known; there are {', '.join(_ROLES)}")
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    if calls := _listed(message, "tool_calls"):
        read["tool_calls"] = [_call(call) for call in calls]
    if message.get("tool_call_id"):
        read["tool_call_id"] = str(message["tool_call_id"])
    return read


def _content(content: Any) -> str:
    """Text, of parts one after another."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad("the content of a message is neither text nor parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise _bad(f"a part of a message is {kind!r}, and this release reads text alone")
        texts.append(part["text"])
    return "".join(texts)


def _listed(fields: Mapping[str, Any], name: str) -> list[Any]:
    listed = fields.get(name) or []
    if not isinstance(listed, list):
        raise _bad(f"{name} is no list")
    return listed


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad("a call of a tool names no function")
    arguments = function.get("arguments")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments if isinstance(arguments, str) else "{}"},
    }


def _tool(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad("a tool is no function with a name; others are not known")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise _bad(f"the parameters of the tool {function['name']!r} are no object")
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise _bad(f"the parameters of the tool {function['name']!r} are no JSON Schema: {error.message}") from error
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            "parameters": parameters,
        },
    }


def _bad(message: str) -> RefusedError:
    return RefusedError(400, "invalid_request", message)
