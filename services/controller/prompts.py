"""Prompts: from files on disk to an endless, deterministic, resumable sequence of tokenized prompts.

Owns the dataset's format (a JSONL or parquet file, one prompt a row), the order within an epoch and the cursor. Over-long prompts are refused here,
counted, never truncated. Knows nothing of admission or the store.
"""

import json
import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from google.protobuf import struct_pb2

from rolecall.errors import ConfigError
from rolecall.settings import DataSection
from rolecall.tokenizer import ChatTokenizer
from rolecall.v1 import trajectory_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RawPrompt:
    """One row of the dataset, read and checked, not yet rendered."""

    uid: str
    messages: tuple[tuple[str, str], ...]
    """(role, content) of each turn."""
    ground_truth: str
    metadata: Mapping[str, Any]
    """The row's other fields."""


def load_prompts(path: Path, data: DataSection) -> list[RawPrompt]:
    """All rows of `path` in the file's order. ConfigError names the line (from 1) and the field that is wrong."""
    prompts = [_parse(row, f"{path}, line {number}", str(number), data) for number, row in _rows(path)]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; give a JSONL or parquet file with at least one row")
    seen: dict[str, int] = {}
    for number, prompt in enumerate(prompts, 1):
        if prompt.uid in seen:
            raise ConfigError(f"{path}: rows {seen[prompt.uid]} and {number} share the {data.uid_field} {prompt.uid!r}; make it unique or remove the field")
        seen[prompt.uid] = number
    return prompts


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise ConfigError(f"the dataset {path} does not exist; give the path of a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1):
            yield number, row
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); one JSON object a line is needed") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number}: a {type(row).__name__}, not an object with fields")
            yield number, row


def _parse(row: dict[str, Any], where: str, default_uid: str, data: DataSection) -> RawPrompt:
    if data.prompt_field not in row:
        raise ConfigError(f"{where}: no field {data.prompt_field!r} (fields: {sorted(row)}); set data.prompt_field or mend the line")
    messages = _messages(row[data.prompt_field], f"{where}, field {data.prompt_field!r}")
    if data.system_prompt is not None and messages[0][0] != "system":
        messages = (("system", data.system_prompt), *messages)
    truth = row.get(data.ground_truth_field, "")
    if not isinstance(truth, str):
        raise ConfigError(f"{where}, field {data.ground_truth_field!r}: a {type(truth).__name__}, not a string; write it as text")
    known = {data.prompt_field, data.ground_truth_field, data.uid_field}
    metadata = {key: value for key, value in row.items() if key not in known and value is not None}
    return RawPrompt(str(row.get(data.uid_field, default_uid)), messages, truth, metadata)


def _messages(value: object, where: str) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: neither text nor a non-empty list of messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}: a message is not {{role: text, content: text}}: {message!r}")
        messages.append((message["role"], message["content"]))
    if not any(content.strip() for _, content in messages):
        raise ConfigError(f"{where}: the prompt is empty")
    return tuple(messages)


class PromptRenderer:
    """Renders and tokenizes once; the ids are the truth from there on."""

    def __init__(self, tokenizer: ChatTokenizer, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens

    def render(self, raw: RawPrompt, epoch: int) -> trajectory_pb2.Prompt | None:
        """The prompt with its token ids, or None when it is longer than max_prompt_tokens."""
        messages = [{"role": role, "content": content} for role, content in raw.messages]
        token_ids = self._tokenizer.encode(self._tokenizer.render(messages))
        if len(token_ids) > self._max_prompt_tokens:
            return None
        metadata = struct_pb2.Struct()
        metadata.update(json.loads(json.dumps(raw.metadata, default=str)))
        return trajectory_pb2.Prompt(
            uid=raw.uid,
            epoch=epoch,
            token_ids=np.asarray(token_ids, "<i4").tobytes(),
            messages=[trajectory_pb2.Message(**message) for message in messages],
            ground_truth=raw.ground_truth,
            metadata=metadata,
        )


@dataclass(frozen=True)
class Cursor:
    """Where the sequence stands: the next prompt is number `index` of epoch `epoch`'s order."""

    epoch: int = 0
    index: int = 0
    num_too_long: int = 0
    """Prompts refused so far for their length."""

    def encode(self) -> bytes:
        """Bytes for the ledger and checkpoints."""
        return json.dumps([self.epoch, self.index, self.num_too_long]).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Cursor":
        """What `encode` wrote; empty bytes are the start."""
        return cls(*json.loads(data)) if data else cls()


class PromptSequence:
    """The training prompts, epoch after epoch, each epoch in an order of its own drawn from (seed, epoch)."""

    def __init__(self, prompts: list[RawPrompt], renderer: PromptRenderer, *, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._renderer = renderer
        self._seed = seed
        self._shuffle = shuffle
        self.move_to(Cursor())

    def move_to(self, cursor: Cursor) -> None:
        """Goes on from `cursor`."""
        self.cursor = cursor
        self._order = self._order_of(cursor.epoch)

    def next(self) -> trajectory_pb2.Prompt:
        """The next prompt that fits; moves the cursor. ConfigError when a whole epoch has none that fits."""
        for _ in range(2 * len(self._prompts) + 1):
            epoch, index, refused = self.cursor.epoch, self.cursor.index, self.cursor.num_too_long
            if index == len(self._prompts):
                self.cursor = Cursor(epoch + 1, 0, refused)
                self._order = self._order_of(epoch + 1)
                continue
            raw = self._prompts[self._order[index]]
            prompt = self._renderer.render(raw, epoch)
            self.cursor = Cursor(epoch, index + 1, refused + (prompt is None))
            if prompt is not None:
                return prompt
            logger.warning("prompt %s is longer than data.max_prompt_tokens and is left out", raw.uid)
        raise ConfigError("no prompt of data.train fits data.max_prompt_tokens; raise it or shorten the prompts")

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
