"""Scoring of a held-out set's responses by the run's own scorer, which may be away for a while.

Owns: which responses go in one call, how many calls are under way, and when responses without a score are given up.
What a call does is rolecall/scoring/client.py's.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rolecall.data.images.files import ImageFile
from rolecall.errors import RoleCallError, ScorerError
from rolecall.scoring.client import RewardClient
from rolecall.scoring.items import CHUNK_IMAGE_BYTES, chunked, groups_of, num_shown_in, score_item
from rolecall.scoring.scores import Failure, Score
from rolecall.settings import RunSettings
from rolecall.v1 import reward_pb2, rollout_pb2, trajectory_pb2
from rolecall.wire import Array
from services.controller.groups.image_room import ImageRoom
from services.controller.held_out.patience import PAUSE_S, Patience
from services.controller.tasks import at_once

logger = logging.getLogger(__name__)

SCORE_CHUNK = 256
"""Most items in a Score call, or a prompt's responses where they are more."""
TRIES = 3
"""Most times that a prompt's responses are asked for in vain while others are scored."""


@dataclass(frozen=True)
class HeldOutResponse:
    """A response to a held-out prompt, not scored yet."""

    prompt: trajectory_pb2.Prompt
    answer: rollout_pb2.GenerateResponse
    images: Sequence[ImageFile]

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(span.end - span.start for span in self.answer.meta.spans)


class HeldOutScorer:
    """The scoring of the responses to one held-out set, once."""

    def __init__(
        self, settings: RunSettings, reward: RewardClient, responses: Sequence[HeldOutResponse], patience: Patience
    ) -> None:
        self._reward = reward
        self._responses = responses
        self._patience = patience
        num_calls = settings.controller.max_score_calls
        self._room = asyncio.Semaphore(num_calls)
        self._least = settings.responses_per_group
        self._most = max(self._least, min(SCORE_CHUNK, math.ceil(len(responses) / num_calls)))
        """Items in a call. The set is spread over all calls at a time; from the first call that fails on, none has more
        than one for a group that is trained on.
        """
        self._shown = {each.answer.meta.id: each for each in responses} if settings.shows_images else {}
        """Responses by item, in a run that shows images."""
        self._image_room = ImageRoom(CHUNK_IMAGE_BYTES)
        self._answered: Sequence[reward_pb2.ScoreItem] = ()
        """The items of the newest call that was answered."""
        self._scored: dict[str, Score] = {}

    async def scores(self) -> dict[str, Score]:
        """The scores by item, by as many calls at a time as there are for groups that are trained on. A scorer that is
        away is asked again, with all of a prompt's responses; in halves, so that those of one prompt that are never
        scored stand alone at last. They are given up when they failed TRIES times, while others were scored that were
        asked for once more.
        """
        chunks = await asyncio.to_thread(_chunks, self._responses, self._most)  # of a large set half a minute
        await at_once([self._score(chunk) for chunk in chunks])
        return self._scored

    async def _score(self, items: Sequence[reward_pb2.ScoreItem]) -> None:
        num_failed = 0
        while num_failed < TRIES:
            left, others_are_scored = await self._attempt(items)
            if len(left) != 1:
                await at_once([self._score(part) for part in left])
                return
            (items,) = left
            num_failed += others_are_scored
        logger.warning("%d held-out responses are not scored, though others are", len(items))

    async def _attempt(
        self, items: Sequence[reward_pb2.ScoreItem]
    ) -> tuple[Sequence[Sequence[reward_pb2.ScoreItem]], bool]:
        """Scores `items` in a call; what is left of them, in the parts that are to be scored next, and whether it is
        they that failed, for others are scored.
        """
        async with self._room:  # bounded: every call inside has a deadline
            if len(parts := chunked(items, self._most)) > 1:
                return parts, False
            away = await self._called(items, self._scored)
            if not away:
                self._answered = items
                return [], False
            self._most = self._least
            others_are_scored = bool(self._answered) and not await self._called(self._answered, {})
        logger.debug("%d held-out responses cannot be scored at present, trying again", len(away))
        await self._patience.wait(PAUSE_S)
        groups = groups_of(away)
        half = (len(groups) + 1) // 2
        halves = filter(None, (groups[:half], groups[half:]))
        return [[away[place] for group in part for place in group] for part in halves], others_are_scored

    async def _called(
        self, items: Sequence[reward_pb2.ScoreItem], scored: dict[str, Score]
    ) -> list[reward_pb2.ScoreItem]:
        """Adds scores to `scored`; returns what is to be scored again."""
        try:
            reads_images = bool(self._shown) and reward_pb2.SCORE_FIELD_IMAGES in (await self._reward.describe()).reads
        except ScorerError as error:
            logger.warning("%d held-out responses are not scored: %s", len(items), error)
            return []
        except RoleCallError as error:
            logger.debug("the scorer does not describe itself at present: %s", error)
            return list(items)
        if not reads_images:
            return await self._sent(items, scored)
        away = set[str]()
        for part in chunked(items, CHUNK_IMAGE_BYTES, lambda item: _image_bytes(self._shown[item.id])):
            async with self._image_room.holding(partial(asyncio.to_thread, _with_images, part, self._shown)) as whole:
                away |= {item.id for item in await self._sent(whole, scored)} if whole else set()
        return [item for item in items if item.id in away]

    async def _sent(
        self, items: Sequence[reward_pb2.ScoreItem], scored: dict[str, Score]
    ) -> list[reward_pb2.ScoreItem]:
        outcomes = await self._reward.score(items)
        scored |= {item.id: each for item, each in zip(items, outcomes, strict=True) if isinstance(each, Score)}
        away = {place for place, each in enumerate(outcomes) if isinstance(each, Failure) and each.retryable}
        return [items[place] for group in groups_of(items) if not away.isdisjoint(group) for place in group]


def _chunks(responses: Sequence[HeldOutResponse], most: int) -> list[list[reward_pb2.ScoreItem]]:
    """The items for the calls, at most so many in each, or those of one prompt where they are more."""
    return chunked([score_item(response.answer.meta, _token_ids(response)) for response in responses], most)


def _with_images(
    items: Sequence[reward_pb2.ScoreItem], shown: Mapping[str, HeldOutResponse]
) -> tuple[list[reward_pb2.ScoreItem], int]:
    """Copies of `items` with the files that their messages show, and the bytes of these. Those whose images are not
    here, or no more, are left out with a warning; an episode's messages are known to show a prompt's where it has one.
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
            copy.images[:] = read_images(response.images) * (1 + again)
        except RoleCallError as error:
            logger.warning("held-out response %s is not scored: %s", item.id, error)
            continue
        whole.append(copy)
    return whole, sum(len(image) for copy in whole for image in copy.images)


def _image_bytes(response: HeldOutResponse) -> int:
    """Bytes of the images in its item, for which none is read."""
    num_times = 1 + num_shown_in(response.answer.meta.episode.messages)
    return num_times * sum(image.num_bytes for image in response.images)


def read_images(images: Sequence[ImageFile]) -> list[bytes]:
    """Returns the files."""
    return [image.read() for image in images]


def _token_ids(response: HeldOutResponse) -> Array:
    prompt = response.answer.prompt_token_ids or response.prompt.token_ids
    return np.frombuffer(prompt + response.answer.response_token_ids, "<i4")
