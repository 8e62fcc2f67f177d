"""Examples of `rolecall sft`: a JSONL or parquet file with a prompt and its response a row, rendered as rollouts will
meet them.

A prompt is rendered and tokenized exactly as a run does. What the policy would sample follows: the response's own
tokens and the token that ends it, and the loss is on these alone. Nothing is truncated: an example that is too long is
refused. No torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolecall.data.dataset import parse_messages, read_rows
from rolecall.data.model_files import eos_token_ids
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import SftDataSection
from rolecall.wire import Array


@dataclass(frozen=True)
class Example:
    """One row, read and checked."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) of each turn of the prompt."""
    response: str
    where: str
    """File and line, for complaints."""


@dataclass(frozen=True)
class TokenizedExamples:
    """A file of them, tokenized: those that fit."""

    rows: tuple[dict[str, Array], ...]
    """token_ids int32 [T]; response_mask and loss_mask uint8 [T], 1 on the response and its end."""
    num_too_long: int
    digest: str
    """Hex, of what is trained on."""


def load_examples(path: Path, data: SftDataSection, setting: str) -> list[Example]:
    """All rows of `path`, which `setting` names, in the file's order. ConfigError names the line (from 1) and the field
    that is wrong.
    """
    found = [_parse(row, f"{path}, line {number}", data) for number, row in read_rows(path, setting)]
    if not found:
        raise ConfigError(f"{setting}: {path} holds no examples; give a JSONL or parquet file with at least one row")
    return found


def tokenize(examples: Sequence[Example], tokenizer: ChatTokenizer, end: int, max_tokens: int) -> TokenizedExamples:
    """Returns the examples as tokens, with `end` after each response. ConfigError names the line that cannot be
    rendered.
    """
    rows, digest = list[dict[str, Array]](), hashlib.sha256()
    for each in examples:
        chat = [{"role": role, "content": content} for role, content in each.messages]
        try:
            prompt, response = tokenizer.encode(tokenizer.render(chat)), tokenizer.encode(each.response)
        except InvalidInputError as error:
            raise ConfigError(f"{each.where}: {error.message}") from error
        if response[-1] != end:
            response.append(end)
        if len(prompt) + len(response) <= max_tokens:
            token_ids = np.array([*prompt, *response], np.int32)
            mask = (np.arange(len(token_ids)) >= len(prompt)).astype(np.uint8)
            rows.append({"token_ids": token_ids, "response_mask": mask, "loss_mask": mask})
            digest.update(np.array([len(prompt), len(response)], "<i8").tobytes() + token_ids.astype("<i4").tobytes())
    return TokenizedExamples(tuple(rows), len(examples) - len(rows), digest.hexdigest())


def end_of_response(path: Path, tokenizer: ChatTokenizer) -> int:
    """The token by which a response ends: what the template puts after the assistant's turn, where rollouts stop at
    that; else an EOS id of the model.
    """
    stops = eos_token_ids(path)
    marker = "rolecall"
    turn = tokenizer.render(
        [{"role": "user", "content": marker}, {"role": "assistant", "content": marker}], generate=False
    )
    after = turn.rpartition(marker)[2]
    tail = tokenizer.encode(after) if after else []
    own = tokenizer.eos_token_id
    return next(token_id for token_id in [*tail[:1], own, *stops] if token_id is not None and token_id in stops)


def _parse(row: dict[str, object], where: str, data: SftDataSection) -> Example:
    for setting, name in (("data.prompt_field", data.prompt_field), ("data.response_field", data.response_field)):
        if name not in row:
            raise ConfigError(f"{where}: no field {name!r} (fields: {sorted(row)}); set {setting} or mend the line")
    messages = parse_messages(row[data.prompt_field], f"{where}, field {data.prompt_field!r}")
    if data.system_prompt is not None and messages[0][0] != "system":
        messages = (("system", data.system_prompt), *messages)
    return Example(messages, _response(row[data.response_field], f"{where}, field {data.response_field!r}"), where)


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
