"""The prompts of groups in flight, as a checkpoint notes them.

They are admitted again where the store's memory of them is lost. Their images are noted as digests (Prompt.images holds
those then): the files are the data's, and a manifest with all of them would be as large as what is in flight.
"""

import base64
import contextlib
from collections.abc import Sequence

from rolecall.columns import IMAGES
from rolecall.errors import RowMissingError
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.v1 import trajectory_pb2
from services.controller.groups.prompts import digests

READ_COUNT = 256
"""Committed groups per read."""


def prompts_in_flight(ledger: Ledger, rows: Rows, next_gid: int) -> list[trajectory_pb2.Prompt]:
    """The prompts of all live groups below `next_gid`, in order of admission, with digests of their images. Blocks."""
    prompts = {group.gid: group.prompt for group in ledger.queued()}
    for prompt in prompts.values():
        prompt.images[:] = digests(prompt.images)
    position = "0"
    while entries := ledger.read_committed(position, READ_COUNT, 0.0):
        position = entries[-1][0]
        for _, group in entries:
            with contextlib.suppress(RowMissingError):  # scored and dropped since it was read: no longer in flight
                prompts[group.gid] = _prompt_of(rows, group.rows[0])
    return [prompts[gid] for gid in sorted(prompts) if gid < next_gid]


def _prompt_of(rows: Rows, ref: trajectory_pb2.RowRef) -> trajectory_pb2.Prompt:
    """The prompt of a committed row: meta leaves its token ids out, they are the head of the row's own, and its images,
    which are a column.
    """
    (row,), (meta,) = rows.read_with_meta([ref], ["token_ids"], [IMAGES])
    meta.prompt.token_ids = row["token_ids"][: meta.num_prompt_tokens].tobytes()
    if IMAGES in row:
        files = trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).files
        meta.prompt.images.extend(digests(files[: len(files) - meta.episode.num_images]))
    return meta.prompt


def encode_prompts(prompts: Sequence[trajectory_pb2.Prompt]) -> list[str]:
    """`prompts` as a checkpoint's manifest holds them: base64 of each, serialized."""
    return [base64.b64encode(prompt.SerializeToString()).decode() for prompt in prompts]


def decode_prompts(texts: Sequence[str]) -> tuple[trajectory_pb2.Prompt, ...]:
    """Returns what `encode_prompts` was given."""
    return tuple(trajectory_pb2.Prompt.FromString(base64.b64decode(text)) for text in texts)
