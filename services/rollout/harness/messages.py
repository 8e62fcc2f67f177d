"""Anthropic's Messages as calls of the policy: pure functions. docs/environments.md says what of them is served."""

import json
from collections.abc import Iterator, Mapping, Sequence
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
    file_of,
    listed,
    set_of,
    shown_tool,
    text_of,
)

UNHEEDED = (
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "thinking",
    "tool_choice",
    "output_config",
    "output_format",
    "context_management",
)
"""Fields that would change what is sampled, or tell more of it; they are left unheeded, and said so once."""
BILLING = "x-anthropic-billing-header"
"""How a system block begins which is another at each call and which Claude Code means for its vendor, not for a
policy."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
_TEXT = ("text",)


def read(body: bytes, answered: Answered) -> ChatCall:
    """The call in the body of a request. RefusedError says what cannot be answered."""
    fields = fields_of(body)
    files = Files()
    said = [each for message in listed(fields, "messages") for each in _messages(message, answered, files)]
    if not said:
        raise bad("messages must be a list with at least one message")
    if said[-1]["role"] == "assistant":
        raise bad("the last message is the assistant's, and the policy does not go on in the middle of one")
    for name in ("mcp_servers", "container"):
        if fields.get(name):
            raise bad(f"{name} is not served: the policy's server calls nobody")
    system = _system(fields.get("system"))
    return ChatCall(
        messages=(*([{"role": "system", "content": system}] if system else []), *said),
        tools=tuple(_tool(tool) for tool in listed(fields, "tools")),
        max_tokens=at_least_one(fields, "max_tokens"),
        streams=bool(fields.get("stream")),
        unheeded=set_of(fields, UNHEEDED),
        files=files,
    )


def whole(call: ChatCall, reply: Reply) -> dict[str, Any]:
    """The answer to a call that does not stream."""
    usage = {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens}
    stopped = {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}
    return {**_head(reply), "content": _blocks(reply), **stopped, "usage": usage}


def events(call: ChatCall, reply: Reply) -> Iterator[Event]:
    """The answer to a call that streams: each block is begun, told and ended, and why it all ended comes last."""
    answer = whole(call, reply)
    begun = {**answer, "content": [], "stop_reason": None, "usage": {**answer["usage"], "output_tokens": 0}}
    yield _event("message_start", message=begun)
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    stopped = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=stopped, usage=answer["usage"])
    yield _event("message_stop")


def refusal(error: RefusedError) -> dict[str, Any]:
    """The body of an answer that is no message."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: {error.message}"}}


def failure(error: RefusedError) -> Event:
    """The same in a stream that has begun."""
    return "error", refusal(error)


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "model": MODEL}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    """The answer as blocks; no block where nothing was, for clients may not send an empty one back."""
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in reply.tool_calls
    ]
    text = reply.message["content"]
    return [*([{"type": "text", "text": text}] if text else []), *calls]


def _system(system: Any) -> str:
    """The text of the system's blocks, one below the other."""
    blocks = [system] if isinstance(system, str) else [text_of([block], _TEXT) for block in _sequence(system)]
    return "\n".join(block for block in blocks if not block.startswith(BILLING))


def _messages(message: Any, answered: Answered, files: Files) -> Iterator[ChatMessage]:
    """A message as the messages that it stands for: results of tools are messages of their own."""
    if not isinstance(message, dict):
        raise bad("a message is no object")
    role, content = message.get("role"), message.get("content")
    if role == "system":
        yield {"role": role, "content": _system(content)}
    elif role == "assistant":
        yield _assistant(content, answered)
    elif role == "user":
        yield from _user(content, files)
    else:
        raise bad(f"messages of the role {role!r} are not known; there are user, assistant and system")


def _assistant(content: Any, answered: Answered) -> ChatMessage:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    blocks = _sequence(content)
    uses = [block for block in blocks if _kind(block) == "tool_use"]
    text = text_of([block for block in blocks if _kind(block) != "tool_use"], _TEXT)
    said: dict[str, Any] = {"role": "assistant", "content": text}
    return {**said, "tool_calls": [_call(use, answered) for use in uses]} if uses else said


def _user(content: Any, files: Files) -> Iterator[ChatMessage]:
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    own: list[Any] = []
    for block in _sequence(content):
        if _kind(block) != "tool_result":
            own.append(block)
            continue
        if own:
            yield {"role": "user", "content": content_of(own, _TEXT, _image, files)}
            own = []
        result = content_of(block.get("content"), _TEXT, _image, files)
        yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id", ""))}
    if own:
        yield {"role": "user", "content": content_of(own, _TEXT, _image, files)}


def _image(block: Mapping[str, Any]) -> bytes | None:
    if _kind(block) != "image":
        return None
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") != "base64":
        raise bad(
            f"the source of an image is {source.get('type')!r}: send the file itself, as base64 (nothing is fetched "
            "here)"
        )
    return file_of(source.get("data"))


def _call(use: Mapping[str, Any], answered: Answered) -> dict[str, Any]:
    arguments = json.dumps(use.get("input") or {}, ensure_ascii=False)
    return called(use.get("id"), use.get("name"), arguments, answered)


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise bad("a tool is none of the client's own; others are not served")
    return shown_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _sequence(blocks: Any) -> Sequence[Any]:
    if not isinstance(blocks or [], list):
        raise bad("content is neither text nor blocks")
    return blocks or []


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None
