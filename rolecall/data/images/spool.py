"""The images that a file of examples holds as bytes, put away in a file of their own: they are read one by one, in any
order, which a parquet file cannot, and all of them may be more than the host's memory.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from rolecall.data.images.files import ImageFile
from rolecall.disk import writing


def spool_of(folder: Path, setting: str) -> Path:
    """The file in `folder`, a run's, of the images that the files of `setting` hold as bytes."""
    return folder / f"{setting}.images"


@contextmanager
def without_spools(folder: Path) -> Iterator[None]:
    """No spool of `rolecall sft` is in `folder` when it begins, or behind it, however that ends."""
    try:
        _remove(folder)
        yield
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for setting in ("data.train", "evaluation.path"):
        spool_of(folder, setting).unlink(missing_ok=True)


class Spool:
    """A file of images, one after another. Whoever puts away the same finds them in the same places."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        """`writes`: whether the file is made here, anew; else somebody else does who puts away the same."""
        self._path = path
        self._writes = writes
        self._file: BinaryIO | None = None
        self._num_bytes = 0

    def put(self, image: ImageFile) -> ImageFile:
        """The image, which is read from the spool from when that is closed; as it is where it has a path. Raises as
        `writing`, and so does the end.
        """
        if image.path is not None:
            return image
        if self._writes:
            with self._writing():
                if self._file is None:
                    self._file = self._path.open("wb")
                self._file.write(image.data)
        kept = replace(image, path=self._path, data=b"", offset=self._num_bytes)
        self._num_bytes += image.num_bytes
        return kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            with self._writing():
                self._file.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing("put images away in", self._path)
