"""One episode whose agent calls the policy by itself: its conversations as a tree, with the engine's own ids.

Owns what a call goes on from. A call whose messages are those of an earlier one, what the policy said to it, and new
ones behind that, extends the ids of that one: nothing that was sampled is rendered again. Any other begins a branch,
rendered anew and counted by cause. At the end every branch that the agent saw is a segment of the trajectory, with each
call trained in the first that has it; what is not trained is counted by reason. Knows no HTTP and no environment.
Bound: max_calls calls.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from rolecall.data.continuation import Continuation
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import EpisodeLostError, InvalidInputError
from rolecall.trajectory import turn_seed
from rolecall.v1 import trajectory_pb2
from services.rollout.harness.calls import ChatCall, ChatMessage, RefusedError, Reply, as_key
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.turns.tool_calls import SessionCalls, ToolCalls
from services.rollout.turns.transcript import Transcript

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The bounds of one episode."""

    max_prompt_tokens: int
    """Longest first prompt of a branch."""
    max_calls: int
    max_row_tokens: int
    """Most tokens of all segments together, at least those of one."""
    ends_at: float
    """Monotonic time after which no call is taken, and the one under way ends."""


@dataclass(eq=False)
class _Node:
    """A call of the policy that was answered, at its place in the tree."""

    number: int
    parent: "_Node | None"
    call: ChatCall
    prompt_token_ids: list[int]
    """The whole prompt, with all that was sampled before."""
    longest: int
    """Most tokens of its branch, first prompt included."""
    response: Response
    text: str
    num_tool_calls: int = 0
    is_malformed: bool = False
    """Whether its calls of tools cannot be read."""
    is_seen: bool = False
    """Whether the agent got the answer."""
    num_children: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Every id up to the end of what was sampled."""
        return [*self.prompt_token_ids, *self.response.sample.token_ids]

    @property
    def said(self) -> Sequence[ChatMessage]:
        """The messages that no earlier call on its branch had."""
        return self.call.messages[len(self.parent.call.messages) + 1 if self.parent is not None else 0 :]

    def path(self) -> "list[_Node]":
        """The calls of its branch, from the first on."""
        above = [self]
        while above[-1].parent is not None:
            above.append(above[-1].parent)
        return above[::-1]


class Attempt:
    """The calls of one episode. Used from one event loop."""

    def __init__(
        self,
        first: SampleRequest,
        limits: Limits,
        replica: Replica,
        tokenizer: ChatTokenizer,
        continuation: Continuation,
        tool_calls: ToolCalls | None,
    ) -> None:
        """`first` is the request for a single response; its prompt is not used. `tool_calls`: None where the run names
        no parser of them, so that they are text.
        """
        self._first = first
        self._limits = limits
        self._replica = replica
        self._tokenizer = tokenizer
        self._continuation = continuation
        self._tool_calls = tool_calls
        self._readers: dict[str, SessionCalls] = {}
        """Readers of calls of tools, by the tools."""
        self._nodes: list[_Node] = []
        self._ends: dict[tuple[bytes, str], _Node] = {}
        """The youngest call by what must stand before one that goes on from it, and by its tools."""
        self._told: set[bytes] = set()
        """What must stand before one that goes on from any call, whatever its tools."""
        self._branches: Counter[str] = Counter()
        self._num_begun = 0
        self.refused_by = ""
        """The budget that refused a call, "turns" or "time"; empty: none did."""

    async def answer(self, call: ChatCall) -> Reply:
        """Samples what the policy says to `call`. RefusedError where it may say nothing; errors as Replica.sample."""
        self._take()
        parent, ids, branch = self._prompt(call)
        if parent is None and len(ids) > self._limits.max_prompt_tokens:
            raise _too_long(
                f"the first prompt of a conversation has {len(ids)} tokens, and may have "
                f"{self._limits.max_prompt_tokens} (data.max_prompt_tokens)"
            )
        longest = parent.longest if parent is not None else len(ids) + self._first.sampling.max_tokens
        longest = min(longest, self._replica.info.max_model_tokens)
        room = longest - len(ids)
        if room < 1:
            raise _too_long(f"the conversation has {len(ids)} tokens and may have {longest}, the answer included")
        sampling = trajectory_pb2.SamplingParams()
        sampling.CopyFrom(self._first.sampling)
        sampling.max_tokens = room if call.max_tokens is None else min(room, call.max_tokens)
        if branch:
            self._branches[branch] += 1
        if parent is not None:
            parent.num_children += 1
        self._num_begun += 1
        number = self._num_begun
        request = SampleRequest(
            f"{self._first.request_id}.{number}",
            tuple(ids),
            sampling,
            turn_seed(self._first.seed, number),
            self._replica.cache_salt,
        )
        try:
            async with asyncio.timeout(self._limits.ends_at - time.monotonic()):
                response = await self._replica.sample(request)
        except TimeoutError as error:
            raise self._spent("time") from error
        node = _Node(number, parent, call, ids, longest, response, self._tokenizer.decode(response.sample.token_ids))
        return self._answered(node)

    def num_prompt_tokens(self, call: ChatCall) -> int:
        """Tokens of the prompt that `call` would have, which is not made. RefusedError where it cannot be rendered."""
        _, ids, _ = self._prompt(call)
        return len(ids)

    def seen(self, number: int) -> None:
        """The agent got the whole answer to a call."""
        for node in self._nodes:
            node.is_seen |= node.number == number

    def ended(
        self,
        ended_by: str,
        reward: trajectory_pb2.EpisodeReward | None,
        prompt: Sequence[trajectory_pb2.Message],
        generation_s: float,
    ) -> tuple[SampleRequest, Response]:
        """Returns what the trajectory began with, and the whole of it: its segments in the order in which their last
        calls came. `prompt`: the row's messages, which are left out where a segment begins with them. EpisodeLostError
        when the policy was not heard once.
        """
        seen = self._seen()
        if not seen:
            raise EpisodeLostError("the environment's agent ended without an answer of the policy")
        paths = self._segments(seen)
        transcript, kept = Transcript(paths[0][0].prompt_token_ids, _opening(paths[0], prompt)), set[_Node]()
        for number, path in enumerate(paths):
            if number:
                transcript.turned(path[0].prompt_token_ids, _opening(path, prompt))
            _tell(transcript, path, kept)
            kept |= set(path)
        response = transcript.ended(ended_by, reward, turn_rewards=False, generation_s=generation_s)
        assert response.episode is not None
        response.episode.tokens.CopyFrom(self._ledger(kept, seen))
        return replace(self._first, prompt_token_ids=paths[0][0].prompt_token_ids), response

    # --- one call -----------------------------------------------------------------------------------

    def _take(self) -> None:
        if time.monotonic() >= self._limits.ends_at:
            raise self._spent("time")
        if self._num_begun >= self._limits.max_calls:
            raise self._spent("turns")

    def _spent(self, budget: str) -> RefusedError:
        self.refused_by = budget
        what = "time is" if budget == "time" else f"{self._limits.max_calls} calls are"
        return RefusedError(403, "episode_over", f"the episode's {what} spent; end it as it stands")

    def _prompt(self, call: ChatCall) -> tuple[_Node | None, list[int], str]:
        """The call that this one goes on from, None where it begins a branch; its whole prompt; and, where it is one of
        several that go on from there or from nothing, why.
        """
        parent, cause = self._parent(call)
        if parent is not None:
            said = [dict(message) for message in call.messages[len(parent.call.messages) + 1 :]]
            before = parent.token_ids
            try:
                ids = [*before, *self._continuation.ids(before[-1], said, with_tools=bool(call.tools))]
            except InvalidInputError as error:
                logger.warning("a call begins a branch: %s", error.message)
                cause = "template"
            else:
                return parent, ids, "fork" if parent.num_children else ""
        return None, self._rendered(call), cause

    def _parent(self, call: ChatCall) -> tuple[_Node | None, str]:
        """The longest conversation that `call` goes on from; else None and why there is none."""
        tools, cause, found = as_key(call.tools), "history" if self._nodes else "first", None
        for end, num_messages in _beginnings(call.messages):
            behind = call.messages[num_messages:]
            if end not in self._told or not behind or any(message["role"] == "assistant" for message in behind):
                continue
            node = self._ends.get((end, tools))
            found, cause = (node, cause) if node is not None else (found, "tools")
        return found, cause

    def _rendered(self, call: ChatCall) -> list[int]:
        try:
            text = self._tokenizer.render([_shown(each) for each in call.messages], tools=call.tools or None)
            ids = self._tokenizer.encode(text)
        except InvalidInputError as error:
            raise RefusedError(400, "invalid_request", error.message) from error
        return ids

    def _answered(self, node: _Node) -> Reply:
        self._nodes.append(node)
        is_cut = node.response.sample.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        calls = self._calls(node, is_cut=is_cut)
        message: dict[str, Any] = {"role": "assistant", "content": node.text}
        if calls:
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        *_, (end, _) = _beginnings([*node.call.messages, message])
        self._ends[end, as_key(node.call.tools)] = node
        self._told.add(end)
        return Reply(
            node.number,
            message,
            "length" if is_cut else "tool_calls" if calls else "stop",
            len(node.prompt_token_ids),
            len(node.response.sample.token_ids),
        )

    def _calls(self, node: _Node, *, is_cut: bool) -> list[dict[str, Any]]:
        """The calls of tools in what was said, as messages have them. One that cannot be read is text, which is the
        policy's fault.
        """
        if self._tool_calls is None or not node.call.tools:
            return []
        tools = as_key(node.call.tools)
        if tools not in self._readers:
            self._readers[tools] = self._tool_calls.of_session(node.call.tools)
        heard = self._readers[tools].hear(node.response.sample.token_ids, is_cut=is_cut)
        node.is_malformed = bool(heard.problem)
        node.num_tool_calls = len(heard.calls)
        return [
            {
                "id": f"call_{node.number}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(heard.calls)
        ]

    # --- the end ------------------------------------------------------------------------------------

    def _seen(self) -> set[_Node]:
        """The calls whose answers the agent got: it says so, or went on from them."""
        found = set[_Node]()
        for leaf in self._nodes:
            node = leaf if leaf.is_seen else None
            while node is not None and node not in found:
                found.add(node)
                node = node.parent
        return found

    def _segments(self, seen: Set[_Node]) -> list[list[_Node]]:
        """The branches of the calls `seen` that the row has room for: the one in which most was sampled, which always
        has, the one that ended last, then again those in which most was sampled.
        """
        paths = [node.path() for node in seen - {node.parent for node in seen}]
        most, *others = sorted(paths, key=lambda path: (-_num_sampled(path), -path[-1].number))
        last = max(paths, key=lambda path: path[-1].number)
        room, kept = self._limits.max_row_tokens, list[list[_Node]]()
        for path in [most, *sorted(others, key=lambda path: path is not last)]:
            num_tokens = len(path[-1].token_ids)
            if num_tokens <= room:
                kept.append(path)
                room -= num_tokens
        return sorted(kept, key=lambda path: path[-1].number)

    def _ledger(self, kept: Set[_Node], seen: Set[_Node]) -> trajectory_pb2.EpisodeTokens:
        masked: Counter[str] = Counter()
        for node in self._nodes:
            if node not in kept:
                masked["row_full" if node in seen else "unseen"] += len(node.response.sample.token_ids)
        return trajectory_pb2.EpisodeTokens(
            num_calls=len(self._nodes),
            num_sampled=_num_sampled(self._nodes),
            num_trained=_num_sampled(kept),
            masked=masked,
            branches=self._branches,
        )


def _shown(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates are given it: arguments of calls as values, which they spell as the policy does."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _value(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _value(arguments: str) -> Any:
    """The object in the arguments of a call; text that is none stays what the agent sent."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _opening(path: Sequence[_Node], prompt: Sequence[trajectory_pb2.Message]) -> Sequence[trajectory_pb2.Message]:
    """The messages before the first turn of a branch, without those of the prompt where it begins with them."""
    opening = _plain(path[0].said)
    return opening[len(prompt) :] if opening[: len(prompt)] == list(prompt) else opening


