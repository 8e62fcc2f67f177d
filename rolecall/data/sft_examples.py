"""Examples of `rolecall sft`: a JSONL or parquet file with a prompt and its response a row, or a whole conversation,
as rollouts will meet them.

A prompt is rendered and tokenized exactly as a run does. What the policy would sample follows: the response's own
tokens and the token that ends it, and the loss is on these alone. Of a conversation each turn of the assistant is such
a response (conversations.py). Nothing is truncated: an example that is too long is refused, and so is one whose images
cannot be shown, of which the heads of files are read here, and the files when they are trained on. No torch.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rolecall.data.continuation import ChatMessage, Tools, num_images_in
from rolecall.data.conversations import TOOLS_FIELD, Conversations, Segment, close_of_turn, parse_conversation
from rolecall.data.dataset import images_of, parse_messages
from rolecall.data.images.files import ImageFile, parts
from rolecall.data.images.spool import Spool
from rolecall.data.images.tokens import VisualTokens
from rolecall.data.model.files import eos_token_ids
from rolecall.data.row_files import is_parquet, rows_of, told
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError, StorageUnavailableError
from rolecall.settings import SftDataSection
from rolecall.wire import Array

T = TypeVar("T")

AWAY_S, RETRY_S = 600.0, 2.0
"""Seconds for which the disk of an image may be away, as long as a run waits for one, and between two tries."""
logger = logging.getLogger(__name__)

_NO_TOOLS: tuple[object, ...] = (None, [], "", "[]", "null")
"""Ways in which a row has the field of tools and none."""


@dataclass(frozen=True)
class Example:
    """One row, read and checked."""

    messages: tuple[ChatMessage, ...]
    """The prompt of the response, or a conversation whose last message is the assistant's."""
    response: str | None
    """Text; None: `messages` are a conversation."""
    tools: Tools
    """Tools that the conversation is shown."""
    where: str
    """File and line, for complaints."""
    images: tuple[ImageFile, ...] = ()
    """The images that the messages show, in their order."""


@dataclass(frozen=True)
class RowImages:
    """The images of an example, in the order in which it shows them."""

    files: tuple[ImageFile, ...]
    where: str
    """File and line of the example, for complaints."""


@dataclass(frozen=True)
class TokenizedExamples:
    """A file of them, tokenized: those that fit."""

    rows: tuple[tuple[dict[str, Array], ...], ...]
    """The segments of each, which are sequences of their own: one, or as many as a rollout of the conversation would
    have. token_ids int32 [T]; response_mask and loss_mask uint8 [T], 1 on what is trained.
    """
    num_too_long: int
    digest: str
    """Hex, of what is trained on; of images their tokens and the lengths of their files."""
    images: tuple[RowImages, ...] = ()
    """Images by row; empty where examples are text."""
    image_files: tuple[ImageFile, ...] = ()
    """The images with a path that the file's rows name, also those that are left out, in their order."""
    unshown: tuple[str, ...] = ()
    """Why examples are left out whose images cannot be shown, each with its file and line."""


