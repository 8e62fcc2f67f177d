"""The contract of a scorer as plain Python: Item is what it is given, Score and Failure what it answers, each with its
protobuf form.

Owns the checks that make an answer believable (`problem_of`), used by whoever produces a score and, again, by whoever
receives it. Knows no gRPC and no torch, so that a scorer's worker process starts fast.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolecall.errors import InvalidInputError, RoleCallError, ScorerError
from rolecall.settings.data import IMAGE_MARK
from rolecall.v1 import reward_pb2, trajectory_pb2
from rolecall.wire import Array, decode_fields, decode_tensor, encode_tensor

logger = logging.getLogger(__name__)

FINISH_REASONS = {
    trajectory_pb2.FINISH_REASON_STOP: "stop",
    trajectory_pb2.FINISH_REASON_LENGTH: "length",
    trajectory_pb2.FINISH_REASON_ABORT: "abort",
}
ALL_FIELDS = tuple(value for value in reward_pb2.ScoreField.values() if value != reward_pb2.SCORE_FIELD_UNSPECIFIED)
TEXT_FIELDS = tuple(value for value in ALL_FIELDS if value != reward_pb2.SCORE_FIELD_IMAGES)
"""Fields of a scorer that asks for none by name: images are large."""
CHUNK_IMAGE_BYTES = 64 * 2**20
"""Bytes of images that whoever scores a file or a held-out set puts into one call, or a prompt's responses where they
have more.
"""
_GREATEST = float(np.finfo(np.float32).max)
"""Rewards are kept as float32."""
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


def num_shown_in(messages: Iterable[trajectory_pb2.Message]) -> int:
    """Images that messages show."""
    return sum(each.content.count(IMAGE_MARK) - len(each.spelled) for each in messages)


def images_of(meta: trajectory_pb2.TrajectoryMeta, column: trajectory_pb2.Images) -> list[bytes]:
    """The files that the messages of a trajectory's item show, by its row's `column`: those of the prompt, then those
    of the episode's messages, which are of the last segment and may begin anew.
    """
    of_prompt = column.files[: len(column.files) - meta.episode.num_images]
    last = [column.files[at] for at in column.segments[-1].files] if column.segments else column.files
    return [*of_prompt, *last[len(last) - num_shown_in(meta.episode.messages) :]]


def score_item(
    meta: trajectory_pb2.TrajectoryMeta, token_ids: Array, images: Sequence[bytes] = ()
) -> reward_pb2.ScoreItem:
    """The item for the trajectory of `meta`, `token_ids` (int32 [T]) and its `images_of`, with every field;
    RewardClient sends those that the scorer reads. `images` may be left out where no scorer reads them.
    """
    ids = np.ascontiguousarray(token_ids, "<i4")
    response_ids = ids[meta.num_prompt_tokens :]
    if meta.HasField("episode"):
        response_ids = ids[_sampled(meta.episode)]
    item = reward_pb2.ScoreItem(
        id=meta.id,
        messages=[*meta.prompt.messages, *meta.episode.messages],
        response_text=meta.response_text,
        prompt_token_ids=ids[: meta.num_prompt_tokens].tobytes(),
        response_token_ids=response_ids.tobytes(),
        ground_truth=meta.prompt.ground_truth,
        other_ground_truths=meta.prompt.other_ground_truths,
        finish_reason=meta.finish_reason,
        num_response_tokens=len(response_ids),
        group=meta.id.rpartition("/")[0],
    )
    item.images.extend(images)
    if images and len(images) == num_shown_in(meta.episode.messages):  # none is the prompt's
        for message in item.messages[: len(meta.prompt.messages)]:
            message.spelled[:] = range(message.content.count(IMAGE_MARK))
    if meta.prompt.HasField("metadata"):
        item.metadata.CopyFrom(meta.prompt.metadata)
    if meta.HasField("episode") and meta.episode.HasField("reward"):
        item.environment_reward.CopyFrom(_environment_reward(meta.episode))
    return item


def _sampled(episode: trajectory_pb2.Episode) -> Array:
    """Places of the sampled tokens in the trajectory of an episode."""
    return np.concatenate([np.arange(turn.start, turn.end) for turn in episode.turns])


def _environment_reward(episode: trajectory_pb2.Episode) -> reward_pb2.Reward:
    """The reward that an environment gave an episode, as a scorer gives it: what turns earned on their last tokens."""
    reward = reward_pb2.Reward(value=episode.reward.value, components=episode.reward.components)
    if episode.reward.HasField("answer"):
        reward.answer = episode.reward.answer
    if episode.turn_rewards:
        sampled = _sampled(episode)
        earned = np.zeros(len(sampled), np.float32)
        for turn in episode.turns:
            earned[np.searchsorted(sampled, turn.end - 1)] = turn.reward
        reward.token_rewards.CopyFrom(encode_tensor(earned))
    return reward


def component_spec(name: str, low: float | None, high: float | None) -> reward_pb2.ComponentSpec:
    """Returns the description of a component by its range; None is unbounded."""
    return reward_pb2.ComponentSpec(name=name, min=low, max=high)


def evaluate(
    function: ScoreFunction, item: reward_pb2.ScoreItem, spec: reward_pb2.DescribeResponse
) -> reward_pb2.ScoreResult:
    """Calls `function` on `item` and checks what it returns against `spec`; whatever goes wrong becomes a
    ScoreError.
    """
    try:
        return result_of(item, function(Item.from_proto(item)), spec)
    except Exception as error:  # the entry point of code that is not ours
        return failure_of(item, error)


def evaluate_many(
    function: BatchFunction, items: Sequence[reward_pb2.ScoreItem], spec: reward_pb2.DescribeResponse
) -> list[reward_pb2.ScoreResult]:
    """Calls `function` on `items` at once and checks each answer against `spec`; what goes wrong becomes a ScoreError,
    of one item or of all.
    """
    try:
        answers: Any = function([Item.from_proto(item) for item in items])
        if not _is_row(answers) or len(answers) != len(items):
            found = f"{len(answers)} answers" if _is_row(answers) else f"a {type(answers).__name__}"
            raise ScorerError(
                f"the scorer {spec.name!r} returned {found} to {len(items)} items; return one per item, in order"
            )
    except Exception as error:  # the entry point of code that is not ours
        return [failure_of(item, error) for item in items]
    return [_checked(item, answer, spec) for item, answer in zip(items, answers, strict=True)]


def groups_of(items: Sequence[reward_pb2.ScoreItem]) -> list[list[int]]:
    """Places of the items of each group, in the order of their first items; one without a group is one of its own."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for place, item in enumerate(items):
        groups.setdefault((bool(item.group), item.group or item.id), []).append(place)
    return list(groups.values())


