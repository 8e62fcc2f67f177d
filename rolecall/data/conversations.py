"""A conversation as a policy would have sampled it: the turns of the assistant are trained, each after the tokens that
a rollout would have shown before it.

Owns what a row's messages and tools are, and which tokens a turn is: what the chat template shows of it behind the
generation prompt, up to its end. Between turns stands what a rollout puts there (continuation.py): nothing that was
said is rendered again, and where the template shows earlier turns otherwise, a segment begins. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolecall.data.continuation import SAID, ChatMessage, Continuation, Tools, mark_of, num_images_in, shown_call
from rolecall.data.dataset import text_of_parts
from rolecall.data.images.files import parts
from rolecall.data.images.tokens import VisualTokens
from rolecall.data.json_text import parse_json
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.wire import Array

TOOLS_FIELD = "tools"
"""The field of a row with the tools that its conversation is shown, in OpenAI's form or as JSON text of it."""
WEIGHT = "weight"
"""What a message of the assistant may have: 0, and it is context alone; 1, as without it, and it is trained."""
_ASSISTANT = "assistant"


@dataclass(frozen=True)
class Segment:
    """Tokens of an example that are a sequence of their own, with one placeholder for each image."""

    token_ids: Sequence[int]
    mask: Sequence[int]
    """1 on what is trained."""
    num_images: int = 0
    """How many of the example's images are shown: the first so many."""

    def columns(self, visual_tokens: VisualTokens | None = None, numbers: Sequence[int] = ()) -> dict[str, Array]:
        """The columns of the segment: token_ids int32 [T]; response_mask and loss_mask uint8 [T]. `numbers`: tokens of
        each of the example's images, by which their placeholders are repeated where there are `visual_tokens`.
        InvalidInputError where they do not stand for the images.
        """
        ids, mask = list(self.token_ids), list(self.mask)
        if visual_tokens is not None:
            shows = visual_tokens.token_id
            if any(trained and token == shows for token, trained in zip(ids, mask, strict=True)):
                raise InvalidInputError(f"what is trained spells the token of an image (id {shows}); leave it out")
            times = iter(numbers[: self.num_images])
            ids = visual_tokens.expanded(ids, numbers[: self.num_images])
            mask = [
                each
                for token, trained in zip(self.token_ids, mask, strict=True)
                for each in [trained] * (next(times) if token == shows else 1)
            ]
        trained_T = np.array(mask, np.uint8)
        return {"token_ids": np.array(ids, np.int32), "response_mask": trained_T, "loss_mask": trained_T}


class Conversations:
    """The conversations of one tokenizer's template as tokens."""

    def __init__(self, tokenizer: ChatTokenizer, end: int) -> None:
        """`end`: the token by which a turn ends."""
        self._tokenizer = tokenizer
        self._end = end
        self._continuation = Continuation(tokenizer)
        self._close = close_of_turn(tokenizer)
        self._mark = mark_of(shown_call(tokenizer))

    def segments(self, messages: Sequence[ChatMessage], tools: Tools) -> list[Segment]:
        """Returns the segments of a conversation as `parse_conversation` gives it; trained are the turns that are to
        be, and their ends. InvalidInputError when the template cannot show it, or shows a turn so that its tokens
        cannot be told.
        """
        num_own = next(index for index, message in enumerate(messages) if message["role"] == _ASSISTANT)
        shown, num_heard = list(messages[:num_own]), 0
        self._check_tools(shown, tools)
        ids = self._continuation.opening(shown, tools, num_own)
        found, mask, num_images = list[Segment](), [0] * len(ids), sum(map(num_images_in, shown))
        for number, message in enumerate(messages[num_own:], num_own + 1):
            if message["role"] != _ASSISTANT:
                shown.append(message)
                num_heard += 1
                continue
            if num_heard:
                added = self._continuation.ids(ids, shown, num_heard, tools)
                if added is None:
                    found.append(Segment(ids, mask, num_images))
                    ids, mask, added = [], [], self._continuation.opening(shown, tools, num_own)
                ids, mask, num_heard = ids + added, mask + [0] * len(added), 0
                num_images = sum(map(num_images_in, shown))
            try:
                turn = self._turn(shown, message, tools)
            except InvalidInputError as error:
                raise InvalidInputError(f"message {number}: {error.message}") from error
            ids, mask = ids + turn, mask + [message.get(WEIGHT, 1)] * len(turn)
            shown.append(self._told(turn, message))
        return [each for each in [*found, Segment(ids, mask, num_images)] if any(each.mask)]

    def _turn(self, shown: Sequence[ChatMessage], message: ChatMessage, tools: Tools) -> list[int]:
        """The token ids of a turn, its end included."""
        prompt = self._tokenizer.render(shown, tools=tools or None)
        closed = self._tokenizer.render([*shown, message], generate=False, tools=tools or None)
        if not closed.startswith(prompt):
            raise InvalidInputError(
                f"the chat template shows the turn, {closed[-80:]!r}, otherwise than it begins one, {prompt[-40:]!r}; "
                "give each turn as a row with a prompt and its response, or mend the template"
            )
        text = closed[len(prompt) :]
        if not text.endswith(self._close):
            raise InvalidInputError(
                f"the chat template ends the turn otherwise than a text, {text[-40:]!r} without {self._close!r}; "
                "mend the template"
            )
        text = text[: len(text) - len(self._close)]
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        for part in (message.get("reasoning_content", ""), message["content"], *names):
            if "".join(part.split()) not in "".join(text.split()):
                raise InvalidInputError(
                    f"the chat template does not show all of the turn, {part[:80]!r} is not in {text[-80:]!r}; "
                    "leave it out, or mend the template"
                )
        ids = self._tokenizer.encode(text)
        if ids[-1] != self._end:
            ids.append(self._end)
        if self._end in ids[:-1]:
            raise InvalidInputError(f"the turn spells the token that ends it, {text[-80:]!r}; leave it out")
        return ids

    def _told(self, turn: Sequence[int], message: ChatMessage) -> ChatMessage:
        """A turn as a rollout gives it to the template when it is shown again: as text, but with its calls where a
        special token marks them, which text has not.
        """
        told = {"role": _ASSISTANT, "content": self._tokenizer.decode(turn)}
        spelled, mark = self._tokenizer.spell(turn), self._mark
        if "tool_calls" not in message or mark is None or mark not in spelled or mark in told["content"]:
            return told
        return {**told, "content": spelled.partition(mark)[0], "tool_calls": message["tool_calls"]}

    def _check_tools(self, opening: Sequence[ChatMessage], tools: Tools) -> None:
        """InvalidInputError when the template does not show every tool."""
        text = self._tokenizer.render(opening, tools=tools) if tools else ""
        hidden = [name for name in _names(tools) if name not in text]
        if hidden:
            raise InvalidInputError(
                f"the chat template does not show the tools {hidden}; use one that does, or leave the field "
                f"{TOOLS_FIELD!r} out and write them into a message"
            )


