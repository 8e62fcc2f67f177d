"""One episode whose agent calls the policy by itself: what each of its calls goes on from.

Owns who follows whom: a call whose messages are those of an earlier one, what the policy said to it, and new ones
behind that, goes on from that one. Any other begins a branch, rendered anew and counted by cause. Images are the same
where their files are. Turns, ids and the row that they become are turns/tree.py's. Knows no HTTP and no environment.
Bounds: max_calls calls; images of max_image_bytes beside the row's own.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rolecall.data.json_text import parse_json
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import InvalidInputError, PromptTooLongError
from rolecall.v1 import trajectory_pb2
from services.rollout.harness.calls import (
    DIGEST,
    ChatCall,
    ChatMessage,
    RefusedError,
    Reply,
    as_key,
    bad,
    call_id,
    digests_of,
)
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.turns.prompts import PromptThread
from services.rollout.turns.shown import ShownImage, look_at, measured
from services.rollout.turns.tool_calls import SessionCalls, ToolCalls
from services.rollout.turns.tree import Tree, Turn, TurnPrompt


@dataclass(frozen=True)
class Limits:
    """The bounds of one episode."""

    max_prompt_tokens: int
    """Longest first prompt of a branch."""
    max_calls: int
    max_row_tokens: int
    """Most tokens of all segments together, at least those of one."""
    max_image_bytes: int
    """Most bytes of the distinct images that it shows beside those of its row."""
    ends_at: float
    """Monotonic time after which no call is taken, and the one under way ends."""


class Attempt:
    """The calls of one episode. Used from one event loop."""

    def __init__(
        self,
        first: SampleRequest,
        limits: Limits,
        replica: Replica,
        tokenizer: ChatTokenizer,
        prompts: PromptThread,
        tool_calls: ToolCalls | None,
        open_images: asyncio.Semaphore,
    ) -> None:
        """`first` is the request for a single response, whose prompt is not used, and whose images are the row's own.
        `tool_calls`: None where the run names no parser of them, so that they are text. `open_images`: held while
        images are open.
        """
        self._first = first
        self._limits = limits
        self._replica = replica
        self._tokenizer = tokenizer
        self._tool_calls = tool_calls
        self._readers: dict[str, SessionCalls] = {}
        """Readers of calls of tools, by the tools."""
        self._prompts = prompts
        self._open_images = open_images
        self._own_images = {hashlib.sha256(file).hexdigest() for file in first.images}
        self._images: dict[str, ShownImage] = {}
        """The images of calls that were taken, by their digest."""
        self._tree = Tree(first, prompts.continuation, limits.max_row_tokens)
        self._in_order = asyncio.Lock()
        """Held while a call gets its prompt and its number, so that calls at once are numbered as they came."""
        self._ends: dict[tuple[bytes, str], Turn] = {}
        """The youngest turn by what must stand before a call that goes on from it, and by its tools."""
        self._told: set[bytes] = set()
        """What must stand before one that goes on from any turn, whatever its tools."""
        self.refused_by = ""
        """The budget that refused a call, "turns", "time" or "images"; empty: none did."""

    async def answer(self, call: ChatCall) -> Reply:
        """Samples what the policy says to `call`. RefusedError where it may say nothing; errors as Replica.sample."""
        try:
            async with asyncio.timeout(self._limits.ends_at - time.monotonic()):
                async with self._in_order:
                    new = self._new_files(call)
                    self._take(new)
                    images = await self._measured(new)
                    asked = await self._allowed(call, images)
                    await self._look_at(new)
                    self._images = images
                    max_tokens = asked.room if call.max_tokens is None else min(asked.room, call.max_tokens)
                    number, request = self._tree.request(asked, max_tokens)
                response = await self._replica.sample(request)
        except TimeoutError as error:
            raise self._spent("time") from error
        text = self._tokenizer.decode(response.sample.token_ids)
        return self._answered(call, self._tree.sampled(number, asked, response, text))

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        """Tokens of the prompt that `call` would have, which is not made. Images are counted by the heads of their
        files. RefusedError where it cannot be rendered, or is longer, or shows more, than any may.
        """
        try:
            async with asyncio.timeout(self._limits.ends_at - time.monotonic()):
                new = self._new_files(call)
                if self._num_bytes(new) > self._limits.max_image_bytes:  # no call, so that no budget is spent
                    raise bad(
                        "the episode would show more than the "
                        f"{self._limits.max_image_bytes} bytes of images that it may (environments.*.max_image_bytes)"
                    )
                images = await self._measured(new)
                prompt = await self._prompts.run(lambda: self._prompt(call, images))
        except TimeoutError as error:
            raise self._spent("time") from error
        return len(prompt.token_ids)

    def seen(self, number: int) -> None:
        """The agent got the whole answer to a call."""
        self._tree.seen(number)

    def ended(
        self,
        ended_by: str,
        reward: trajectory_pb2.EpisodeReward | None,
        row_messages: Sequence[trajectory_pb2.Message],
        generation_s: float,
    ) -> tuple[SampleRequest, Response]:
        """Returns what the trajectory began with, and the whole of it. EpisodeLostError when the policy was not
        heard once.
        """
        return self._tree.ended(
            ended_by, reward, turn_rewards=False, row_messages=row_messages, generation_s=generation_s
        )

    # --- one call -----------------------------------------------------------------------------------

    def _new_files(self, call: ChatCall) -> Mapping[str, bytes]:
        """The files of the images of `call` that no call which was taken has shown, by their digest."""
        new = {digest: file for digest, file in call.files.items() if digest not in self._images}
        if not self._limits.max_image_bytes and new.keys() - self._own_images:
            raise bad(
                "the run shows its policy no images of an agent, but those of the row where it has some: set "
                "environments.*.max_image_bytes, for a model that sees images"
            )
        return new

    def _take(self, new: Mapping[str, bytes]) -> None:
        if time.monotonic() >= self._limits.ends_at:
            raise self._spent("time")
        if self._tree.num_begun >= self._limits.max_calls:
            raise self._spent("turns")
        if self._num_bytes(new) > self._limits.max_image_bytes:
            raise self._spent("images")

    def _num_bytes(self, new: Mapping[str, bytes]) -> int:
        """Bytes of the images beside the row's own that the episode has shown and those in `new`."""
        files = {**{digest: image.file for digest, image in self._images.items()}, **new}
        return sum(len(file) for digest, file in files.items() if digest not in self._own_images)

    def _spent(self, budget: str) -> RefusedError:
        self.refused_by = budget
        what = {
            "time": "time is",
            "turns": f"{self._limits.max_calls} calls are",
            "images": f"{self._limits.max_image_bytes} bytes of images (environments.*.max_image_bytes) are",
        }[budget]
        return RefusedError(403, "episode_over", f"the episode's {what} spent; end it as it stands")

    async def _measured(self, new: Mapping[str, bytes]) -> dict[str, ShownImage]:
        """The images of the calls that were taken, and those in `new`, by the heads of their files. RefusedError where
        one cannot be shown.
        """
        tokens = self._prompts.visual_tokens
        if not new or tokens is None:
            return self._images
        with _in_words():
            images = await asyncio.to_thread(measured, new.values(), tokens)
        return {**self._images, **dict(zip(new, images, strict=True))}

    async def _look_at(self, new: Mapping[str, bytes]) -> None:
        """Opens the images in `new`, which takes memory and time: once nothing else refuses the call. RefusedError
        where one is broken behind its head.
        """
        if not new:
            return
        with _in_words():
            async with self._open_images:  # bounded: by generation_timeout_s of whoever asks, as what is inside
                await asyncio.to_thread(look_at, new.values())

    async def _allowed(self, call: ChatCall, images: Mapping[str, ShownImage]) -> TurnPrompt:
        """The prompt of the answer to `call`. RefusedError where a conversation has no room, or begins with too
        much.
        """
        asked = await self._prompts.run(lambda: self._prompt(call, images))
        begins = asked.branch in ("first", "history", "tools")
        if begins and len(asked.token_ids) > self._limits.max_prompt_tokens:
            raise _too_long(
                f"the first prompt of a conversation has {len(asked.token_ids)} tokens, and may have "
                f"{self._limits.max_prompt_tokens} (data.max_prompt_tokens)"
            )
        if asked.room < 1:
            raise _too_long(
                f"the conversation has {len(asked.token_ids)} tokens and may have {asked.longest}, the answer included"
            )
        return asked

    def _prompt(self, call: ChatCall, images: Mapping[str, ShownImage]) -> TurnPrompt:
        """The prompt of the answer to `call`, which shows some of `images`, in the thread of prompts. RefusedError
        where it cannot be rendered, or is longer than any may be.
        """
        messages = tuple(_shown(each) for each in call.messages)
        shown = tuple(images[digest] for message in call.messages for digest in digests_of(message))
        above, cause = self._above(call)
        try:
            if above is not None:
                new = shown[len(above.prompt.images) :]
                return self._tree.after(above, messages, call.tools, images=new)
            ids = self._tree.rendered(messages, call.tools, shown)
        except PromptTooLongError as error:
            raise _too_long(error.message) from error
        except InvalidInputError as error:
            raise RefusedError(400, "invalid_request", error.message) from error
        longest = min(len(ids) + self._first.sampling.max_tokens, self._replica.info.max_model_tokens)
        return TurnPrompt(None, messages, ids, longest, cause, shown)

    def _above(self, call: ChatCall) -> tuple[Turn | None, str]:
        """The turn of the longest conversation that `call` goes on from; else None and why there is none."""
        tools, cause, found = as_key(call.tools), "history" if self._told else "first", None
        for end, num_messages in _beginnings(call.messages):
            behind = call.messages[num_messages:]
            if end not in self._told or not behind or any(message["role"] == "assistant" for message in behind):
                continue
            turn = self._ends.get((end, tools))
            found, cause = (turn, cause) if turn is not None else (found, "tools")
        return found, cause

    def _answered(self, call: ChatCall, turn: Turn) -> Reply:
        calls = self._calls(call, turn)
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if calls:
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        *_, (end, _) = _beginnings([*call.messages, message])
        self._ends[end, as_key(call.tools)] = turn
        self._told.add(end)
        return Reply(
            turn.number,
            message,
            "length" if turn.is_cut else "tool_calls" if calls else "stop",
            len(turn.prompt.token_ids),
            len(turn.response.sample.token_ids),
        )

    def _calls(self, call: ChatCall, turn: Turn) -> list[dict[str, Any]]:
        """The calls of tools in what was said, as messages have them. One that cannot be read is text, which is the
        policy's fault.
        """
        if self._tool_calls is None or not call.tools:
            return []
        tools = as_key(call.tools)
        if tools not in self._readers:
            self._readers[tools] = self._tool_calls.of_session(call.tools)
        sampled = turn.response.sample.token_ids
        heard = self._readers[tools].hear(turn.prompt.token_ids, sampled, is_cut=turn.is_cut)
        turn.is_malformed = bool(heard.problem)
        turn.num_tool_calls = len(heard.calls)
        turn.calls_told = heard.told
        return [
            {
                "id": call_id(turn.number, index),
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for index, each in enumerate(heard.calls)
        ]


def _shown(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates are given it: arguments of calls as values, which they spell as the policy does, and
    images without their digests.
    """
    content = message["content"]
    if not isinstance(content, str):
        message = {**message, "content": [{name: part[name] for name in part if name != DIGEST} for part in content]}
    calls = [
        {**call, "function": {**call["function"], "arguments": _value(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _value(arguments: str) -> Any:
    """The object in the arguments of a call; text that is none stays what the agent sent."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _beginnings(messages: Sequence[ChatMessage]) -> Iterator[tuple[bytes, int]]:
    """A digest of the first message, of the first two, and so on, with their number."""
    digest = hashlib.sha256()
    for number, message in enumerate(messages, 1):
        digest.update(as_key(message).encode() + b"\n")
        yield digest.digest(), number


@contextmanager
def _in_words() -> Iterator[None]:
    """RefusedError where an image cannot be shown."""
    try:
        yield
    except InvalidInputError as error:
        raise bad(f"an image cannot be shown: {error.message}") from error


def _too_long(message: str) -> RefusedError:
    return RefusedError(400, "context_length_exceeded", message)
