"""Ranks that are apart for longer than usual: in pieces of one work, and in the writing of checkpoints."""

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rolecall.checkpoint.storage import DiskStorage
from rolecall.columns import IMAGES
from rolecall.data.images.tokens import VisualTokens
from rolecall.errors import CheckpointMismatchError, DiskFullError, StorageUnavailableError
from rolecall.store.rows import Rows
from rolecall.training.engine import Microbatch
from rolecall.training.packing.images import Image
from rolecall.training.ranks import command_group
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.writers import Writers
from rolecall.training.state.checkpoint import Snapshot, State
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.share import compute_column
from rolecall.v1.trajectory_pb2 import Images, RowRef, TrajectoryMeta
from rolecall.wire import Array
from tests.forks import run_ranks

T = TypeVar("T")

APART_S = 2.0
"""What is too long for a group in these tests; COMMAND_TIMEOUT_S else."""


def meet(folder: Path, rank: int) -> CommandGroup:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    return CommandGroup.of_default()


def in_pieces(folder: Path, rank: int) -> None:
    command_group._PIECES_S = 0.1
    group, told = meet(folder, rank), list[float]()

    def pieces(*, fails: bool) -> Iterator[None]:
        for _ in range(10 if rank else 0):
            time.sleep(0.05)
            yield
        if rank and fails:
            raise CheckpointMismatchError("this rank's file is not what was written")

    group.agree_on_pieces(pieces(fails=False), lambda: told.append(time.monotonic()))
    assert len(told) >= 3, "a rank without pieces must be seen to get on while the other does"
    with pytest.raises(CheckpointMismatchError, match="is not what was written"):
        group.agree_on_pieces(pieces(fails=True), lambda: None)
    assert group.sum(np.array([1.0]))[0] == 2, "the ranks go on together"


def test_a_rank_without_pieces_is_seen_to_get_on_while_the_others_work(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, in_pieces, tmp_path)


class SlowRows(Rows):
    """Rows of which a call takes a while."""

    def __init__(self) -> None:
        """Nothing is stored."""

    def read_by_calls(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[dict[str, Array], TrajectoryMeta]]]:
        meta = TrajectoryMeta()
        meta.sampling.temperature = 1
        for ref in refs:
            yield from self._calls([])
            row: dict[str, Array] = {"token_ids": np.ones(4, np.int32), "response_mask": np.ones(4, np.uint8)}
            assert ref.num_tokens == 4
            yield [(row, meta)]

    def put_by_calls(self, refs: Sequence[RowRef], columns: Sequence[Mapping[str, Array]]) -> Iterator[int]:
        if refs:
            yield from self._calls(0)

    @staticmethod
    def _calls(said: T) -> Iterator[T]:
        for _ in range(10):
            time.sleep(0.05)
            yield said


def compute_of(context: StoreRankContext, num_tokens: int) -> None:
    """Computes a column of one row."""
    compute_column(
        context,
        [RowRef(id="0/0", num_tokens=num_tokens)],
        ["values"],
        lambda microbatch, _: [{}] * len(microbatch.lengths),
    )


def context_of(group: CommandGroup, engine: "IdleEngine", rows: Rows, told: list[int], **more: Any) -> StoreRankContext:
    """A context that adds the engine's number of passes to `told` whenever it gets on."""
    unused = cast("Any", None)
    return StoreRankContext(
        engine=cast("Any", engine),
        state=unused,
        group=group,
        device=torch.device("cpu"),
        token_budget=32,
        memory=unused,
        recorder=unused,
        progressed=lambda: told.append(engine.num_passes),
        rows=rows,
        **more,
    )


def compute_one_row(folder: Path, rank: int) -> None:
    command_group._PIECES_S = 0.1
    group, told, engine = meet(folder, rank), list[int](), IdleEngine()
    compute_of(context_of(group, engine, SlowRows(), told), 4)
    assert [told.count(num_passes) >= 3 for num_passes in (0, 1)] == [True, True], "while it is read, and written"