def chunked(
    items: Sequence[reward_pb2.ScoreItem],
    most: int,
    weight: Callable[[reward_pb2.ScoreItem], int] = lambda item: 1,
) -> list[list[reward_pb2.ScoreItem]]:
    """Cuts `items` into lists of at most `most` items, or of what each of them weighs; or of one group where that is
    more, for no group is cut.
    """
    chunks: list[list[reward_pb2.ScoreItem]] = []
    room = 0
    for places in groups_of(items):
        size = sum(weight(items[place]) for place in places)
        if not chunks or size > room:
            chunks.append([])
            room = most
        chunks[-1].extend(items[place] for place in places)
        room -= size
    return chunks


def _is_row(answers: Any) -> bool:
    """Whether what a function of many returned has an order that it meant: a dict has keys, a set its hashes'."""
    if isinstance(answers, Sequence | ValuesView):
        return not isinstance(answers, str | bytes)
    return np.ndim(answers) == 1


def _checked(item: reward_pb2.ScoreItem, answer: object, spec: reward_pb2.DescribeResponse) -> reward_pb2.ScoreResult:
    if isinstance(answer, RoleCallError):
        return failure_of(item, answer)
    try:
        return result_of(item, answer, spec)
    except Exception as error:  # the answer of code that is not ours, in which anything may stand
        return failure_of(item, error)


