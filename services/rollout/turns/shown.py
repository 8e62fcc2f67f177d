"""The words and images of an environment, as a chat template takes them, and the images beside them.

Owns the reading of somebody else's images: one that cannot be shown loses its episode. Knows no budget.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rolecall.data.continuation import ChatMessage
from rolecall.data.images.files import open_image
from rolecall.data.images.tokens import VisualTokens
from rolecall.errors import EpisodeLostError, InvalidInputError
from rolecall.v1 import environment_pb2


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


def images_of(messages: Iterable[environment_pb2.Observation], tokens: VisualTokens | None) -> tuple[ShownImage, ...]:
    """The images that the messages show, in order. `tokens`: None where the run lets no environment show any.
    EpisodeLostError when one cannot be shown. Opens files: for a thread.
    """
    files = [part.image.data for message in messages for part in message.parts if part.HasField("image")]
    if files and tokens is None:
        raise EpisodeLostError(
            "the environment answered an image, and this run shows none of it: set environment.max_image_bytes, for a "
            "model that sees images, or have it answer text"
        )
    return tuple(_shown(file, tokens) for file in files if tokens is not None)


def _shown(file: bytes, tokens: VisualTokens) -> ShownImage:
    try:
        return ShownImage(file, tokens.number(*open_image(file).size))
    except InvalidInputError as error:
        raise EpisodeLostError(f"the environment answered an image that cannot be shown: {error.message}") from error


def _words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
