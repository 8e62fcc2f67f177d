"""Packed tensors: rows one after another as a microbatch, and back.

Which rows are in which microbatch is plan.py's.

Shapes: N tokens of one microbatch; S its sequences; T tokens of one sequence.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.columns import IMAGES, OLD_ROUTED_EXPERTS, ROUTED_EXPERTS
from rolecall.errors import InvalidInputError
from rolecall.training.engine import Microbatch
from rolecall.training.model.prefixes import find_prefixes
from rolecall.training.packing.images import PlacedImages, ReadImages, place_images
from rolecall.wire import Array

Row = Mapping[str, Array]
"""The columns of a trajectory, or of one of its segments, by name, as numpy arrays."""


def pack(
    rows: Sequence[Row],
    columns: Sequence[str],
    *,
    temperature: float | Sequence[float],
    device: torch.device,
    trajectories: Sequence[int] | None = None,
    images: ReadImages | None = None,
) -> Microbatch:
    """Rows one after another as tensors on `device`, a sequence each, scored where `response_mask` is. `trajectories`:
    the trajectory that each row is a segment of, by any number (absent: each is one); `images` are those of the column
    IMAGES, which every row then has.

    Masks arrive as bool, other columns as they are. Sequences share a beginning only as far as they were routed alike,
    and show the same images.

    `temperature` is one number or one per row. No rows make an empty microbatch. InvalidInputError when a column is not
    per-token or too short, or an image is not where the tokens say.
    """
    lengths = [int(row["token_ids"].shape[0]) for row in rows]
    if min(lengths, default=1) < 1:
        raise InvalidInputError("a trajectory without tokens cannot be packed")
    score_mask_N = _joined(rows, "response_mask", lengths, np.dtype(np.uint8)) != 0
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    score_mask_N[starts[:-1]] = False
    temperatures = [temperature] * len(rows) if isinstance(temperature, int | float) else list(temperature)
    arrays = {name: _joined(rows, name, lengths, np.dtype(np.float32)) for name in columns}
    token_ids = [row["token_ids"] for row in rows]
    placed = None if images is None else place_images(token_ids, [row[IMAGES] for row in rows], images)
    prefixes = find_prefixes(_identities(rows, columns, placed), device)
    position_N = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    masks = {name: array != 0 for name, array in arrays.items() if array.dtype == np.uint8 and array.ndim == 1}
    return Microbatch(
        token_ids_N=torch.from_numpy(_joined(rows, "token_ids", lengths, np.dtype(np.int32)).astype(np.int64)).to(
            device
        ),
        position_ids_N=torch.from_numpy(position_N if placed is None else placed.position_3N).to(device),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
        lengths=tuple(lengths),
        trajectories=tuple(range(len(rows)) if trajectories is None else trajectories),
        temperature_N=torch.from_numpy(np.repeat(np.asarray(temperatures, np.float32), lengths)).to(device),
        score_mask_N=torch.from_numpy(score_mask_N).to(device),
        num_scored=int(np.count_nonzero(score_mask_N)),
        prefixes=prefixes,
        shown=None if placed is None else placed.shown(prefixes, device),
        columns={name: torch.from_numpy(array).to(device) for name, array in {**arrays, **masks}.items()},
    )


def unpack(values_N: torch.Tensor, lengths: Sequence[int]) -> list[Array]:
    """One float32 array [T], or [T, k], per sequence of a microbatch, in order: what goes back into the rows. Whole
    numbers stay what they are.
    """
    flat_N = values_N.detach().to("cpu", torch.float32 if values_N.is_floating_point() else values_N.dtype).numpy()
    return [part.copy() for part in np.split(flat_N, np.cumsum(lengths)[:-1])] if lengths else []


def local_counts(rows: Sequence[Row], trajectories: Sequence[int] | None = None) -> Counts:
    """Trained tokens (a sequence's first token is never one) and trajectories that have any. `trajectories` as
    in `pack`.
    """
    per_row = [int(np.count_nonzero(row["loss_mask"][1:])) for row in rows]
    of_row = range(len(rows)) if trajectories is None else trajectories
    return Counts(sum(per_row), len({number for number, count in zip(of_row, per_row, strict=True) if count}))


def _identities(rows: Sequence[Row], columns: Sequence[str], placed: PlacedImages | None) -> list[Array]:
    """All that a token's computation depends on beside the tokens before it, of each row [T] or [T, n]: its id, the
    experts that it is sent to where they are given, and the image's feature that it shows where any is shown.
    """
    routed = [name for name in (ROUTED_EXPERTS, OLD_ROUTED_EXPERTS) if name in columns]
    parts = [[row["token_ids"], *(row[name] for name in routed)] for row in rows]
    if placed is not None:
        parts = [[*part, feature_T] for part, feature_T in zip(parts, placed.features, strict=True)]
    return [part[0] if len(part) == 1 else np.hstack([_as_bytes(each) for each in part]) for part in parts]


def _as_bytes(array: Array) -> Array:
    """uint8 [T, n]."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


def _joined(rows: Sequence[Row], name: str, lengths: Sequence[int], empty: np.dtype[np.generic]) -> Array:
    for row, length in zip(rows, lengths, strict=True):
        if row[name].shape[:1] != (length,):
            raise InvalidInputError(
                f"column {name!r} has shape {row[name].shape} beside {length} token_ids; only per-token columns can "
                "be packed"
            )
    return np.concatenate([row[name] for row in rows]) if rows else np.zeros(0, empty)
