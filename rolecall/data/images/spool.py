"""The images that a file of examples holds as bytes, put away in a file of their own: they are read one by one, in any
order, which a parquet file cannot, and all of them may be more than the host's memory.
"""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from rolecall.data.images.files import ImageFile


class Spool:
    """A file of images, one after another. Whoever puts away the same finds them in the same places."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        """`writes`: whether the file is made here, anew; else somebody else does who puts away the same."""
        self._path = path
        self._writes = writes
        self._file: BinaryIO | None = None
        self._num_bytes = 0

    def put(self, image: ImageFile) -> ImageFile:
        """The image, which is read from the spool from when that is closed; as it is where it has a path."""
        if image.path is not None:
            return image
        if self._writes:
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
            self._file.close()
