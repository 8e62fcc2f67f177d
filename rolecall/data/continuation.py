"""The tokens that extend an episode: what a chat template puts between a turn of the policy and its next one.

Nothing that was sampled is rendered again: the engine's own ids are extended by the difference of two renderings of a
conversation that nobody had. That is right for a template that is prefix-stable: a message that follows changes nothing
of what stands before it. `problem` proves it of a template, or says what breaks it. Pure functions of a tokenizer.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import InvalidInputError

Turn = dict[str, str]
SAID = "xyzzy"
"""What the policy says in the conversation that nobody had."""
HEARD = "plugh"
"""What stands for a message whose text must not be read as special tokens."""
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
_ASKED: Turn = {"role": "user", "content": "a"}


class Continuation:
    """The continuation of conversations by one tokenizer's template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._problems: dict[tuple[str, bool], str | None] = {}

    def ids(self, last_token_id: int, messages: Sequence[Turn], *, with_tools: bool = False) -> list[int]:
        """Token ids between a turn that ended with `last_token_id` and the next one: the turn's close where it was not
        sampled, `messages`, and the generation prompt. `with_tools`: the first prompt shows some. InvalidInputError
        when the template is not prefix-stable for the messages' roles.
        """
        for role in {message["role"] for message in messages}:
            problem = self.problem(role, with_tools=with_tools)
            if problem:
                raise InvalidInputError(f"the chat template {problem}")
        ids = self._encoded(messages)
        return ids[1:] if ids[0] == last_token_id else ids

    def problem(self, role: str, *, with_tools: bool = False) -> str | None:
        """Returns what makes the template unfit for messages of `role` after a turn of the policy, as the end of a
        sentence; None when it is prefix-stable for them. `with_tools`: in conversations with tools, too.
        """
        key = role, with_tools
        if key not in self._problems:
            try:
                self._problems[key] = self._problem(role, (None, [PROBE_TOOL]) if with_tools else (None,))
            except InvalidInputError as error:
                self._problems[key] = f"cannot be used with messages of the role {role!r}: {error.message}"
        return self._problems[key]

    def _problem(self, role: str, tools_shown: Sequence[Sequence[Mapping[str, Any]] | None]) -> str | None:
        heard: Turn = {"role": role, "content": HEARD}
        before: list[list[Turn]] = [[_ASKED], [_ASKED, _said(SAID), heard, _said("b"), heard]]
        if role != "system":
            before.append([{"role": "system", "content": "c"}, _ASKED])
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

    def _encoded(self, messages: Sequence[Turn]) -> list[int]:
        """The ids after what the policy said. Where a message spells special tokens it is text and nothing else."""
        if not any(token in message["content"] for message in messages for token in self._special):
            return self._tokenizer.encode(self._tail(messages))
        parts = self._tail([{**message, "content": HEARD} for message in messages]).split(HEARD)
        if len(parts) != len(messages) + 1:
            raise InvalidInputError("the chat template does not show every message once; use another template")
        ids = self._tokenizer.encode(parts[0])
        for message, part in zip(messages, parts[1:], strict=True):
            ids += [*self._tokenizer.encode_plain(message["content"]), *self._tokenizer.encode(part)]
        return ids

    def _tail(self, messages: Sequence[Turn]) -> str:
        """The text after what the policy said, up to where it goes on."""
        said = [_ASKED, _said(SAID)]
        closed = self._tokenizer.render(said, generate=False)
        return self._tokenizer.render([*said, *messages], generate=True)[closed.rindex(SAID) + len(SAID) :]

    @cached_property
    def _special(self) -> frozenset[str]:
        return self._tokenizer.special_tokens


def _said(text: str) -> Turn:
    return {"role": "assistant", "content": text}
