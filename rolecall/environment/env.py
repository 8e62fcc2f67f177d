"""An environment as plain Python: what you write (`Env`), what it is given (`Task`, `Action`) and what it answers.

Knows no gRPC and no sessions: answers.py turns it into messages, sessions.py calls it.
"""

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rolecall.data.images.files import parts
from rolecall.errors import TurnConflictError
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
    images: tuple["Image", ...] = ()
    """The images that the row shows, given to an `Agent`: one for each `<image>` in the messages, in their order."""

    def chat_messages(self) -> list[dict[str, Any]]:
        """The row's messages as OpenAI's chat completions take them, its images in their places."""
        if not self.images:
            return [{"role": said.role, "content": said.content} for said in self.messages]
        images = iter(self.images)
        return [{"role": said.role, "content": _chat_content(said.content, images)} for said in self.messages]


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the session's tools; its arguments are valid by the tool's schema, but for patterns in it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """A turn of the policy: what it said."""

    text: str
    is_cut: bool = False
    """Whether the turn was cut at its longest before the policy ended it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of tools in the text, in order, where the run names a parser (environments.*.tool_parser)."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call, as its chat template shows it."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    """JSON Schema of its arguments, an object."""


@dataclass(frozen=True)
class Image:
    """An image that the policy sees."""

    data: bytes = field(repr=False)
    """A file: PNG, JPEG, WebP, GIF, BMP, TIFF, JPEG 2000, AVIF or PPM."""
    media_type: str = "image/png"

    @property
    def data_url(self) -> str:
        """The image as requests for the policy hold it: the URL of an OpenAI client's `image_url`."""
        return f"data:{self.media_type};base64,{self.base64}"

    @property
    def base64(self) -> str:
        """The file in base64: the data of an Anthropic client's `source`."""
        return b64encode(self.data).decode()


@dataclass(frozen=True)
class ImageMessage:
    """A message of an environment that the rollout steps, in runs with `environments.*.max_image_bytes`."""

    role: str
    parts: Sequence[str | Image]
    """Texts and images in their order."""


Messages: TypeAlias = str | Message | ImageMessage | Sequence[Message | ImageMessage]
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

    shows_images: bool = False
    """Whether the run shows its policy images (`environments.*.max_image_bytes`); set before `reset` where it does. An
    Env that wraps another hands it on.
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


@dataclass(frozen=True)
class Policy:
    """The place where an agent asks the policy, as OpenAI's clients take it."""

    base_url: str
    """URL of what is served there, with its version; Anthropic's clients add "/v1" themselves."""
    api_key: str = field(repr=False)
    """Good for this episode alone, while it runs."""
    model: str
    """Name of the policy there."""
    max_calls: int
    """Most calls; one more is refused with 403."""
    max_tokens: int
    """Most tokens of a conversation beyond its first prompt; what leaves no room is refused with 400."""
    deadline_s: float
    """Seconds from the beginning on after which a call is refused with 403."""


class Agent(Env):
    """An episode that an agent of yours runs by itself, with any harness: it calls the policy at an OpenAI-compatible
    endpoint. To be served with runs_episodes.
    """

    task: Task
    """The row of the data set."""
    seed: int
    """Everything random in the episode follows from it."""

    def reset(self, task: Task, seed: int) -> Messages | Opening:
        """Keeps both; what boots for long, boots here."""
        self.task, self.seed = task, seed
        return ()

    def step(self, action: Action) -> str | Answer:
        """Refuses: the agent takes its turns itself."""
        raise TurnConflictError("an Agent takes its turns itself; serve it with runs_episodes=True")

    @abstractmethod
    def run(self, policy: Policy) -> float | Score | Answer | None:
        """Runs the whole episode and returns what it is worth; an Answer may say that it was cut short (is_truncated).
        None: an environment without rewards has nothing to say.
        """


def _chat_content(text: str, images: Iterator[Image]) -> str | list[dict[str, Any]]:
    """A message's text with the next of `images` in the place of each mark; as it is where it has none."""
    content = parts(text)
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": next(images).data_url}} if part["type"] == "image" else {**part}
        for part in content
    ]
