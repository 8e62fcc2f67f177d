"""OpenAI's chat completions, in which the policy's own calls are written: pure functions."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.rollout.harness.calls import (
    MODEL,
    Answered,
    ChatCall,
    ChatMessage,
    Event,
    Files,
    RefusedError,
    Reply,
    at_least_one,
    bad,
    called,
    content_of,
    fields_of,
    file_in,
    listed,
    set_of,
    shown_tool,
    text_of,
)

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
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = ("text", "input_text", "output_text")
_SHOWING = ("user", "tool")
"""Roles whose messages may show images."""


def read(body: bytes, answered: Answered) -> ChatCall:
    """The call in the body of a request. RefusedError says what cannot be answered."""
    fields = fields_of(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list with at least one message")
    if fields.get("n") not in (None, 1):
        raise bad("n must be 1: ask again for another answer")
    options, files = fields.get("stream_options") or {}, Files()
    return ChatCall(
        messages=tuple(_message(message, answered, files) for message in messages),
        tools=tuple(_tool(tool) for tool in listed(fields, "tools")),
        max_tokens=at_least_one(fields, "max_completion_tokens", "max_tokens"),
        streams=bool(fields.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        unheeded=set_of(fields, UNHEEDED),
        files=files,
    )


def whole(call: ChatCall, reply: Reply) -> dict[str, Any]:
    """The answer to a call that does not stream."""
    choice = {"index": 0, "message": _shown(reply), "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def events(call: ChatCall, reply: Reply) -> Iterator[Event]:
    """The answer to a call that streams: who speaks, what is said, why it ended, and the numbers of tokens."""
    head = _head(reply, "chat.completion.chunk")
    said = _shown(reply)
    calls = [{**each, "index": index} for index, each in enumerate(said.pop("tool_calls", []))]
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    if said["content"]:
        deltas.append(({"content": said["content"]}, None))
    if calls:
        deltas.append(({"tool_calls": calls}, None))
    deltas.append(({}, reply.finish_reason))
    for delta, finish_reason in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        yield "", {**head, "choices": [choice]}
    if call.wants_usage:
        yield "", {**head, "choices": [], "usage": _usage(reply)}
    yield "", "[DONE]"


def refusal(error: RefusedError) -> dict[str, Any]:
    """The body of an answer that is no completion."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def failure(error: RefusedError) -> Event:
    """The same in a stream that has begun."""
    return "", refusal(error)


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


def _message(message: Any, answered: Answered, files: Files) -> ChatMessage:
    if not isinstance(message, dict):
        raise bad("a message is no object")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise bad(f"messages of the role {message.get('role')!r} are not known; there are {', '.join(_ROLES)}")
    content = message.get("content")
    shown = content_of(content, _PARTS, _image, files) if role in _SHOWING else text_of(content, _PARTS)
    read: dict[str, Any] = {"role": role, "content": shown}
    if calls := listed(message, "tool_calls"):
        read["tool_calls"] = [_call(call, answered) for call in calls]
    if message.get("tool_call_id"):
        read["tool_call_id"] = str(message["tool_call_id"])
    return read


def _image(part: Mapping[str, Any]) -> bytes | None:
    if part.get("type") != "image_url":
        return None
    given = part.get("image_url")
    return file_in(given.get("url") if isinstance(given, dict) else given)


def _call(call: Any, answered: Answered) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    return called(call.get("id") if function else "", function.get("name"), function.get("arguments"), answered)


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    function = function if isinstance(function, dict) else {}
    return shown_tool(function.get("name"), function.get("description"), function.get("parameters"))
