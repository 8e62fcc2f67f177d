"""The tokens that extend an episode: what a chat template puts between a turn of the policy and its next one.

Nothing that was sampled is rendered again: the engine's own ids are extended. A template is prefix-stable when a
message that follows changes nothing of what stands before it. `problem` proves it of a template, or says what breaks
it. What is appended is then the difference of two renderings of a conversation that nobody had. With any other template
each conversation is looked at as it stands: its ids are extended where the template, asked for all of it, shows exactly
their text before the new messages; else it must be begun anew. Pure functions of a tokenizer.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from rolecall.data.images.tokens import VisualTokens, collapsed
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import InvalidInputError, PromptTooLongError

ChatMessage: TypeAlias = Mapping[str, Any]
"""A message as chat templates are given it."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools as chat templates are given them."""
Piece: TypeAlias = tuple[str, bool]
"""Text, and whether it is read as text alone, special tokens in it included."""
SAID = "xyzzy"
"""What the policy says in the conversation that nobody had."""
HEARD = "plugh"
"""What it hears there."""
THOUGHT = f"<think>\nhm\n</think>\n\n{SAID}"
"""The same after thinking, as models spell it; templates are known to drop that from earlier turns."""
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "plugh",
        "description": "d",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
    },
}
"""A tool that nobody has, as chat templates are given it."""
PROBE_CALL = ("plugh", {"b": "c"})
"""A call of PROBE_TOOL: its name and its arguments."""
_ASKED: ChatMessage = {"role": "user", "content": "a"}
_SYSTEM: ChatMessage = {"role": "system", "content": "c"}
_IMAGE = ({"type": "image"},)
_MARKS = (0xF0000, 0xFFFFE)
"""Characters that Unicode leaves without a meaning: they stand for special tokens that somebody spelled."""


