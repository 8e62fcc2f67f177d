"""OpenAI's Responses as calls of the policy: pure functions. docs/environments.md says what of them is served."""

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
    file_in,
    listed,
    number_in,
    set_of,
    shown_tool,
    text_of,
)
from services.rollout.harness.chat import refusal as refusal  # OpenAI's errors are the same everywhere

UNHEEDED = (
    "temperature",
    "top_p",
    "top_logprobs",
    "tool_choice",
    "max_tool_calls",
    "reasoning",
    "text",
    "truncation",
    "include",
    "context_management",
)
"""Fields that would change what is sampled, or tell more of it; they are left unheeded, and said so once."""
NOT_SERVED = {
    "background": "wait for the answer",
    "conversation": "name previous_response_id, or send the items",
    "prompt": "send instructions and input",
}
"""Fields that ask for what is not here, and what to do in their place."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text")


def read(body: bytes, answered: Answered) -> ChatCall:
    """The call in the body of a request. RefusedError says what cannot be answered."""
    fields = fields_of(body)
    for name, remedy in NOT_SERVED.items():
        if fields.get(name):
            raise bad(f"{name} is not served: {remedy}")
    given = fields.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(fields, "input")
    before, files = _before(fields.get("previous_response_id"), answered), Files()
    messages = [*before, *_messages(items, answered, files)]
    if not messages:
        raise bad("input must be text, or a list with at least one item")
    instructions = fields.get("instructions")
    if not isinstance(instructions or "", str):
        raise bad("instructions are no text")
    opening = [{"role": "system", "content": instructions}] if instructions else []
    return ChatCall(
        messages=(*opening, *messages),
        tools=tuple(_tool(tool) for tool in listed(fields, "tools")),
        max_tokens=at_least_one(fields, "max_output_tokens"),
        streams=bool(fields.get("stream")),
        unheeded=set_of(fields, UNHEEDED),
        num_instructions=len(opening),
        is_stored=fields.get("store") is not False,
        files=files,
    )


def whole(call: ChatCall, reply: Reply) -> dict[str, Any]:
    """The answer to a call that does not stream."""
    is_cut = reply.finish_reason == "length"
    usage = {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
    return {
        **_head(call, reply),
        "status": _status(reply),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(reply),
        "usage": usage,
    }


def events(call: ChatCall, reply: Reply) -> Iterator[Event]:
    """The answer to a call that streams, each event with its number."""
    for number, (kind, fields) in enumerate(_events(call, reply)):
        yield kind, {"type": kind, "sequence_number": number, **fields}


def failure(error: RefusedError) -> Event:
    """A refusal in a stream that has begun."""
    told = {"code": error.code, "message": error.message, "param": None}
    return "error", {"type": "error", "sequence_number": 0, **told, **refusal(error)}


def _events(call: ChatCall, reply: Reply) -> Iterator[Event]:
    answer = whole(call, reply)
    begun = {**_head(call, reply), "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(answer["output"]):
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
        yield from _told(item, {"item_id": item["id"], "output_index": index})
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{answer['status']}", {"response": answer}


def _told(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[Event]:
    """The events of what one item holds."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **done}
        return
    (part,) = item["content"]
    inside = {**at, "content_index": 0}
    yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
    if part["text"]:
        yield "response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**inside, "part": part}


def _head(call: ChatCall, reply: Reply) -> dict[str, Any]:
    opening = call.messages[: call.num_instructions]
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": 0,
        "model": MODEL,
        "error": None,
        "instructions": opening[0]["content"] if opening else None,
        "max_output_tokens": call.max_tokens,
        "metadata": {},
        "parallel_tool_calls": True,
        "store": call.is_stored,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"], "strict": False} for tool in call.tools],
    }


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _items(reply: Reply) -> list[dict[str, Any]]:
    """The answer as items, which later calls send back or name."""
    if reply.tool_calls:
        return [
            {
                "id": f"fc_{call['id']}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                **call["function"],
            }
            for call in reply.tool_calls
        ]
    part = {"type": "output_text", "text": reply.message["content"], "annotations": [], "logprobs": []}
    message = {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "status": _status(reply)}
    return [{**message, "content": [part]}]


def _before(id: Any, answered: Answered) -> Sequence[ChatMessage]:
    """The conversation up to an earlier answer, without the instructions that were given with it."""
    if id is None:
        return ()
    number = number_in(id, "resp_")
    if number not in answered or not answered[number][0].is_stored:
        raise RefusedError(
            400, "previous_response_not_found", f"{id!r} is no answer of this episode that was to be stored"
        )
    call, reply = answered[number]
    return [*call.messages[call.num_instructions :], reply.message]


def _messages(items: Sequence[Any], answered: Answered, files: Files) -> list[ChatMessage]:
    """Items as messages: calls of tools belong to the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        read = _referred(item, answered)
        kind = read.get("type", "message")
        if kind == "message":
            messages.append(_message(read, files))
        elif kind == "function_call_output":
            result = content_of(read.get("output"), _PARTS, _image, files)
            messages.append({"role": "tool", "content": result, "tool_call_id": str(read.get("call_id", ""))})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = called(read.get("call_id"), read.get("name"), read.get("arguments"), answered)
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            raise bad(f"an item of the input is {kind!r}, which is not served")
    return list(messages)


def _referred(item: Any, answered: Answered) -> Mapping[str, Any]:
    """An item, which may be named in place of being sent."""
    if not isinstance(item, dict):
        raise bad("an item of the input is no object")
    if item.get("type") != "item_reference":
        return item
    number = number_in(item.get("id"), "msg_") or number_in(item.get("id"), "fc_c")
    if number in answered and answered[number][0].is_stored:
        for kept in _items(answered[number][1]):
            if kept["id"] == item["id"]:
                return kept
    raise bad(f"the item {item.get('id')!r} is none of this episode that was to be stored")


def _message(item: Mapping[str, Any], files: Files) -> dict[str, Any]:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise bad(f"messages of the role {item.get('role')!r} are not known; there are {', '.join(_ROLES)}")
    content = item.get("content")
    shown = content_of(content, _PARTS, _image, files) if role == "user" else text_of(content, _PARTS)
    return {"role": role, "content": shown}


def _image(part: Mapping[str, Any]) -> bytes | None:
    if part.get("type") != "input_image":
        return None
    if part.get("file_id"):
        raise bad("an image is named by file_id, and no files are kept here: send it as image_url, data:...")
    return file_in(part.get("image_url"))


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad("a tool is no function with a name; others are not served")
    return shown_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))
