"""A rank's minibatches of examples: from their numbers in the file to packed tensors, images included.

Images are read when they are trained on, and those of the next minibatch while one is computed: what waits on the host
are the pixels of two of a rank's shares, and in an evaluation those of the next step's share beside its own two. An
example with an image that turns out to be broken is left out of its minibatch by all ranks; an image that is another
than at the start ends the run.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from rolecall.columns import IMAGES
from rolecall.data.images.files import ImageFile
from rolecall.data.images.tokens import run_lengths
from rolecall.data.sft_examples import AWAY_S, TokenizedExamples, patiently
from rolecall.errors import ConfigError, InvalidInputError, StorageUnavailableError
from rolecall.training.packing.images import ImageReader, ReadImages
from rolecall.training.packing.pack import local_counts, pack
from rolecall.training.packing.pieces import Piece, cut, join
from rolecall.training.step.rank_context import RankContext
from rolecall.training.step.share import Minibatch
from rolecall.v1.trajectory_pb2 import Images
from rolecall.wire import Array

logger = logging.getLogger(__name__)

TOLD_S = 30
"""Seconds between two lines that say that a read of an image does not return."""


@dataclass(frozen=True)
class ExampleMinibatch:
    """A minibatch, and what of all ranks it is."""

    minibatch: Minibatch
    num_tokens: int
    num_unshown: int
    """Examples that are left out of it, as an image of theirs cannot be shown."""


@dataclass(frozen=True)
class _ReadShare:
    """The images of a rank's share of a minibatch."""

    images: ReadImages
    columns: dict[int, Array]
    """IMAGES of each row, by its place in the minibatch."""
    refused: dict[int, str]
    """Why rows cannot be shown."""


@dataclass(frozen=True)
class _Planned:
    """A minibatch whose images are being read."""

    numbers: Sequence[int]
    """The examples in it."""
    pieces: Sequence[Piece]
    microbatches: Sequence[Sequence[int]]
    """This rank's, each of the indices of its pieces."""
    reading: Future[_ReadShare] | None


