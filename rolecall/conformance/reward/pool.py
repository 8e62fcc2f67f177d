"""The items that a RewardService is asked to score: some of the kit's own, or those of a file, and odd ones made of
them.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from google.protobuf import json_format
from pydantic import BaseModel, ConfigDict, ValidationError

from rolecall.conformance.check import wrong_fields
from rolecall.errors import ConfigError
from rolecall.v1 import reward_pb2, trajectory_pb2

NUM_OWN = 24
"""Items of the kit's own."""
LONG_TOKENS = 32768
"""Length of the longest response that the contract asks a scorer to take."""
_RESPONSES = (
    "42",
    "The answer is 42.",
    r"So x = \frac{84}{2}, and the result is \boxed{42}.",
    '{"answer": 42, "steps": ["half of 84"]}',
    "I do not know.",
    "<think>half of 84</think>\n<answer>42</answer>",
    "def half(x):\n    return x // 2\n",
    "12469",
)
_TRUTHS = ("42", "41", "12469")
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAADgAAAA4AQMAAACSSKldAAAABlBMVEX////IAADKfhSGAAAAGUlEQVR42mNgoDdg/v///wEGJihvuNH0BgAM0QP3"
    "xfmHygAAAABJRU5ErkJggg=="
)
"""A red square on white, 56 x 56 pixels, which every other item shows to a scorer that reads images."""
_FINISH_REASONS = {
    "stop": trajectory_pb2.FINISH_REASON_STOP,
    "length": trajectory_pb2.FINISH_REASON_LENGTH,
    "abort": trajectory_pb2.FINISH_REASON_ABORT,
}


class Turn(BaseModel):
    """One turn of the conversation before a response."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: str
    content: str


class FileItem(BaseModel):
    """One line of an items file, as JSON: the fields of a ScoreItem, and what is known of its score."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    response_text: str
    messages: tuple[Turn, ...] = ()
    images: tuple[str, ...] = ()
    """Paths from the file's folder, of the images that the messages show: each where a text says "<image>"."""
    ground_truth: str = ""
    metadata: dict[str, Any] | None = None
    prompt_token_ids: tuple[int, ...] = ()
    response_token_ids: tuple[int, ...] | None = None
    """Absent: one id for each word of the response."""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    expect_reward: float | None = None
    """Reward.value that is right for it."""
    expect_error: str | None = None
    """Code of the ScoreError that is right for it; empty when any is."""


@dataclass(frozen=True)
class Pool:
    """Items with ids of their own, and what is known of their scores."""

    items: Sequence[reward_pb2.ScoreItem]
    expected: dict[str, FileItem]
    """Lines by the item's id, of those whose score or error is known."""
    lines: dict[str, int]
    """Line of each in its file."""
    without_images: Sequence[reward_pb2.ScoreItem] | None = None
    """What a scorer that reads no images is asked in place of `items`; None: the same."""

    def for_scorer(self, spec: reward_pb2.DescribeResponse) -> "Pool":
        """The pool that a scorer is asked to score which says that it is `spec`."""
        if self.without_images is None or reward_pb2.SCORE_FIELD_IMAGES in spec.reads:
            return self
        return replace(self, items=self.without_images)

    def copies(self, num: int, prefix: str = "copy") -> list[reward_pb2.ScoreItem]:
        """`num` items, the pool's again and again, each with an id of its own."""
        return [with_id(item, f"{prefix}/{i}") for i, item in enumerate(islice(cycle(self.items), num))]


def own_pool() -> Pool:
    """The kit's own items: short answers in the forms that scorers look for, right and wrong ones."""
    return Pool(_own_items(2), {}, {}, without_images=_own_items(NUM_OWN + 1))


def _own_items(image_every: int) -> list[reward_pb2.ScoreItem]:
    items = []
    for i in range(NUM_OWN):
        shows = i % image_every == image_every - 1
        turn = Turn(role="user", content="<image>What is half of 84?" if shows else "What is half of 84?")
        file_item = FileItem(
            response_text=_RESPONSES[i % len(_RESPONSES)],
            messages=(turn,),
            ground_truth=_TRUTHS[i // len(_RESPONSES)],
            metadata={"source": "rolecall conformance", "difficulty": i % 3},
            prompt_token_ids=(1, 2, 3),
            finish_reason="length" if i == 0 else "stop",
        )
        items.append(_score_item(f"item/{i}", file_item, [PICTURE] if shows else []))
    return items


def read_pool(path: Path) -> Pool:
    """The items in a JSONL file, each line as FileItem. ConfigError naming the line that cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"--items: cannot read {path}: {error.strerror}") from error
    items: list[reward_pb2.ScoreItem] = []
    expected: dict[str, FileItem] = {}
    lines: dict[str, int] = {}
    for number, line in _lines(text):
        try:
            file_item = FileItem.model_validate(json.loads(line))
        except ValidationError as error:
            raise ConfigError(f"--items: {path}, line {number}: {wrong_fields(error)}") from error
        except ValueError as error:
            raise ConfigError(f"--items: {path}, line {number}: not JSON: {error}") from error
        try:
            images = [(path.parent / name).read_bytes() for name in file_item.images]
        except OSError as error:
            raise ConfigError(f"--items: {path}, line {number}: cannot read an image: {error}") from error
        item = _score_item(f"line/{number}", file_item, images)
        items.append(item)
        lines[item.id] = number
        if file_item.expect_reward is not None or file_item.expect_error is not None:
            expected[item.id] = file_item
    if not items:
        raise ConfigError(f"--items: {path} holds no item; write one JSON object a line, with response_text")
    return Pool(items, expected, lines)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _score_item(item_id: str, source: FileItem, images: Sequence[bytes]) -> reward_pb2.ScoreItem:
    ids = source.response_token_ids
    if ids is None:
        ids = tuple(range(10, 11 + len(source.response_text.split())))
    item = reward_pb2.ScoreItem(
        id=item_id,
        messages=[trajectory_pb2.Message(role=turn.role, content=turn.content) for turn in source.messages],
        response_text=source.response_text,
        prompt_token_ids=token_bytes(source.prompt_token_ids),
        response_token_ids=token_bytes(ids),
        ground_truth=source.ground_truth,
        finish_reason=_FINISH_REASONS[source.finish_reason],
        num_response_tokens=len(ids),
        images=images,
    )
    if source.metadata is not None:
        json_format.ParseDict(source.metadata, item.metadata)
    return item


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as a ScoreItem carries them."""
    return np.asarray(ids, "<i4").tobytes()


def with_id(item: reward_pb2.ScoreItem, item_id: str) -> reward_pb2.ScoreItem:
    """A copy of `item` under another id."""
    copy = reward_pb2.ScoreItem()
    copy.CopyFrom(item)
    copy.id = item_id
    return copy


def with_response(item: reward_pb2.ScoreItem, item_id: str, text: str, num_tokens: int) -> reward_pb2.ScoreItem:
    """A copy of `item` with another response of `num_tokens` tokens."""
    copy = with_id(item, item_id)
    copy.response_text = text
    copy.response_token_ids = token_bytes([10 + i % 1000 for i in range(num_tokens)])
    copy.num_response_tokens = num_tokens
    return copy