class Continuation:
    """The continuation of conversations by one tokenizer's template."""

    def __init__(
        self, tokenizer: ChatTokenizer, max_tokens: int | None = None, visual_tokens: VisualTokens | None = None
    ) -> None:
        """`max_tokens`: PromptTooLongError is raised of text that is longer than so many tokens can be, by its
        characters, for it takes long and much memory to count its tokens; None: none is too long. `visual_tokens`:
        those of images that messages may show; None: they are text.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.visual_tokens = visual_tokens
        """The tokens of images that messages may show; None: they are text."""
        self._problems: dict[tuple[str, bool, bool], str | None] = {}

    def ids(
        self,
        before: Sequence[int],
        conversation: Sequence[ChatMessage],
        num_heard: int,
        tools: Tools = (),
        image_tokens: Sequence[int] = (),
    ) -> list[int] | None:
        """Token ids between a turn that ends the ids `before` and the policy's next one: the turn's close where it was
        not sampled, the last `num_heard` messages of the whole `conversation`, and the generation prompt. None when the
        template, which is not prefix-stable for them, shows otherwise what stands before. InvalidInputError when it
        cannot render them. `tools`: those that the first prompt shows; `image_tokens`: the tokens of each image that
        the conversation shows.
        """
        heard = conversation[len(conversation) - num_heard :]
        num_before = len(image_tokens) - sum(map(num_images_in, heard))
        if any(
            self.problem(message["role"], with_tools=bool(tools), with_images=num_images_in(message) > 0)
            for message in heard
        ):
            ids = self._looked_at(self._collapsed(before, num_before), conversation, tools)
        else:
            ids = self._encoded(self._pieces(heard, self._tail))
            ids = ids[1:] if ids[0] == before[-1] else ids
        return None if ids is None else self._expanded(ids, image_tokens[num_before:])

    def opening(
        self,
        conversation: Sequence[ChatMessage],
        tools: Tools = (),
        num_own: int = 0,
        image_tokens: Sequence[int] = (),
    ) -> list[int]:
        """Token ids of a conversation rendered anew, up to where the policy goes on. Special tokens that a message
        spells are text, but in the first `num_own`, which are the run's own. `image_tokens`: the tokens of each image
        that the conversation shows. InvalidInputError when the template cannot render it.
        """
        return self._expanded(self._encoded(self._shown(conversation, tools, num_own)), image_tokens)

    def refusal(self, role: str) -> str | None:
        """Returns why the template lets nobody speak as `role` after a turn of the policy, as the end of a sentence;
        None when it does.
        """
        try:
            self._tokenizer.render([_ASKED, _said(SAID), {"role": role, "content": HEARD}])
        except InvalidInputError as error:
            return f"cannot be used with messages of the role {role!r}: {error.message}"
        return None

    def image_refusal(self, role: str) -> str | None:
        """Returns why the template does not show all images in messages of `role` after turns of the policy, as the end
        of a sentence; None when it does.
        """
        heard: ChatMessage = {"role": role, "content": [*_IMAGE, *_words(HEARD)]}
        try:
            self.opening([_ASKED, _said(SAID), heard, _said("b"), heard], image_tokens=(1, 1))
        except InvalidInputError as error:
            return f"cannot be used with images in messages of the role {role!r}: {error.message}"
        return None

    def problem(self, role: str, *, with_tools: bool = False, with_images: bool = False) -> str | None:
        """Returns what breaks conversations in which messages of `role` follow turns of the policy, as the end of a
        sentence; None when the template is prefix-stable for them. `with_tools`: in conversations with tools, too.
        `with_images`: where the messages show images.
        """
        key = role, with_tools, with_images
        if key not in self._problems:
            heard: ChatMessage = {"role": role, "content": [*_IMAGE, *_words(HEARD)] if with_images else HEARD}
            try:
                self._problems[key] = self._problem(heard, (None, [PROBE_TOOL]) if with_tools else (None,))
            except InvalidInputError as error:
                self._problems[key] = f"cannot be used with messages of the role {role!r}: {error.message}"
        return self._problems[key]

    def _problem(self, heard: ChatMessage, tools_shown: Sequence[Tools | None]) -> str | None:
        role = heard["role"]
        before: list[list[ChatMessage]] = [[_ASKED], [_ASKED, _said(SAID), heard, _said("b"), heard]]
        if role != "system" and self._takes_system:
            before.append([_SYSTEM, _ASKED])
        if num_images_in(heard):
            before.append([{"role": "user", "content": [*_IMAGE, *_words("a")]}])
        tails = set()
        for said, tools in product((SAID, THOUGHT), tools_shown):
            for turns in before:
                closed = self._tokenizer.render([*turns, _said(said)], generate=False, tools=tools)
                going = self._tokenizer.render([*turns, _said(said), heard], generate=True, tools=tools)
                if said not in closed:
                    return f"does not show a turn of the policy as it was said: {said!r} is not in {closed[-80:]!r}"
                if not going.startswith(closed):
                    place = next(i for i, (a, b) in enumerate(zip(closed, going, strict=False)) if a != b)
                    was, is_now = closed[max(0, place - 20) : place + 20], going[max(0, place - 20) : place + 20]
                    return (
                        f"shows an earlier turn otherwise once a message of the role {role!r} follows: {was!r} "
                        f"becomes {is_now!r}"
                    )
                head = closed[: closed.rindex(SAID) + len(SAID)]
                tails.add(going[len(head) :])
                if self._tokenizer.encode(going) != self._tokenizer.encode(head) + self._tokenizer.encode(
                    going[len(head) :]
                ):
                    return f"has no token of its own at the end of a turn: {going[len(head) - 10 : len(head) + 20]!r}"
        if len(tails) > 1:
            return f"puts different things before a message of the role {role!r}: {sorted(tails)}"
        return None

    def _looked_at(self, before: Sequence[int], conversation: Sequence[ChatMessage], tools: Tools) -> list[int] | None:
        """The ids that extend `before`; None where it cannot be extended. It can where the whole conversation, rendered
        anew, begins with exactly its text, and a token at the seam merges with no neighbour.
        """
        text, pieces = self._tokenizer.spell(before), self._shown(conversation, tools)
        if not "".join(piece for piece, _ in pieces).startswith(text):
            return None
        ids = self._encoded(_behind(pieces, len(text)))
        added = self._tokenizer.added_ids
        return ids if ids and (before[-1] in added or ids[0] in added) else None

    def _expanded(self, ids: list[int], image_tokens: Sequence[int]) -> list[int]:
        return ids if self.visual_tokens is None else self.visual_tokens.expanded(ids, image_tokens)

    def _collapsed(self, ids: Sequence[int], num_images: int) -> Sequence[int]:
        return collapsed(ids, self.visual_tokens.token_id, num_images) if self.visual_tokens is not None else ids

    def _shown(self, conversation: Sequence[ChatMessage], tools: Tools, num_own: int = 0) -> list[Piece]:
        """A conversation as the template shows it, up to where the policy goes on."""
        own = conversation[:num_own]
        return self._pieces(
            conversation[num_own:], lambda rest: self._tokenizer.render([*own, *rest], tools=tools or None)
        )

    def _pieces(self, messages: Sequence[ChatMessage], render: Callable[[Sequence[ChatMessage]], str]) -> list[Piece]:
        """The text of messages as they are rendered. Special tokens that they spell are text and nothing else: the
        template is shown marks in their place.
        """
        said = "".join(text for message in messages for text in _texts(message))
        spelled = [token for token in self._special if token in said]
        if not spelled:
            return [(render(messages), False)]
        free = (chr(code) for code in range(*_MARKS) if chr(code) not in said)
        marks = dict(zip(spelled, free, strict=False))
        tokens = {mark: token for token, mark in marks.items()}
        by_length = "|".join(re.escape(token) for token in spelled)
        hidden = [
            _mapped(message, lambda text: re.sub(by_length, lambda at: marks[at[0]], text)) for message in messages
        ]
        parts = re.split(f"([{''.join(tokens)}])", render(hidden))
        return [(tokens.get(part, part), part in tokens) for part in parts if part]

    def _encoded(self, pieces: Sequence[Piece]) -> list[int]:
        """The ids of pieces one after another."""
        num_chars, most = sum(len(text) for text, _ in pieces), self._max_tokens
        if most is not None and num_chars > most * self._tokenizer.max_token_chars:
            raise PromptTooLongError(
                f"text of {num_chars:,} characters does not fit into {most:,} tokens, the most that the run's engines "
                "take; say less"
            )
        return [
            token
            for text, is_plain in pieces
            for token in (self._tokenizer.encode_plain(text) if is_plain else self._tokenizer.encode(text))
        ]

    def _tail(self, messages: Sequence[ChatMessage]) -> str:
        """The text after what the policy said, up to where it goes on."""
        said = [_ASKED, _said(SAID)]
        closed = self._tokenizer.render(said, generate=False)
        return self._tokenizer.render([*said, *messages], generate=True)[closed.rindex(SAID) + len(SAID) :]

    @cached_property
    def _special(self) -> Sequence[str]:
        """The texts of special tokens, the longest first."""
        return sorted(self._tokenizer.special_tokens, key=len, reverse=True)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template renders conversations that begin with a system message."""
        try:
            self._tokenizer.render([_SYSTEM, _ASKED])
        except InvalidInputError:
            return False
        return True


