"""The scoring of the responses to a held-out set by the run's own scorer, several calls at a time.

Owns how large these calls are, what is asked again and what is given up. How many calls are under way in all, those of
groups that are trained on among them, is the client's (rolecall/scoring/joint.py): all wait in one queue, in which
these are FEW_CALLS and those controller.max_score_calls, so that neither keeps the other from the scorer.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rolecall.errors import RoleCallError, ScorerError
from rolecall.scoring.client import RewardClient
from rolecall.scoring.items import CHUNK_IMAGE_BYTES, chunked, groups_of
from rolecall.scoring.scores import Failure, Score
from rolecall.settings import FEW_CALLS, RunSettings
from rolecall.v1 import reward_pb2
from services.controller.evaluation.responses import Response, image_bytes, items_of, with_images
from services.controller.groups.image_room import ImageRoom
from services.controller.tasks import FirstErrorGroup

logger = logging.getLogger(__name__)

SCORE_CHUNK = 256
"""Most items of a call, or a prompt's responses where they are more; at first, of all calls together."""
CALL_BYTES = CHUNK_IMAGE_BYTES // FEW_CALLS
"""Bytes of a call's items, and of the images that are read for it at a time, or a prompt's where they are more."""
SURE = 0.25
"""Share of a call's deadline in which it is answered where twice as many items would be in time, too."""
TRIES = 3
"""Most times that it counts against a prompt's responses that they are not scored while others are."""
APART_S = 20.0
"""Least time between two of these: a scorer that starts again fails several times, which is no fault of theirs."""
PAUSE_S = 2.0
"""Pause before items are scored again whose scorer was away."""


@dataclass
class _Unscored:
    """A prompt's responses that have no score yet."""

    items: Sequence[reward_pb2.ScoreItem]
    num_bytes: int
    num_failed: int = 0
    """Times that it counted against them that they were not scored."""
    failed_at: float = math.inf
    """When it counted last, or they failed first (monotonic)."""

    @property
    def is_last_try(self) -> bool:
        """Whether they are given up when it counts once more."""
        return self.num_failed == TRIES - 1