class Minibatches:
    """The minibatches of a set of examples, on this rank; every rank makes the same calls."""

    def __init__(
        self,
        context: RankContext,
        examples: TokenizedExamples,
        reader: ImageReader | None,
        *,
        between_segments: bool,
    ) -> None:
        """`reader` reads the images that examples show; None: they are text. `between_segments`: whether an example
        above the token budget may be cut there.
        """
        self._context = context
        self.examples = examples
        """The set, with those that were left out of it at the start."""
        self._reader = reader
        self._between_segments = between_segments
        self._num_done = 0
        self._at: Path | None = None
        """How often the thread that reads has got on, and the image that it reads."""
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="examples")

    def of(self, batches: Iterable[Sequence[int]]) -> Iterator[ExampleMinibatch]:
        """The minibatch of each of `batches`, which are numbers of examples. ConfigError names an image that is no
        longer what it was, StorageUnavailableError one that cannot be read.
        """
        planned = map(self._plan, batches)
        ahead = next(planned, None)
        while ahead is not None:
            made = [self._packed(ahead)]
            ahead = next(planned, None)  # its images are read from here on
            yield made.pop()  # kept no longer than by who takes it

    def in_order(self, size: int) -> Iterator[ExampleMinibatch]:
        """All examples in their order, `size` in a minibatch; raises as `of`."""
        num_examples = len(self.examples.rows)
        return self.of(range(start, min(start + size, num_examples)) for start in range(0, num_examples, size))

    def _plan(self, numbers: Sequence[int]) -> _Planned:
        lengths = [[len(segment["token_ids"]) for segment in self.examples.rows[number]] for number in numbers]
        pieces = cut(lengths, self._context.token_budget, between_segments=self._between_segments)
        microbatches = self._context.plan(pieces, 1, 0).microbatches
        reading = None
        if self._reader is not None:
            mine = list(dict.fromkeys(pieces[index].row for indices in microbatches for index in indices))
            # one at a time: it is taken before the next is begun
            reading = self._ahead.submit(self._read, self._reader, {place: numbers[place] for place in mine})
        return _Planned(numbers, pieces, microbatches, reading)

    def _packed(self, planned: _Planned) -> ExampleMinibatch:
        read = None if planned.reading is None else self._waited_for(planned.reading)
        refused = np.zeros(len(planned.numbers))
        if read is not None:
            for place, why in read.refused.items():
                logger.warning("%s; it is left out", why)
                refused[place] = 1
            refused = self._context.group.sum(refused)
        rows = [self.examples.rows[number] for number in planned.numbers]
        packed = []
        for indices in planned.microbatches:
            mine = [piece for piece in map(planned.pieces.__getitem__, indices) if not refused[piece.row]]
            more = [{} if read is None else {IMAGES: read.columns[piece.row]} for piece in mine]
            packed.append(
                pack(
                    [
                        segment
                        for piece, images in zip(mine, more, strict=True)
                        for segment in piece.segments(join(rows[piece.row]) | images)
                    ],
                    ["loss_mask"],
                    temperature=1.0,
                    device=self._context.device,
                    trajectories=[piece.row for piece in mine for _ in piece.lengths],
                    images=None if read is None else read.images,
                )
            )
        shown = [row for row, is_refused in zip(rows, refused, strict=True) if not is_refused]
        every, places = [each for row in shown for each in row], [index for index, row in enumerate(shown) for _ in row]
        return ExampleMinibatch(
            Minibatch(packed, local_counts(every, trajectories=places)),
            num_tokens=sum(len(segment["token_ids"]) for segment in every),
            num_unshown=len(rows) - len(shown),
        )

    def _waited_for(self, reading: Future[_ReadShare]) -> _ReadShare:
        """A collective: an image may be unreadable on one rank. StorageUnavailableError names one whose read does not
        return.
        """

        def seconds() -> Iterator[None]:
            num_done, waited_s = self._num_done, 0  # counted: a process that is stopped and goes on has not waited
            while not reading.done():
                if num_done != self._num_done:
                    num_done, waited_s = self._num_done, 0
                elif waited_s > AWAY_S + TOLD_S:  # later than `patiently`, which knows why
                    raise StorageUnavailableError(
                        f"the image {self._at} cannot be read: no answer for {waited_s} s; bring its disk back"
                    )
                elif waited_s and waited_s % TOLD_S == 0:
                    logger.warning("waiting: the image %s is being read for %d s", self._at, waited_s)
                wait([reading], 1.0)
                waited_s += 1
                yield
            reading.result()  # bounded: it is done

        self._context.group.agree_on_pieces(seconds(), self._context.progressed)
        return reading.result()  # bounded: it is done

    def _read(self, reader: ImageReader, numbers: dict[int, int]) -> _ReadShare:
        """Reads the images of examples, whose `numbers` are by their places."""
        files = {place: self._files(number) for place, number in numbers.items()}
        columns = {
            place: np.frombuffer(Images(files=each).SerializeToString(), np.uint8) for place, each in files.items()
        }
        images, unread = ReadImages(reader), dict[bytes, InvalidInputError]()
        rows = [
            {**segment, IMAGES: columns[place]}
            for place, number in numbers.items()
            for segment in self.examples.rows[number]
        ]
        for _ in images.read(rows, unread):
            self._num_done += 1
        refused = {}
        for place, number in numbers.items():
            where = self.examples.images[number].where
            why = next((unread[file].message for file in files[place] if file in unread), None)
            if why is not None:
                refused[place] = f"{where}: {why}"
                continue
            for segment in self.examples.rows[number]:
                shown = images.shown_by(segment["token_ids"], columns[place])
                made = [prod(images.size(images[file])) for file in shown]
                if made != run_lengths(segment["token_ids"].tolist(), images.token_id):
                    names = ", ".join(str(image.path) for image in self.examples.images[number].files)
                    raise ConfigError(
                        f"{where}: its images ({names}) are not those that it began with: they take other tokens; put "
                        "back the files, and go on with --resume"
                    )
        return _ReadShare(images, columns, refused)

    def _files(self, number: int) -> list[bytes]:
        images = self.examples.images[number]
        try:
            return [self._file(image) for image in images.files]
        except InvalidInputError as error:
            raise ConfigError(f"{images.where}: {error.message}") from error

    def _file(self, image: ImageFile) -> bytes:
        self._at = image.path
        file = patiently(image.read)
        self._num_done += 1
        return file