class IdleEngine:
    """An engine that computes nothing."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.flops = SimpleNamespace(forward=FlopsOfLengths())

    def forward(self, microbatches: Sequence[Microbatch], wanted: object) -> list[None]:
        self.num_passes += 1
        return [None] * len(microbatches)


class FlopsOfLengths:
    """A token costs 1."""

    def costs(self, lengths: Sequence[int]) -> Array:
        return np.array(lengths, np.float64)


def test_a_rank_without_rows_is_seen_to_get_on_while_another_reads_and_writes_its_own(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, compute_one_row, tmp_path)


SHOWS = 5
FILES = [bytes([number]) for number in range(10)]


class ShownRows(Rows):
    """Rows that show FILES, of a token each."""

    def __init__(self) -> None:
        """Nothing is stored."""

    def read_by_calls(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[dict[str, Array], TrajectoryMeta]]]:
        meta = TrajectoryMeta()
        meta.sampling.temperature = 1
        ids = np.array([1, SHOWS] * len(FILES), np.int32)
        row: dict[str, Array] = {
            "token_ids": ids,
            "response_mask": np.ones(len(ids), np.uint8),
            IMAGES: np.frombuffer(Images(files=FILES).SerializeToString(), np.uint8),
        }
        yield [(row, meta) for _ in refs]

    def put_by_calls(self, refs: Sequence[RowRef], columns: Sequence[Mapping[str, Array]]) -> Iterator[int]:
        yield from ()


class SlowImages:
    """A reader that takes a while for an image."""

    tokens = VisualTokens(SHOWS, patch_size=4, merge_size=1, min_pixels=16, max_pixels=16)

    def read(self, files: Sequence[bytes]) -> Iterator[Image]:
        for _ in files:
            time.sleep(0.05)
            yield Image(torch.zeros(1, 96), (1, 1, 1))


def compute_one_row_with_images(folder: Path, rank: int) -> None:
    command_group._PIECES_S = 0.1
    group, told, engine = meet(folder, rank), list[int](), IdleEngine()
    compute_of(context_of(group, engine, ShownRows(), told, images=SlowImages()), 2 * len(FILES))
    assert told.count(0) >= 5


def test_a_rank_without_images_is_seen_to_get_on_while_another_reads_its_own(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, compute_one_row_with_images, tmp_path)


def write_apart(folder: Path, rank: int) -> None:
    group = meet(folder, rank)
    command_group.COMMAND_TIMEOUT_S = APART_S
    writers = Writers(group)

    def write(theirs: CommandGroup, late_s: float) -> float:
        time.sleep(late_s if rank else 0.0)
        return float(theirs.sum(np.array([1.0]))[0])

    assert writers.begin(lambda theirs: write(theirs, 0.0)).result(60) == 2
    late = writers.begin(lambda theirs: write(theirs, 3 * APART_S))
    with pytest.raises(StorageUnavailableError, match=r"the ranks were more than 2 s apart in writing a checkpoint"):
        late.result(60)
    assert group.sum(np.array([1.0]))[0] == 2, "the steps go on"
    assert writers.begin(lambda theirs: write(theirs, 0.0)).result(60) == 2, "so do checkpoints"


class FullAtTheIndex(DiskStorage):
    """A disk that is full when rank 0 writes what it writes alone."""

    def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
        if name == "index.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(name, produce)


def write_where_it_is_full(folder: Path, rank: int) -> None:
    group = meet(folder, rank)
    state = State(dict, lambda _: None, {"num_updates": 0}, {}, "float32", folder)
    snapshot = Snapshot(state, torch.device("cpu"), rank, 2)
    with pytest.raises(DiskFullError):
        snapshot.write(FullAtTheIndex(folder / "checkpoint"), group, {})
    assert group.sum(np.array([1.0]))[0] == 2, "the ranks go on together"


def test_what_rank_0_cannot_write_alone_is_every_rank_s_failure(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, write_where_it_is_full, tmp_path)


def test_an_error_of_the_writing_itself_is_told_as_it_is() -> None:
    def write(_: CommandGroup) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match="can't start new thread"):
        Writers(CommandGroup(0, 1, None)).begin(write).result(60)


def test_ranks_whose_disks_were_too_far_apart_write_the_next_checkpoint(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, write_apart, tmp_path)
