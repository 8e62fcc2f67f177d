"""The files of images that prompts show: what a row of a dataset may say of them, their bytes, their pixels.

Whoever opens an image does so by `open_image`, so that controller, sampler and trainers see the same pixels. What
becomes of these is the image processor's of the model directory.
"""

import errno
import io
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rolecall.disk import PASSING
from rolecall.errors import ConfigError, InvalidInputError, StorageUnavailableError
from rolecall.rpc.options import MAX_MESSAGE_BYTES
from rolecall.settings.data import IMAGE_MARK

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of a prompt's images together: an evaluation sends them in one message, beside the text."""

MAX_PIXELS = 2**26
"""Most pixels of an image. One that is opened has 4 bytes for each, twice while it is turned or converted: 512 MiB. Of
some formats the decoder keeps more: 640 MiB for a progressive JPEG, 1 GiB for WebP, 1.2 GiB for JPEG 2000. Below it
Pillow warns of none.
"""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM")
"""Formats of the files, by Pillow's names; AVIF where Pillow has it, from release 11.3 on. No others: Pillow gives a
PostScript program to Ghostscript to run, and one may stand inside a file of IPTC. An MPO, as cameras write it, is a
JPEG.
"""
_SHOWN = 100
"""Most characters that a complaint shows of a path."""


def parts(content: str) -> str | list[dict[str, str]]:
    """A message's text in parts, one for each image that it shows; as it is where it shows none."""
    first, *others = content.split(IMAGE_MARK)
    if not others:
        return content
    found = [{"type": "text", "text": first}]
    for text in others:
        found += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in found if part.get("text") != ""]


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    """The text that `parts` was given."""
    return content if isinstance(content, str) else "".join(part.get("text", IMAGE_MARK) for part in content)


def spelled_in(content: str | Sequence[Mapping[str, str]]) -> list[int]:
    """The marks in the text of `content`, counted from 0, that stand for no image."""
    begins, at = set[int](), 0
    for part in () if isinstance(content, str) else content:
        if "text" not in part:
            begins.add(at)
        at += len(part.get("text", IMAGE_MARK))
    marks = re.finditer(IMAGE_MARK, text_of(content))
    return [place for place, mark in enumerate(marks) if mark.start() not in begins]


@dataclass(frozen=True)
class ImageFile:
    """One image of a row, as the row has it: in a file of its own, or inside the dataset's."""

    num_bytes: int
    path: Path | None = None
    data: bytes = b""
    """The bytes of an image without a path."""
    offset: int | None = None
    """Where in the file at `path` an image begins that shares it with others (spool.py)."""

    def read(self) -> bytes:
        """The bytes of the file. StorageUnavailableError where it cannot be read now, InvalidInputError where it is no
        longer what it was.
        """
        if self.path is None:
            return self.data
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset or 0)
                data = file.read() if self.offset is None else file.read(self.num_bytes)
        except OSError as error:
            raise _away(self.path, error) from error
        if len(data) != self.num_bytes:
            raise InvalidInputError(
                f"the image {self.path} has {len(data)} bytes and had {self.num_bytes} when the run began; leave the "
                "files of a run as they are"
            )
        return data

    def size(self) -> tuple[int, int]:
        """The sides of the image, as `image_size`, for which no more of its file is read than the head. Raises as that,
        and StorageUnavailableError where it cannot be read now.
        """
        try:
            with _in_words(), io.BytesIO(self.data) if self.path is None else self.path.open("rb") as file:
                return _by_head(file).size
        except OSError as error:
            raise _away(self.path, error) from error


def _away(path: Path | None, error: OSError) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"the image {path} cannot be read: {error.strerror or error}; bring its disk back, or the file"
    )


def read_images(value: object, folder: Path | None, where: str) -> tuple[ImageFile, ...]:
    """The images in a field of a row: a list, or one alone, of paths from `folder` and {bytes, path}. Without `folder`
    they are only counted, and empty. ConfigError says what is wrong at `where`; StorageUnavailableError: the disk
    of an image is away.
    """
    given = [] if value is None else value if isinstance(value, list) else [value]
    if folder is None:
        return (ImageFile(0),) * len(given)
    images = tuple(_image(each, folder, f"{where}, image {number}") for number, each in enumerate(given, 1))
    num_bytes = sum(image.num_bytes for image in images)
    if num_bytes > MAX_BYTES:
        raise ConfigError(
            f"{where}: the images have {num_bytes} bytes, more than {MAX_BYTES}, which a prompt's may have; make them "
            "smaller, or fewer"
        )
    return images