class CallSize:
    """The most items of a call: half as many after one that gave no scores, twice as many once FEW_CALLS in a row were
    answered long before their deadline.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is the deadline of a call."""
        self.most = SCORE_CHUNK // FEW_CALLS
        self._timeout_s = timeout_s
        self._num_sure = 0

    def was_silent(self, most: int) -> None:
        """Notes that a call of at most `most` items gave no scores. Those that fail together tell one thing."""
        self.most = max(1, min(self.most, most // 2))
        self._num_sure = 0

    def was_answered(self, num_items: int, seconds: float) -> None:
        """Notes that each of a call's `num_items` was given what is to stand, after `seconds`."""
        if seconds > SURE * self._timeout_s:
            self._num_sure = 0
        elif 2 * num_items > self.most:  # fewer say nothing of more
            self._num_sure += 1
        if self._num_sure == FEW_CALLS:
            self.most = min(2 * self.most, SCORE_CHUNK)
            self._num_sure = 0


class _Waiting:
    """The responses to a set that wait to be scored, and the scores of the others."""

    def __init__(self, left: Sequence[_Unscored]) -> None:
        self.scored: dict[str, Score] = {}
        self.left = deque(left)
        self.share = math.ceil(sum(len(each.items) for each in left) / FEW_CALLS)
        """Items of a call where the set is small."""
        self.is_silent = False
        """Whether the call that ended last gave no scores."""
        self.witness: _Unscored | None = None
        """A prompt that is done. It is asked again where only prompts are left that failed."""
        self._is_last_try = False
        """Whether the newest call is a prompt's last."""

    @property
    def most_calls(self) -> int:
        """The most calls under way, once another is begun."""
        return 1 if self.is_silent or self._is_last_try or self.left[0].is_last_try else FEW_CALLS

    def take(self, most: int) -> list[_Unscored]:
        """Takes prompts with at most `most` responses, or one of them: of what counts as failed, so that it takes no
        others along. At the last not even other calls: what ends a scorer ends all that are under way.
        """
        taken = [self.left.popleft()]
        self._is_last_try = taken[0].is_last_try
        room, num_bytes = most - len(taken[0].items), CALL_BYTES - taken[0].num_bytes
        while self.left and not taken[0].num_failed and not self.left[0].num_failed:
            room -= len(self.left[0].items)
            num_bytes -= self.left[0].num_bytes
            if min(room, num_bytes) < 0:
                break
            taken.append(self.left.popleft())
        return taken

    def to_ask_again(self, failed: Sequence[_Unscored], *, counts: bool) -> list[_Unscored]:
        """Notes that prompts have failed; returns those that are to be asked again. counts: whether it counts, unless
        it is their first time.
        """
        now = time.monotonic()
        for each in failed:
            if counts and now - each.failed_at >= APART_S:
                each.num_failed, each.failed_at = each.num_failed + 1, now
            each.failed_at = min(each.failed_at, now)
        again = [each for each in failed if each.num_failed < TRIES]
        if given_up := sum(len(each.items) for each in failed) - sum(len(each.items) for each in again):
            logger.warning("%d held-out responses are not scored, though others are", given_up)
        return again


class HeldOutScorer:
    """The scorer of held-out responses. It keeps from one set to the next what size of calls is answered in time. Used
    from one event loop, for a set at a time.
    """

    def __init__(self, settings: RunSettings, reward: RewardClient) -> None:
        self._shows_images = settings.shows_images
        self._reward = reward
        self._size = CallSize(settings.reward.timeout_s)
        self._image_room = ImageRoom(CHUNK_IMAGE_BYTES)

    async def score(self, responses: Sequence[Response], wait: Callable[[float], Awaitable[None]]) -> dict[str, Score]:
        """The scores by item, in the order of `responses`. A scorer that is away is asked again after a `wait`, one
        call at a time until it gives scores, with all of a prompt's responses. They are given up when they failed TRIES
        times while others were scored.
        """
        shown = {response.answer.meta.id: response for response in responses} if self._shows_images else {}
        waiting = _Waiting(await asyncio.to_thread(_unscored, responses))  # of a large set it takes half a minute
        running = set[asyncio.Task[None]]()
        async with FirstErrorGroup() as tasks:
            while waiting.left or running:
                while waiting.left and len(running) < waiting.most_calls:
                    most = min(self._size.most, waiting.share, self._max_items)
                    running.add(tasks.create_task(self._call(waiting, waiting.take(most), most, shown, wait)))
                # bounded: by the deadlines of the calls, and `wait` by that of the evaluation
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        ids = [response.answer.meta.id for response in responses]
        return {id: waiting.scored[id] for id in ids if id in waiting.scored}

    @property
    def _max_items(self) -> int:
        """The most items of a request. A call of more is several, all of them ahead of the groups that come next."""
        spec = self._reward.described
        return SCORE_CHUNK if spec is None or not spec.max_items else spec.max_items

    async def _call(
        self,
        waiting: _Waiting,
        taken: Sequence[_Unscored],
        most: int,
        shown: Mapping[str, Response],
        wait: Callable[[float], Awaitable[None]],
    ) -> None:
        """Scores what was taken in a call of at most `most` items; who is to be asked again waits with the others then.
        `shown`: responses by item, in a run that shows images.
        """
        items, began = [item for each in taken for item in each.items], time.monotonic()
        was_silent = waiting.is_silent  # then the scorer may be away, which is no fault of theirs
        scored, away = await self._scored(items, shown)
        waiting.scored |= scored
        failed = list[_Unscored]()
        for each in taken:
            if any(item.id in away for item in each.items):
                failed.append(each)
            else:
                waiting.witness = each
        if not away:
            self._size.was_answered(len(items), time.monotonic() - began)
        waiting.is_silent = bool(away) and not scored
        if waiting.is_silent and not taken[0].num_failed:
            self._size.was_silent(most)
        if again := waiting.to_ask_again(failed, counts=not was_silent):
            logger.debug("%d held-out prompts cannot be scored at present, trying again", len(again))
            await wait(PAUSE_S)
            if not waiting.left or waiting.left[0].failed_at < math.inf:
                await self._ask_witness(waiting, shown)
            waiting.left.extend(again)

    async def _ask_witness(self, waiting: _Waiting, shown: Mapping[str, Response]) -> None:
        """Finds out whether the scorer is there, which all prompts that are left may fail for, by what it answered."""
        witness, waiting.witness = waiting.witness, None  # one call at a time has an item
        if witness is not None:
            _, away = await self._scored(witness.items, shown)
            waiting.is_silent = bool(away)
            waiting.witness = waiting.witness or witness

    async def _scored(
        self, items: Sequence[reward_pb2.ScoreItem], shown: Mapping[str, Response]
    ) -> tuple[dict[str, Score], set[str]]:
        """The scores by item, and the items that may have one if they are asked for again."""
        try:
            reads_images = bool(shown) and reward_pb2.SCORE_FIELD_IMAGES in (await self._reward.describe()).reads
        except ScorerError as error:
            logger.warning("%d held-out responses are not scored: %s", len(items), error)
            return {}, set()
        except RoleCallError as error:
            logger.debug("the scorer does not describe itself at present: %s", error)
            return {}, {item.id for item in items}
        if not reads_images:
            return await self._sent(items)
        scored, away = dict[str, Score](), set[str]()
        for part in chunked(items, CALL_BYTES, lambda item: image_bytes(shown[item.id])):
            async with self._image_room.holding(partial(_showing, part, shown)) as whole:
                scored_in_part, away_in_part = await self._sent(whole) if whole else ({}, set())
            scored |= scored_in_part
            away |= away_in_part
        return scored, away

    async def _sent(self, items: Sequence[reward_pb2.ScoreItem]) -> tuple[dict[str, Score], set[str]]:
        outcomes = list(zip(items, await self._reward.score(items), strict=True))
        return (
            {item.id: each for item, each in outcomes if isinstance(each, Score)},
            {item.id for item, each in outcomes if isinstance(each, Failure) and each.retryable},
        )


async def _showing(
    items: Sequence[reward_pb2.ScoreItem], shown: Mapping[str, Response]
) -> tuple[list[reward_pb2.ScoreItem], int]:
    """Copies with their images, and the bytes of these."""
    whole = await asyncio.to_thread(with_images, items, shown)
    return whole, sum(image_bytes(shown[item.id]) for item in whole)


def _unscored(responses: Sequence[Response]) -> list[_Unscored]:
    items = items_of(responses)
    prompts = [[items[place] for place in places] for places in groups_of(items)]
    return [_Unscored(prompt, sum(item.ByteSize() for item in prompt)) for prompt in prompts]