def result_of(item: reward_pb2.ScoreItem, answer: object, spec: reward_pb2.DescribeResponse) -> reward_pb2.ScoreResult:
    """The result that a scorer's return value stands for. ScorerError when it is not a believable score under
    `spec`.
    """
    score = answer if isinstance(answer, Score) else Score(_number(answer))
    reward = reward_pb2.Reward(
        value=_number(score.value), components={name: _number(part) for name, part in score.components.items()}
    )
    if score.token_rewards is not None:
        reward.token_rewards.CopyFrom(encode_tensor(np.asarray(score.token_rewards, np.float32)))
    if score.answer is not None:
        if not isinstance(score.answer, str):
            raise ScorerError(
                f"the scorer {spec.name!r} returned an answer that is {type(score.answer).__name__}; it must be a "
                "str, or None"
            )
        reward.answer = score.answer
    problem = problem_of(reward, spec, item.num_response_tokens)
    if problem:
        raise ScorerError(f"the scorer {spec.name!r} {problem}")
    return reward_pb2.ScoreResult(id=item.id, reward=reward)


def failure_of(item: reward_pb2.ScoreItem, error: Exception) -> reward_pb2.ScoreResult:
    """The ScoreError that an exception stands for; one that is not a RoleCallError is logged with its traceback."""
    if isinstance(error, RoleCallError):
        return error_result(item.id, error.reason, error.message, error.retryable)
    logger.warning("scorer raised on item %s", item.id, exc_info=error)
    return error_result(item.id, "SCORER_EXCEPTION", f"{type(error).__name__}: {error}", False)


def error_result(item_id: str, code: str, message: str, retryable: bool) -> reward_pb2.ScoreResult:
    """Returns a result that is an error in place of a score."""
    error = reward_pb2.ScoreError(
        code=printable(code, MAX_CODE_CHARS), message=printable(message, MAX_MESSAGE_CHARS), retryable=retryable
    )
    return reward_pb2.ScoreResult(id=item_id, error=error)


def printable(text: str, max_chars: int) -> str:
    """The first `max_chars` characters of `text`, every one that is not printable as a space."""
    return "".join(character if character.isprintable() else " " for character in text[:max_chars])


def problem_of(reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse, num_response_tokens: int) -> str | None:
    """Returns what makes `reward` unbelievable under `spec`, as the end of a sentence; None when nothing does."""
    return (
        value_problem(reward, spec)
        or components_problem(reward, spec)
        or token_rewards_problem(reward, spec, num_response_tokens)
    )


