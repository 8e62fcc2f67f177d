"""A prompt of a dataset as token ids, with the files of the images that it shows.

The controller, `rolecall check` and whoever scores responses from a file make tokens here and nowhere else.
"""

from dataclasses import dataclass

from rolecall.data.dataset import RawPrompt
from rolecall.data.images.files import image_size, open_image
from rolecall.data.images.tokens import VisualTokens, require_visual_tokens
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings


@dataclass(frozen=True)
class PromptEncoder:
    """Makes token ids of prompts. One thread at a time."""

    tokenizer: ChatTokenizer
    visual_tokens: VisualTokens | None = None
    """None: the run shows no images."""

    @classmethod
    def of(cls, settings: RunSettings, tokenizer: ChatTokenizer) -> "PromptEncoder":
        """The encoder of a run's prompts. ConfigError where the run may show images and the model sees none."""
        asked_by = "environments.*.max_image_bytes" if settings.data.images_field is None else "data.images_field"
        path = settings.model.path
        return cls(tokenizer, require_visual_tokens(path, asked_by) if settings.shows_images else None)

    def encode(self, raw: RawPrompt, *, by_heads: bool = False) -> tuple[list[int], list[bytes]]:
        """The ids of the rendered prompt, each image's as often as it has tokens, and the images' files. ConfigError
        names the line that cannot be rendered, InvalidInputError the one whose images cannot be shown, and
        StorageUnavailableError the file that cannot be read now.

        `by_heads`: images are not opened, which takes most of the time; one whose file is broken behind its head then
        passes.
        """
        try:
            ids = self.tokenizer.encode(self.tokenizer.render(raw.chat))
        except InvalidInputError as error:
            raise ConfigError(f"{raw.where}: {error.message}") from error
        if self.visual_tokens is None:
            return ids, []
        try:
            files = [image.read() for image in raw.images]
            sizes = [image_size(file) if by_heads else open_image(file).size for file in files]
            numbers = [self.visual_tokens.number(*size) for size in sizes]  # the same however an image is turned
            return self.visual_tokens.expanded(ids, numbers), files
        except InvalidInputError as error:
            raise InvalidInputError(f"{raw.where}: {error.message}") from error