def shown_call(tokenizer: ChatTokenizer) -> str:
    """The text of PROBE_CALL as the template shows it behind a text; empty when it shows none."""
    name, arguments = PROBE_CALL
    call = {"type": "function", "id": "callplugh", "function": {"name": name, "arguments": arguments}}
    try:
        without = tokenizer.render([_ASKED, _said(SAID)], generate=False, tools=[PROBE_TOOL])
        shown = tokenizer.render([_ASKED, {**_said(SAID), "tool_calls": [call]}], generate=False, tools=[PROBE_TOOL])
    except InvalidInputError:
        return ""
    head, said, tail = without.rpartition(SAID)
    if not shown.startswith(head + said) or name not in shown[len(head) :]:
        return ""
    return shown[len(head + said) :].removesuffix(tail).strip()


def mark_of(shown: str) -> str | None:
    """Returns the mark by which a call begins, which the template shows as `shown_call` says; None: it has none."""
    return next(iter(shown[: shown.find(PROBE_CALL[0])].split()), None)


def num_images_in(message: ChatMessage) -> int:
    """Images that a message shows."""
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


def _texts(said: Any) -> Iterator[str]:
    """Every text in a message, or in a part of one: its content, and names and arguments of its calls of tools."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for name, part in said.items():
            yield from (*_texts(name), *_texts(part))
    elif isinstance(said, list | tuple):
        for part in said:
            yield from _texts(part)


def _mapped(said: Any, change: Callable[[str], str]) -> Any:
    """A message, or a part of one, with `change` made to every text in it."""
    if isinstance(said, str):
        return change(said)
    if isinstance(said, Mapping):
        return {_mapped(name, change): _mapped(part, change) for name, part in said.items()}
    if isinstance(said, list | tuple):
        return [_mapped(part, change) for part in said]
    return said


def _behind(pieces: Sequence[Piece], num_chars: int) -> list[Piece]:
    """Leaves out the first `num_chars` characters."""
    behind: list[Piece] = []
    for text, is_plain in pieces:
        if num_chars < len(text):
            behind.append((text[num_chars:], is_plain))
        num_chars = max(0, num_chars - len(text))
    return behind


def _words(text: str) -> Sequence[ChatMessage]:
    return ({"type": "text", "text": text},)


def _said(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}
