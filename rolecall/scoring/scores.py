"""The contract of a scorer as plain Python: Item is what it is given, Score and Failure what it answers, each with its
protobuf form.

Knows no gRPC and no torch. Whether an answer is believable is said in description.py.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolecall.errors import InvalidInputError, RoleCallError
from rolecall.settings.data import IMAGE_MARK
from rolecall.v1 import reward_pb2, trajectory_pb2
from rolecall.wire import decode_fields, decode_tensor

FINISH_REASONS = {
    trajectory_pb2.FINISH_REASON_STOP: "stop",
    trajectory_pb2.FINISH_REASON_LENGTH: "length",
    trajectory_pb2.FINISH_REASON_ABORT: "abort",
}
ALL_FIELDS = tuple(value for value in reward_pb2.ScoreField.values() if value != reward_pb2.SCORE_FIELD_UNSPECIFIED)
TEXT_FIELDS = tuple(value for value in ALL_FIELDS if value != reward_pb2.SCORE_FIELD_IMAGES)
"""Fields of a scorer that asks for none by name: images are large."""
MAX_MESSAGE_CHARS = 1000
"""An error's message is cut here, so that no traceback crowds out the other results."""
MAX_CODE_CHARS = 64
"""Longest code of a failure, which stands in every log line and dead letter; it is cut."""


@dataclass(frozen=True)
class Message:
    """One turn of the conversation before the response."""

    role: str
    content: str
    spelled: tuple[int, ...] = ()
    """Places of "<image>" in the content, counted from 0, that show no image."""


@dataclass(frozen=True)
class Item:
    """One response to score. A field that the scorer did not ask for is empty."""

    id: str
    response_text: str = ""
    ground_truth: str = ""
    other_ground_truths: tuple[str, ...] = ()
    """Further answers that are as right as ground_truth."""
    messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [prompt tokens]."""
    response_token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [response tokens], the stop token included."""
    finish_reason: str = "stop"
    """"stop", "length" (truncated) or "abort"."""
    num_response_tokens: int = 0
    group: str = ""
    """Equal for responses to one prompt that were sampled together."""
    environment_reward: "Score | None" = None
    """What the environment gave the episode; None: it is none, or its environment gives no rewards."""
    images: tuple[bytes, ...] = ()
    """Files of the images that the messages show, in their order."""

    @classmethod
    def from_proto(cls, item: reward_pb2.ScoreItem) -> "Item":
        """Decodes `item`; InvalidInputError when its token ids are not int32."""
        return cls(
            id=item.id,
            response_text=item.response_text,
            ground_truth=item.ground_truth,
            other_ground_truths=tuple(item.other_ground_truths),
            messages=tuple(Message(message.role, message.content, tuple(message.spelled)) for message in item.messages),
            metadata=decode_fields(item.metadata) if item.HasField("metadata") else {},
            prompt_token_ids=_token_ids(item.prompt_token_ids, "prompt_token_ids"),
            response_token_ids=_token_ids(item.response_token_ids, "response_token_ids"),
            finish_reason=FINISH_REASONS.get(item.finish_reason, "stop"),
            num_response_tokens=item.num_response_tokens,
            group=item.group,
            environment_reward=decode_reward(item.environment_reward) if item.HasField("environment_reward") else None,
            images=tuple(item.images),
        )

    @property
    def conversation(self) -> tuple[tuple[str, tuple[str | bytes, ...]], ...]:
        """(role, parts) of each message: its texts, and between them the files of the images."""
        files = iter(self.images)
        return tuple((message.role, _parts(message, files)) for message in self.messages)

    @property
    def ground_truths(self) -> tuple[str, ...]:
        """Every answer that is right; none where the data set has none."""
        return (self.ground_truth, *self.other_ground_truths) if self.ground_truth else ()


def _parts(message: Message, files: Iterator[bytes]) -> tuple[str | bytes, ...]:
    text, *others = message.content.split(IMAGE_MARK)
    parts = list[str | bytes]()
    for place, other in enumerate(others):
        file = None if place in message.spelled else next(files, None)
        if file is None:
            text += IMAGE_MARK + other
        else:
            parts += [text, file]
            text = other
    return tuple(part for part in (*parts, text) if part != "")


@dataclass(frozen=True)
class Score:
    """A score: finite numbers only. A bool, Python's or numpy's, is 0 or 1."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts, the names that the scorer declared; what does not apply to the item is left out."""
    token_rewards: NDArray[np.float32] | None = None
    """float32 [response tokens], when the scorer declared them."""
    answer: str | None = None
    """What was read from the response as its answer: equal strings vote together in maj@k (evaluation). None: the
    response takes no part in a vote.
    """

    @property
    def total(self) -> float:
        """The value and all token rewards together: what an episode returned whose turns are rewarded, too."""
        if self.token_rewards is None:
            return self.value
        return math.fsum([float(np.float32(self.value)), *self.token_rewards.tolist()])  # as a row holds them

    def reaches(self, solved_at: float) -> bool:
        """Whether the value is at least `solved_at`, both as float32, which rewards are in training."""
        return bool(np.float32(self.value) >= np.float32(solved_at))


@dataclass(frozen=True)
class Failure:
    """The reason why an item has no score. It is dropped or asked again, never trained on as a number.

    Code and message are somebody else's words: what is not printable becomes a space, and both are cut, to 64 and 1,000
    characters.
    """

    code: str
    """Short, stable, upper-case: a ScoreError's code, or the reason of a RoleCallError such as SCORER_UNAVAILABLE."""
    message: str
    retryable: bool = False
    """The infrastructure failed (asking again may help), not the data."""
    is_blamed: bool = False
    """Whether the data is at fault once the attempts of a `retryable` failure are spent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", printable(self.code, MAX_CODE_CHARS))
        object.__setattr__(self, "message", printable(self.message, MAX_MESSAGE_CHARS))


Outcome: TypeAlias = Score | Failure
ScoreFunction: TypeAlias = Callable[[Item], float | Score | Awaitable[float | Score]]
"""A scorer, which may be a coroutine function. It may raise any RoleCallError: BadGroundTruthError for bad data,
ScorerUnavailableError when asking again may help.
"""


Answers: TypeAlias = Sequence[float | Score | RoleCallError]
"""One answer for each item, in order; an error says why its item has none."""
BatchFunction: TypeAlias = Callable[[Sequence[Item]], Answers | Awaitable[Answers]]
"""A scorer of many items at a time, which may be a coroutine function."""


def printable(text: str, max_chars: int) -> str:
    """The first `max_chars` characters of `text`, every one that is not printable as a space."""
    return "".join(character if character.isprintable() else " " for character in text[:max_chars])


def decode_reward(reward: reward_pb2.Reward) -> Score:
    """The plain form of a reward that `problem_of` found nothing wrong with."""
    tokens = decode_tensor(reward.token_rewards, "token_rewards") if reward.HasField("token_rewards") else None
    return Score(reward.value, dict(reward.components), tokens, reward.answer if reward.HasField("answer") else None)


def _token_ids(data: bytes, what: str) -> NDArray[np.int32]:
    if len(data) % 4:
        raise InvalidInputError(f"{what}: {len(data)} bytes are not int32 ids")
    return np.frombuffer(data, "<i4")
