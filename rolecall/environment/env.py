"""An environment as plain Python: what you write (`Env`), what it is given (`Task`, `Action`) and what it answers.

Knows no gRPC and no sessions: answers.py turns it into messages, sessions.py calls it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rolecall.scoring.scores import Message, Score


@dataclass(frozen=True)
class Task:
    """The row of the data set that an episode is about."""

    uid: str
    messages: tuple[Message, ...] = ()
    """The row's conversation, which stands before what `reset` answers."""
    ground_truth: str = ""
    other_ground_truths: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other fields."""


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the session's tools; its arguments are valid by the tool's schema."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """A turn of the policy: what it said."""

    text: str
    is_cut: bool = False
    """Whether the turn was cut at its longest before the policy ended it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of tools in the text, in order, where the run names a parser (environment.tool_parser)."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call, as its chat template shows it."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    """JSON Schema of its arguments, an object."""


Messages: TypeAlias = str | Message | Sequence[Message]
"""What the policy reads; text alone is one message of the first role that `serve` was given."""


@dataclass(frozen=True)
class Opening:
    """The beginning of an episode."""

    messages: Messages = ()
    """What the policy reads after the task's own messages; may be empty."""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class Answer:
    """An answer of the environment to a turn."""

    messages: Messages = ()
    """What the policy reads next; at least one where the episode goes on."""
    reward: float | Score | None = None
    """Where the episode is over, its reward; else what this turn earned. None: nothing is said, which is not 0."""
    is_over: bool = False
    """Whether the episode came to its end."""
    is_truncated: bool = False
    """Whether the environment cuts it short here."""


class Env(ABC):
    """One episode. An object is made for each; its methods are called one at a time, each perhaps in another thread.

    What a method raises ends the episode, which is lost and never trained on. InvalidInputError says of a task that it
    can never be begun.
    """

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Messages | Opening:
        """Begins the episode. Everything random in it follows from `seed`."""

    @abstractmethod
    def step(self, action: Action) -> str | Answer:
        """Takes one turn; text alone goes on."""

    def grade(self) -> float | Score | None:
        """The reward of the episode as it stands, when a budget of the run ends it. An environment with rewards needs
        one.
        """
        return None

    def close(self) -> None:
        """Frees what the episode holds. Called once, however it ended."""
        return None