def load_examples(
    files: Path | tuple[Path, ...],
    data: SftDataSection,
    setting: str,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[Example]:
    """All rows of `files`, which `setting` names, in their order. ConfigError names the line (from 1) and the field
    that is wrong. StorageUnavailableError as `patiently`. `tell` as in `told`.
    """
    paths = (files,) if isinstance(files, Path) else files
    for place, _, where, row in told(rows_of(files, setting, data.preprocess, data.images_field), tell):
        path = paths[place - 1]
        fields = _without_nulls(row) if is_parquet(path) else row
        yield patiently(partial(_parse, fields, where, path.parent, data))


def patiently(read: Callable[[], T]) -> T:
    """Returns what `read` does, which is tried again while the disk of an image is away. StorageUnavailableError when
    it still is after AWAY_S.
    """
    until = time.monotonic() + AWAY_S
    while True:
        try:
            return read()
        except StorageUnavailableError as error:
            if time.monotonic() > until:
                raise
            logger.warning("waiting: %s", error.message)
            time.sleep(RETRY_S)


def _without_nulls(value: Any) -> Any:
    """Returns what was written to parquet, whose structs have the fields of every row, null where a row had none."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def tokenize(
    examples: Iterable[Example],
    tokenizer: ChatTokenizer,
    end: int,
    max_tokens: int,
    visual_tokens: VisualTokens | None = None,
    spool: Spool | None = None,
) -> TokenizedExamples:
    """Returns the examples as tokens, with `end` after each response, those without a segment of more than
    `max_tokens`, and whose images can be shown. ConfigError names the line that cannot be rendered.
    StorageUnavailableError as `patiently`. `visual_tokens`: those of the model; None: examples are text. `spool`: where
    images that the data set's file holds are put away; None: they are kept.
    """
    rows, digest, conversations = list[tuple[dict[str, Array], ...]](), hashlib.sha256(), Conversations(tokenizer, end)
    images, image_files, unshown, num_too_long = list[RowImages](), list[ImageFile](), list[str](), 0
    for each in examples:
        image_files += [image for image in each.images if image.path is not None]
        try:
            if each.response is None:
                segments = conversations.segments(each.messages, each.tools)
            else:
                segments = [_answered(each.messages, each.response, tokenizer, end)]
        except InvalidInputError as error:
            raise ConfigError(f"{each.where}: {error.message}") from error
        try:
            numbers = [visual_tokens.number(*patiently(image.size)) for image in each.images] if visual_tokens else []
            row = tuple(segment.columns(visual_tokens, numbers) for segment in segments)
        except InvalidInputError as error:
            unshown.append(f"{each.where}: {error.message}")
            continue
        lengths = [len(segment["token_ids"]) for segment in row]
        if max(lengths) > max_tokens:
            num_too_long += 1
            continue
        rows.append(row)
        digest.update(np.array([len(lengths), *lengths], "<i8").tobytes())
        for segment in row:
            digest.update(segment["token_ids"].astype("<i4").tobytes() + segment["loss_mask"].tobytes())
        if visual_tokens is not None:
            images.append(RowImages(tuple(map(spool.put, each.images)) if spool else each.images, each.where))
            digest.update(np.array([image.num_bytes for image in each.images], "<i8").tobytes())
    return TokenizedExamples(
        tuple(rows), num_too_long, digest.hexdigest(), tuple(images), tuple(image_files), tuple(unshown)
    )


def end_of_response(path: Path, tokenizer: ChatTokenizer) -> int:
    """The token by which a response ends: what the template puts after the assistant's turn, where rollouts stop at
    that; else an EOS id of the model.
    """
    stops = eos_token_ids(path)
    after = close_of_turn(tokenizer)
    tail = tokenizer.encode(after) if after else []
    own = tokenizer.eos_token_id
    return next(token_id for token_id in [*tail[:1], own, *stops] if token_id is not None and token_id in stops)


def _answered(prompt: Sequence[ChatMessage], text: str, tokenizer: ChatTokenizer, end: int) -> Segment:
    """A prompt and its response."""
    ids, response = tokenizer.encode(tokenizer.render(prompt)), tokenizer.encode(text)
    if response[-1] != end:
        response.append(end)
    if end in response[:-1]:
        raise InvalidInputError(f"the response spells the token that ends it, {text[-80:]!r}; leave it out")
    num_images = sum(map(num_images_in, prompt))
    return Segment([*ids, *response], [0] * len(ids) + [1] * len(response), num_images)


def _parse(row: dict[str, object], where: str, folder: Path, data: SftDataSection) -> Example:
    if data.prompt_field not in row:
        raise ConfigError(
            f"{where}: no field {data.prompt_field!r} (fields: {sorted(row)}); set data.prompt_field or mend the line"
        )
    asked, of_prompt, of_row = row[data.prompt_field], f"{where}, field {data.prompt_field!r}", where
    shows_images = data.images_field is not None
    messages: tuple[ChatMessage, ...]
    response: str | None = None
    tools: Tools = ()
    if row.get(data.response_field) is not None:
        said = parse_messages(asked, of_prompt, shows_images=shows_images)
        messages = tuple({"role": role, "content": parts(text) if shows_images else text} for role, text in said)
        response = _response(row[data.response_field], f"{where}, field {data.response_field!r}")
        if row.get(TOOLS_FIELD) not in _NO_TOOLS:
            raise ConfigError(
                f"{where}, field {TOOLS_FIELD!r}: tools are not shown beside a field {data.response_field!r}; leave "
                "them out, or make the response the last message of a conversation (docs/configuration.md, "
                '"Conversations and tools")'
            )
    elif isinstance(asked, list) and asked and isinstance(asked[-1], dict) and asked[-1].get("role") == "assistant":
        where = of_prompt
        messages, tools = parse_conversation(asked, row.get(TOOLS_FIELD), where, shows_images=shows_images)
    else:
        raise ConfigError(
            f"{where}: no field {data.response_field!r} (fields: {sorted(row)}), and field {data.prompt_field!r} is no "
            "conversation that ends with a message of the assistant; set data.response_field or mend the line"
        )
    num_shown = sum(map(num_images_in, messages))
    images = images_of(row, of_row, folder, data.images_field, num_shown, of_prompt)
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": data.system_prompt}, *messages)
    return Example(messages, response, tools, where, images)


def _response(value: object, where: str) -> str:
    if isinstance(value, list):
        messages = parse_messages(value, where)
        if [role for role, _ in messages] != ["assistant"]:
            raise ConfigError(
                f"{where}: a response is one message of the assistant; put earlier turns into the prompt, each "
                "response into its own row"
            )
        return messages[0][1]
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{where}: {'empty' if value == '' else f'a {type(value).__name__}'}, not a response; write text or one "
            f"{{role: assistant, content}}"
        )
    return value
