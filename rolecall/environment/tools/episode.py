"""The episode of a policy with tools: it calls them as often as it likes; its first turn without a call is its answer.

Owns what becomes of a call: its result, or in words why there is none, is a message of the role "tool". What a tool
raises as InvalidInputError is the policy's own fault and told to it; anything else loses the episode, for then nobody
knows what the policy would have read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from rolecall.environment.cut import cut_out
from rolecall.environment.env import Action, Answer, Env, Image, ImageMessage, Opening, Task, Tool, ToolCall
from rolecall.errors import InvalidInputError
from rolecall.scoring.scores import Message, Score

ROLE = "tool"
"""Role of what tools answer; serve the environment with it among its roles."""
MAX_CHARS = 4000
"""Longest text of a tool's answer, whatever its parts; what is longer loses its middle, and says so."""
Result: TypeAlias = str | Sequence[str | Image]
"""A tool's answer: text, or texts and images in their order."""


class CallableTool(Protocol):
    """A tool with something behind it. Episodes share it, and call it from several threads."""

    @property
    def tool(self) -> Tool:
        """Returns what the policy is shown."""
        ...

    def call(self, arguments: Mapping[str, Any]) -> Result:
        """The result for the policy to read. InvalidInputError says what is wrong with the arguments."""
        ...


class ToolEpisode(Env):
    """An episode with tools, which ends with the policy's first turn that calls none; truncated where that was cut."""

    def __init__(self, tools: Sequence[CallableTool], reward: Callable[[Task, str], float | Score]) -> None:
        """`reward` scores an answer; an episode that a budget ends has the empty one."""
        self._tools = {tool.tool.name: tool for tool in tools}
        self._reward = reward

    def reset(self, task: Task, seed: int) -> Opening:
        """Shows the tools; the row's own messages ask."""
        self._task = task
        return Opening(tools=tuple(tool.tool for tool in self._tools.values()))

    def step(self, action: Action) -> Answer:
        """Calls what is to be called, in order; else ends the episode with its reward."""
        if not action.tool_calls:
            reward = self._reward(self._task, action.text)
            return Answer(reward=reward, is_over=not action.is_cut, is_truncated=action.is_cut)
        return Answer([_message(call.name, self._called(call)) for call in action.tool_calls])

    def grade(self) -> float | Score:
        """The reward of no answer."""
        return self._reward(self._task, "")

    def _called(self, call: ToolCall) -> Result:
        try:
            if call.name not in self._tools:
                raise InvalidInputError(f"there is no tool {call.name!r}")
            return self._tools[call.name].call(call.arguments)
        except InvalidInputError as error:
            return f"error: {error.message}"


def _message(name: str, result: Result) -> Message | ImageMessage:
    """TypeError for what is no answer of a tool, such as an object that it should have written as JSON."""
    if isinstance(result, str):
        return Message(ROLE, shortened(result))
    if not isinstance(result, list | tuple) or not all(isinstance(part, str | Image) for part in result):
        raise TypeError(
            f"the tool {name!r} answered {type(result).__name__} {result!r:.100}; answer text, or a list of texts and "
            "Images"
        )
    if not result:
        return Message(ROLE, "")
    texts = _cut([part if isinstance(part, str) else "" for part in result])
    return ImageMessage(
        ROLE, [text if isinstance(part, str) else part for part, text in zip(result, texts, strict=True)]
    )


def shortened(text: str) -> str:
    """The text, or its two ends where it is longer than MAX_CHARS."""
    return "".join(_cut([text]))


def _cut(texts: Sequence[str]) -> Sequence[str]:
    """The texts, cut as one."""
    num_chars = sum(map(len, texts))
    if num_chars <= MAX_CHARS:
        return texts
    begin, end = MAX_CHARS // 2, num_chars - MAX_CHARS // 2
    return cut_out(texts, begin, end, f"\n[{end - begin} characters left out]\n")