def value_problem(reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns what is wrong with the value of a reward, as the end of a sentence; None when nothing is."""
    return _outside("reward", reward.value, spec.reward)


def components_problem(reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns what is wrong with the components of a reward, as the end of a sentence; None when nothing is."""
    declared = {component.name: component for component in spec.components}
    required = {component.name for component in spec.components if not component.may_be_absent}
    if not required <= set(reward.components) <= set(declared):
        return f"returned the components {sorted(reward.components)}, it declares {sorted(declared)}"
    problems = (_outside(f"component {name!r}", value, declared[name]) for name, value in reward.components.items())
    return next((problem for problem in problems if problem), None)


def token_rewards_problem(
    reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse, num_response_tokens: int
) -> str | None:
    """Returns what is wrong with the token rewards of a reward, as the end of a sentence; None when nothing is."""
    if reward.HasField("token_rewards") != spec.token_rewards:
        return (
            "returned token_rewards it does not declare"
            if reward.HasField("token_rewards")
            else "declares token_rewards and returned none"
        )
    if not spec.token_rewards:
        return None
    try:
        rewards = decode_tensor(reward.token_rewards, "token_rewards")
    except InvalidInputError as error:
        return f"returned unreadable token_rewards ({error.message})"
    if rewards.dtype != np.float32 or rewards.shape != (num_response_tokens,):
        return (
            f"returned token_rewards of {rewards.dtype} {list(rewards.shape)}, they must be float32 "
            f"[{num_response_tokens}]"
        )
    return None if np.isfinite(rewards).all() else "returned token_rewards that are not all finite"


def spec_gaps(spec: reward_pb2.DescribeResponse) -> list[str]:
    """Returns what a scorer's description leaves open, as ends of a sentence: believed, and perhaps not meant so."""
    gaps = []
    if not spec.reads:
        gaps.append("names no fields that it reads: it is sent ids, finish reasons and lengths, and no response")
    if not spec.reward.HasField("min") and not spec.reward.HasField("max"):
        gaps.append("names no range of its reward: any finite number is believed")
    return gaps


def spec_problem(spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns what makes a scorer's own description unusable; None when nothing does."""
    unknown = sorted(set(spec.reads) - set(ALL_FIELDS))
    if unknown:
        return f"reads the fields {unknown}, which this release does not know"
    names = [component.name for component in spec.components]
    if len(set(names)) != len(names) or "" in names:
        return f"declares the components {names}; names must be unique and not empty"
    for component in [spec.reward, *spec.components]:
        low, high = _bounds(component)
        if not low <= high:
            return f"declares the range [{low}, {high}] for {component.name or 'reward'!r}; min must not exceed max"
    return None if spec.max_items >= 0 else f"declares max_items {spec.max_items}; it must not be negative"


def change_of(old: reward_pb2.DescribeResponse, new: reward_pb2.DescribeResponse) -> str | None:
    """Returns what two descriptions disagree on, of that which gives a number its meaning; None when they agree."""
    if old.whole_groups != new.whole_groups:
        return f"whole_groups from {old.whole_groups} to {new.whole_groups}"
    if old.token_rewards != new.token_rewards:
        return f"token_rewards from {old.token_rewards} to {new.token_rewards}"
    before, after = (
        {"reward": spec.reward} | {f"component {part.name!r}": part for part in spec.components} for spec in (old, new)
    )
    if before.keys() != after.keys():
        return (
            f"its components from {sorted(part.name for part in old.components)} to "
            f"{sorted(part.name for part in new.components)}"
        )
    changed = next((what for what in before if _bounds(before[what]) != _bounds(after[what])), None)
    return changed and f"the range of its {changed} from {_bounds(before[changed])} to {_bounds(after[changed])}"


def decode_reward(reward: reward_pb2.Reward) -> Score:
    """The plain form of a reward that `problem_of` found nothing wrong with."""
    tokens = decode_tensor(reward.token_rewards, "token_rewards") if reward.HasField("token_rewards") else None
    return Score(reward.value, dict(reward.components), tokens, reward.answer if reward.HasField("answer") else None)


def _bounds(spec: reward_pb2.ComponentSpec) -> tuple[float, float]:
    return spec.min if spec.HasField("min") else -math.inf, spec.max if spec.HasField("max") else math.inf


def _outside(what: str, value: float, spec: reward_pb2.ComponentSpec) -> str | None:
    if not abs(value) <= _GREATEST:
        return (
            f"returned the {what} {value}, which is not "
            f"{'finite' if not math.isfinite(value) else 'a float32: it would be trained on as infinity'}"
        )
    low, high = _bounds(spec)
    if not low <= value <= high:
        return f"returned the {what} {value}, outside its declared range [{low}, {high}]"
    return None


def _number(value: object) -> float:
    if not isinstance(value, Real | np.bool_):
        raise ScorerError(f"the scorer returned {type(value).__name__}; return a number or a rolecall.reward.Score")
    return float(value)


def _token_ids(data: bytes, what: str) -> NDArray[np.int32]:
    if len(data) % 4:
        raise InvalidInputError(f"{what}: {len(data)} bytes are not int32 ids")
    return np.frombuffer(data, "<i4")
