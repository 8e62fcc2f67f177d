"""The responses to a held-out set, and what a scorer is given of them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolecall.data.images.files import ImageFile
from rolecall.errors import RoleCallError
from rolecall.scoring.items import num_shown_in, score_item
from rolecall.v1 import reward_pb2, rollout_pb2, trajectory_pb2
from rolecall.wire import Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """A response to a held-out prompt."""

    prompt: trajectory_pb2.Prompt
    answer: rollout_pb2.GenerateResponse
    images: Sequence[ImageFile]

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(span.end - span.start for span in self.answer.meta.spans)


def items_of(responses: Sequence[Response]) -> list[reward_pb2.ScoreItem]:
    """Makes the items to score, without images."""
    return [score_item(response.answer.meta, _token_ids(response)) for response in responses]


def with_images(items: Sequence[reward_pb2.ScoreItem], shown: Mapping[str, Response]) -> list[reward_pb2.ScoreItem]:
    """Copies of `items` with the files that their messages show. Those whose images are not here, or no more, are left
    out with a warning; an episode's messages are known to show a prompt's where it has one.
    """
    whole = []
    for item in items:
        response, copy = shown[item.id], reward_pb2.ScoreItem()
        episode = response.answer.meta.episode
        again = num_shown_in(episode.messages)
        if episode.num_images or (again and len(response.images) != 1):
            logger.warning("held-out response %s is not scored: its environment's images are not kept", item.id)
            continue
        copy.CopyFrom(item)
        try:
            copy.images[:] = bytes_of(response.images) * (1 + again)
        except RoleCallError as error:
            logger.warning("held-out response %s is not scored: %s", item.id, error)
            continue
        whole.append(copy)
    return whole


def image_bytes(response: Response) -> int:
    """Bytes of the images in its item, for which none is read."""
    num_times = 1 + num_shown_in(response.answer.meta.episode.messages)
    return num_times * sum(image.num_bytes for image in response.images)


def bytes_of(images: Sequence[ImageFile]) -> list[bytes]:
    """The files of `images`, read now. StorageUnavailableError, InvalidInputError."""
    return [image.read() for image in images]


def _token_ids(response: Response) -> Array:
    prompt = response.answer.prompt_token_ids or response.prompt.token_ids
    return np.frombuffer(prompt + response.answer.response_token_ids, "<i4")