def _tell(transcript: Transcript, path: Sequence[_Node], kept: Set[_Node]) -> None:
    """Adds the calls of a branch to a transcript at its first prompt; those `kept` before are not trained again."""
    for node in path:
        if node.parent is not None:
            transcript.heard(node.prompt_token_ids[len(node.parent.token_ids) :], _plain(node.said))
        if node in kept:
            transcript.recalled(node.response, node.text)
            continue
        transcript.sampled(node.response, node.text)
        transcript.called(node.num_tool_calls)
        if node.is_malformed:
            transcript.malformed()


def _beginnings(messages: Sequence[ChatMessage]) -> Iterator[tuple[bytes, int]]:
    """A digest of the first message, of the first two, and so on, with their number."""
    digest = hashlib.sha256()
    for number, message in enumerate(messages, 1):
        digest.update(as_key(message).encode() + b"\n")
        yield digest.digest(), number


def _num_sampled(nodes: Iterable[_Node]) -> int:
    return sum(len(node.response.sample.token_ids) for node in nodes)


def _plain(messages: Sequence[ChatMessage]) -> list[trajectory_pb2.Message]:
    return [trajectory_pb2.Message(role=each["role"], content=each["content"]) for each in messages]


def _too_long(message: str) -> RefusedError:
    return RefusedError(400, "context_length_exceeded", message)
