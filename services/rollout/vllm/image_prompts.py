"""Prompts that show images, as vLLM's engine takes them.

Owns what vLLM is given of an image: pixels, and a name under which it may keep what the vision tower makes of them. The
name has the number of loads in it, so that nothing that older weights made of an image is given to a request that
begins under newer ones, whatever a pause leaves in the engine. It is put on last: a load may begin while images are
processed.

Bounds: images are opened in a thread and processed in the renderer's own, one prompt at a time, while those of
NUM_OPENED prompts are open; requests for one prompt that come together, as a group's do, share what is made for the
first. It is kept by the requests alone.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from vllm.inputs import TokensPrompt
from vllm.renderers import BaseRenderer

from rolecall.data.images.files import open_image
from rolecall.data.images.tokens import collapsed
from rolecall.errors import GenerationError
from services.rollout.sampling import SampleRequest

NUM_OPENED = 2
"""Prompts whose images are open at a time: one is processed, and the next opened meanwhile."""
_Key: TypeAlias = tuple[tuple[bytes, ...], tuple[int, ...]]


class ImagePrompts:
    """The prompts with images of one engine. Used from one event loop."""

    def __init__(self, renderer: BaseRenderer[Any], token_id: int) -> None:
        """`token_id`: the model's placeholder of an image."""
        self._renderer = renderer
        self._token_id = token_id
        self._under_way: dict[_Key, asyncio.Task[Any]] = {}
        self._room = asyncio.Semaphore(NUM_OPENED)

    async def of(self, request: SampleRequest) -> Any:
        """The prompt of `request`, for `under_load`. InvalidInputError for a file that is no image; GenerationError
        when vLLM makes other tokens of it than the prompt has.
        """
        key = (tuple(request.images), tuple(request.prompt_token_ids))
        making = self._under_way.get(key)
        if making is None:
            making = self._under_way[key] = asyncio.create_task(self._made(*key))
            making.add_done_callback(partial(self._ended, key))
        return await asyncio.shield(making)  # bounded: by generation_timeout_s of whoever asks

    def _ended(self, key: _Key, making: "asyncio.Task[Any]") -> None:
        del self._under_way[key]
        if not making.cancelled():
            making.exception()  # whoever waits gets it, and perhaps nobody does any more

    async def _made(self, files: Sequence[bytes], ids: Sequence[int]) -> Any:
        async with self._room:  # bounded: by generation_timeout_s of whoever asks, as what is inside
            images, names = await asyncio.to_thread(_opened, files)
            prompt = TokensPrompt(
                prompt_token_ids=collapsed(ids, self._token_id, len(files)),
                multi_modal_data={"image": images},
                multi_modal_uuids={"image": names},
            )
            try:
                # bounded: by generation_timeout_s of whoever asks
                made = await self._renderer.process_for_engine_async(prompt, arrival_time=0.0)
            except ValueError as error:
                raise GenerationError(f"vLLM cannot take a prompt with {len(files)} images: {error}") from error
        del made["arrival_time"]  # each request has its own, by which vLLM's queue has an order
        given = made["prompt_token_ids"]
        if given != list(ids):
            raise GenerationError(
                f"vLLM makes {len(given)} tokens of a prompt with {len(files)} images that has {len(ids)}; the files "
                "of the model directory's image processor must be the same for all roles"
            )
        return made


def under_load(prompt: Any, num_loads: int) -> Any:
    """A prompt that `ImagePrompts` made, for an engine that began so many loads of weights: submit it before another
    begins.
    """
    names = [f"{name}/{num_loads}" for name in prompt["mm_hashes"]["image"]]
    return {**prompt, "mm_hashes": {"image": names}, "cache_salt": str(num_loads)}


def _opened(files: Sequence[bytes]) -> tuple[list[Any], list[str]]:
    """The images in `files`, and a name of each by its content."""
    return [open_image(file) for file in files], [hashlib.blake2b(file, digest_size=16).hexdigest() for file in files]
