"""Examples of `rolecall sft`: a JSONL or parquet file with a prompt and its response a row, or a whole conversation,
as rollouts will meet them.

A prompt is rendered and tokenized exactly as a run does. What the policy would sample follows: the response's own
tokens and the token that ends it, and the loss is on these alone. Of a conversation each turn of the assistant is such
a response (conversations.py). Nothing is truncated: an example that is too long is refused. No torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.data.continuation import ChatMessage, Tools
from rolecall.data.conversations import TOOLS_FIELD, Conversations, close_of_turn, columns, parse_conversation
from rolecall.data.dataset import is_parquet, parse_messages, rows_of
from rolecall.data.model_files import eos_token_ids
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import SftDataSection
from rolecall.wire import Array

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


@dataclass(frozen=True)
class TokenizedExamples:
    """A file of them, tokenized: those that fit."""

    rows: tuple[tuple[dict[str, Array], ...], ...]
    """The segments of each, which are sequences of their own: one, or as many as a rollout of the conversation would
    have. token_ids int32 [T]; response_mask and loss_mask uint8 [T], 1 on what is trained.
    """
    num_too_long: int
    digest: str
    """Hex, of what is trained on."""


def load_examples(files: Path | tuple[Path, ...], data: SftDataSection, setting: str) -> list[Example]:
    """All rows of `files`, which `setting` names, in their order. ConfigError names the line (from 1) and the field
    that is wrong.
    """
    paths = (files,) if isinstance(files, Path) else files
    return [
        _parse(_without_nulls(row) if is_parquet(paths[place - 1]) else row, where, data)
        for place, _, where, row in rows_of(files, setting, data.preprocess)
    ]


def _without_nulls(value: Any) -> Any:
    """Returns what was written to parquet, whose structs have the fields of every row, null where a row had none."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def tokenize(examples: Sequence[Example], tokenizer: ChatTokenizer, end: int, max_tokens: int) -> TokenizedExamples:
    """Returns the examples as tokens, with `end` after each response, those without a segment of more than
    `max_tokens`. ConfigError names the line that cannot be rendered.
    """
    rows, digest, conversations = list[tuple[dict[str, Array], ...]](), hashlib.sha256(), Conversations(tokenizer, end)
    for each in examples:
        try:
            if each.response is None:
                segments = conversations.segments(each.messages, each.tools)
            else:
                segments = [_answered(each.messages, each.response, tokenizer, end)]
        except InvalidInputError as error:
            raise ConfigError(f"{each.where}: {error.message}") from error
        lengths = [len(segment["token_ids"]) for segment in segments]
        if max(lengths) <= max_tokens:
            rows.append(tuple(segments))
            digest.update(np.array([len(lengths), *lengths], "<i8").tobytes())
            for segment in segments:
                digest.update(segment["token_ids"].astype("<i4").tobytes() + segment["loss_mask"].tobytes())
    return TokenizedExamples(tuple(rows), len(examples) - len(rows), digest.hexdigest())


def end_of_response(path: Path, tokenizer: ChatTokenizer) -> int:
    """The token by which a response ends: what the template puts after the assistant's turn, where rollouts stop at
    that; else an EOS id of the model.
    """
    stops = eos_token_ids(path)
    after = close_of_turn(tokenizer)
    tail = tokenizer.encode(after) if after else []
    own = tokenizer.eos_token_id
    return next(token_id for token_id in [*tail[:1], own, *stops] if token_id is not None and token_id in stops)


def _answered(prompt: Sequence[ChatMessage], text: str, tokenizer: ChatTokenizer, end: int) -> dict[str, Array]:
    """The columns of a prompt and its response."""
    ids, response = tokenizer.encode(tokenizer.render(prompt)), tokenizer.encode(text)
    if response[-1] != end:
        response.append(end)
    return columns([*ids, *response], [0] * len(ids) + [1] * len(response))


def _parse(row: dict[str, object], where: str, data: SftDataSection) -> Example:
    if data.prompt_field not in row:
        raise ConfigError(
            f"{where}: no field {data.prompt_field!r} (fields: {sorted(row)}); set data.prompt_field or mend the line"
        )
    asked, of_prompt = row[data.prompt_field], f"{where}, field {data.prompt_field!r}"
    messages: tuple[ChatMessage, ...]
    response: str | None = None
    tools: Tools = ()
    if row.get(data.response_field) is not None:
        messages = tuple({"role": role, "content": text} for role, text in parse_messages(asked, of_prompt))
        response = _response(row[data.response_field], f"{where}, field {data.response_field!r}")
        if row.get(TOOLS_FIELD) not in _NO_TOOLS:
            raise ConfigError(
                f"{where}, field {TOOLS_FIELD!r}: tools are not shown beside a field {data.response_field!r}; leave "
                "them out, or make the response the last message of a conversation (docs/configuration.md, "
                '"Conversations and tools")'
            )
    elif isinstance(asked, list) and asked and isinstance(asked[-1], dict) and asked[-1].get("role") == "assistant":
        where = of_prompt
        messages, tools = parse_conversation(asked, row.get(TOOLS_FIELD), where)
    else:
        raise ConfigError(
            f"{where}: no field {data.response_field!r} (fields: {sorted(row)}), and field {data.prompt_field!r} is no "
            "conversation that ends with a message of the assistant; set data.response_field or mend the line"
        )
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": data.system_prompt}, *messages)
    return Example(messages, response, tools, where)


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