def close_of_turn(tokenizer: ChatTokenizer) -> str:
    """Returns what the template puts after a text of the assistant that nothing follows."""
    turn = tokenizer.render([{"role": "user", "content": SAID}, {"role": _ASSISTANT, "content": SAID}], generate=False)
    return turn.rpartition(SAID)[2]


def parse_conversation(
    value: Sequence[object], tools: object, where: str, *, shows_images: bool = False
) -> tuple[tuple[ChatMessage, ...], Tools]:
    """The messages and tools of a conversation in OpenAI's form, as chat templates are given them: contents as text,
    with `shows_images` those that show some as lists of parts; arguments of calls as objects. `tools`: a list, its JSON
    text, or None. ConfigError, which begins with `where`, says what is wrong.
    """
    shown = _tools(tools, f"{where}, field {TOOLS_FIELD!r}")
    names = _names(shown)
    messages = [
        _message(each, f"{where}, message {number}", names, shows_images) for number, each in enumerate(value, 1)
    ]
    turns = [index for index, message in enumerate(messages) if message["role"] == _ASSISTANT]
    if turns[:1] == [0]:
        raise ConfigError(f"{where}: it begins with a turn of the assistant, which answers nobody; put a message first")
    for index in turns:
        if index - 1 in turns:
            raise ConfigError(
                f"{where}: messages {index} and {index + 1} are both the assistant's; make one of them, or put between "
                "them what it was answered"
            )
    if not any(messages[index].get(WEIGHT, 1) for index in turns):
        raise ConfigError(f"{where}: no turn of the assistant is trained; give one the {WEIGHT} 1, or remove the line")
    return tuple(messages), shown


def _message(value: object, where: str, names: Sequence[str], shows_images: bool) -> ChatMessage:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ConfigError(f"{where}: not {{role: text, content: text}}: {str(value)[:200]}; mend it")
    # columns of files hold null where another row has something
    message = {name: part for name, part in value.items() if part is not None and part != []}
    calls, is_turn = message.pop("tool_calls", []), message["role"] == _ASSISTANT
    if not isinstance(calls, list) or (calls and not is_turn):
        raise ConfigError(f"{where}: tool_calls are a list, and the assistant's alone; mend it")
    content = message.setdefault("content", "" if calls else None)
    if shows_images and isinstance(content, list):
        if is_turn and any(isinstance(part, dict) and part.get("type") == "image" for part in content):
            raise ConfigError(f"{where}: the assistant shows an image, and its turns are text; leave it out")
        content = message["content"] = text_of_parts(content, where)
    if not isinstance(content, str) or (is_turn and not calls and not content.strip()):
        raise ConfigError(f"{where}: its content is no text: {str(value)[:200]}; write one")
    if is_turn and message.get(WEIGHT, 1) not in (0, 1):
        raise ConfigError(f"{where}: its {WEIGHT} is {message[WEIGHT]!r}; write 0 (context alone) or 1 (trained)")
    if not isinstance(message.get("reasoning_content", ""), str):
        raise ConfigError(f"{where}: its reasoning_content is no text: {str(value)[:200]}; mend it")
    if shows_images and not is_turn:
        message["content"] = parts(content)
    return {**message, "tool_calls": [_call(call, where, names) for call in calls]} if calls else message


def _call(call: object, where: str, names: Sequence[str]) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise ConfigError(f"{where}: the arguments {arguments[:200]!r} are no JSON ({error}); mend them") from error
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(arguments, dict):
        raise ConfigError(
            f"{where}: a call is not {{function: {{name: text, arguments: JSON text of an object}}}}: "
            f"{str(call)[:200]}; mend it"
        )
    if function.get("name") not in names:
        raise ConfigError(
            f"{where}: it calls {function.get('name')!r}, which is none of the tools {list(names)} of the row's field "
            f"{TOOLS_FIELD!r}; put it there, or mend the call"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(value: object, where: str) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ConfigError(f"{where}: no JSON ({error}); write a list of tools") from error
    tools = [] if value is None else value
    if not isinstance(tools, list):
        raise ConfigError(f"{where}: a {type(tools).__name__}, not a list of tools; write one")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"{where}: a tool is not {{type: function, function: {{name, description, parameters}}}}: "
                f"{str(tool)[:200]}; mend it"
            )
    return tools


def _names(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
