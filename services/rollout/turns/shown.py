"""The words and images of an environment, as a chat template takes them, and the images beside them.

Owns the reading of somebody else's images: an environment's that cannot be shown loses its episode. Knows no budget.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rolecall.data.continuation import ChatMessage
from rolecall.data.images.files import image_size, open_image
from rolecall.data.images.tokens import VisualTokens
from rolecall.errors import EpisodeLostError, InvalidInputError, PromptTooLongError
from rolecall.v1 import environment_pb2

NUM_OPENED = 2
"""Answers of environments, and calls of agents, of which an image is open at a time."""


@dataclass(frozen=True)
class ShownImage:
    """An image that a conversation shows."""

    file: bytes
    num_tokens: int


def chat_message(message: environment_pb2.Observation) -> ChatMessage:
    """A message as chat templates are given it: text, or a list of parts where it shows an image."""
    if not any(part.HasField("image") for part in message.parts):
        return {"role": message.role, "content": "".join(part.text for part in message.parts)}
    content = [{"type": "image"} if part.HasField("image") else _words(part.text) for part in message.parts]
    return {"role": message.role, "content": [part for part in content if part.get("text") != ""]}


def files_of(messages: Iterable[environment_pb2.Observation], tokens: VisualTokens | None) -> list[bytes]:
    """The files of the images that an environment's messages show, in order. EpisodeLostError where there are some and
    `tokens`, those of images that it may show, is None.
    """
    files = [part.image.data for message in messages for part in message.parts if part.HasField("image")]
    if files and tokens is None:
        raise EpisodeLostError(
            "the environment answered an image, and this run shows none of it: set environments.*.max_image_bytes, "
            "for a model that sees images, or have it answer text"
        )
    return files


def measured(files: Iterable[bytes], tokens: VisualTokens) -> tuple[ShownImage, ...]:
    """The images in `files` by their heads: one that is turned when it is opened has as many tokens. InvalidInputError
    when one cannot be shown. For a thread.
    """
    return tuple(ShownImage(file, tokens.number(*image_size(file))) for file in files)


def look_at(files: Iterable[bytes]) -> None:
    """Opens the images in `files`, one after another. InvalidInputError when one is broken. For a thread."""
    for file in files:
        open_image(file)


def opened(files: Sequence[bytes], tokens: VisualTokens) -> tuple[ShownImage, ...]:
    """The images in files of an environment. EpisodeLostError when one cannot be shown. For a thread."""
    try:
        images = measured(files, tokens)
        look_at(files)
    except InvalidInputError as error:
        raise EpisodeLostError(f"the environment answered an image that cannot be shown: {error.message}") from error
    return images


@contextmanager
def showing(messages: Iterable[ChatMessage]) -> Iterator[None]:
    """EpisodeLostError where a conversation that is rendered within does not show the images of `messages`, those of an
    environment.
    """
    try:
        yield
    except PromptTooLongError:
        raise
    except InvalidInputError as error:
        roles = sorted({message["role"] for message in messages if isinstance(message["content"], list)})
        if not roles:
            raise
        raise EpisodeLostError(
            f"the chat template does not show the images of the environment's messages of the role "
            f"{' or '.join(roles)}: {error.message}; have it show them in another (rolecall check says which), or "
            "leave out environments.*.max_image_bytes"
        ) from error


def _words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