def _image(value: object, folder: Path, where: str) -> ImageFile:
    if isinstance(value, dict):
        inside = value.get("bytes")
        value = value.get("path") if inside is None else inside
    if isinstance(value, bytes) and value:
        return ImageFile(len(value), data=value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: neither a path nor {{bytes, path}} with one of them; write the path of a file")
    path = folder / value
    try:
        found = path.stat()
        wrong = "" if stat.S_ISREG(found.st_mode) else "it is no file"
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        if isinstance(error, OSError) and error.errno in PASSING:
            raise _away(path, error) from error
        wrong = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if wrong:
        raise ConfigError(
            f"{where}: there is no file {value[:_SHOWN]!r} in {folder} ({wrong}); give the path of a file from the "
            "dataset's folder on, or the file itself as {bytes, path} in parquet"
        )
    return ImageFile(found.st_size, path)


def media_type(data: bytes) -> str:
    """The type of a file that `open_image` reads, as "image/jpeg". InvalidInputError where it holds no image."""
    from PIL import Image

    with _in_words():
        kind = _by_head(io.BytesIO(data)).format
        assert kind is not None
        return Image.MIME["JPEG" if kind == "MPO" else kind]


def open_image(data: bytes) -> "Image":
    """The pixels of a file, RGB, upright, on white where it is transparent, of its first frame. InvalidInputError where
    it holds none, more than MAX_PIXELS, or numbers that are no colours of 8 bits.
    """
    from PIL import Image  # for those alone who open one

    with _in_words():
        image = _by_head(io.BytesIO(data))
        image.load()
        image = _upright(image)
        if image.has_transparency_data:
            if image.mode != "RGBA":
                image = image.convert("RGBA")
            shown = Image.new("RGB", image.size, "white")
            shown.paste(image, mask=image)
        else:
            shown = image.convert("RGB")
    shown.info.clear()  # its orientation, for one, which it no longer has
    return shown


def image_size(data: bytes) -> tuple[int, int]:
    """The sides of the image in a file, which `open_image` may turn, by the file's head alone. No pixel is computed,
    and what is broken behind the head is not found. InvalidInputError as `open_image`.
    """
    with _in_words():
        return _by_head(io.BytesIO(data)).size


def _by_head(file: BinaryIO) -> "Image":
    """An image of which Pillow has read the head alone. No context manager: that would keep what is replaced later."""
    from PIL import Image  # for those alone who open one

    Image.init()  # Pillow knows no name of a format whose module it has not loaded
    image: Image.Image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InvalidInputError(f"an image of {width} x {height} pixels has more than {MAX_PIXELS}; make it smaller")
    if image.mode.startswith(("I", "F")):  # what is above 255 would become white, or floats up to 1 black
        raise InvalidInputError(
            f"an image has pixels of mode {image.mode}, of 16 or 32 bits in one channel; convert it to 8 bits"
        )
    return image


@contextmanager
def _in_words() -> Iterator[None]:
    """InvalidInputError for whatever Pillow raises within. OSError for what a disk answers, whose errors have numbers:
    all but EINVAL, which is a place that cannot be in a file. MemoryError: it says nothing of the file.
    """
    try:
        yield
    except (InvalidInputError, MemoryError):
        raise
    except Exception as error:  # the entry point of a reader that answers odd files with errors of every kind
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise InvalidInputError(
            f"an image cannot be read ({type(error).__name__}: {error}); give a whole file of one of the formats "
            f"{', '.join(FORMATS)}"
        ) from error


def _upright(image: "Image") -> "Image":
    """`image` turned as its file says; as it is where nothing readable says so."""
    from PIL.ExifTags import Base
    from PIL.Image import Transpose

    turns: dict[object, Transpose] = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(Base.Orientation))
    except Exception:  # the entry point of a reader, as above: pixels that are whole are shown, whatever stands beside
        return image
    return image if turn is None else image.transpose(turn)
