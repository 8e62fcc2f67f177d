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
SHRINKS = 16
"""Factor by which a call that they are in is smaller after each, so that they are alone at the last."""
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
    """When they failed first; of a call in which others were scored, when it began."""
    counted_at: float = math.inf
    """When they failed first, or it counted last."""


class CallSize:
    """The size of calls that a scorer answers in time. It starts with few items, and what was late is halved. Once
    FEW_CALLS in a row were answered long before their deadline, one call goes with twice as many, and when that one is
    answered so, too, the others follow.
    """

    def __init__(self, timeout_s: float, most: int = SCORE_CHUNK // FEW_CALLS) -> None:
        """`timeout_s` is the deadline of a call."""
        self.most = most
        """Items of a call."""
        self._timeout_s = timeout_s
        self._num_sure = 0
        self._tried = 0
        """Items of the call under way that has twice as many; 0: there is none."""

    def begin(self) -> int:
        """Returns the most items of the next call."""
        if self._num_sure < FEW_CALLS or self._tried or 2 * self.most > SCORE_CHUNK:
            return self.most
        self._tried = 2 * self.most
        return self._tried

    def end(self, most: int, num_items: int, seconds: float, *, is_whole: bool) -> None:
        """Notes that a call begun with `most` ended after `seconds`. is_whole: all of its `num_items` have an answer
        that is to stand.
        """
        is_sure = is_whole and seconds <= SURE * self._timeout_s
        self._num_sure = self._num_sure + 1 if is_sure else 0
        if most == self._tried:
            self._tried = 0
            if is_sure and most == 2 * self.most and num_items > self.most:
                self.most = most

    def was_too_large(self, num_items: int) -> None:
        """Notes that a call of `num_items` was late."""
        self.most = max(1, min(self.most, num_items // 2))


class _Waiting:
    """The responses to a set that wait to be scored, and the scores of the others."""

    def __init__(self, left: Sequence[_Unscored]) -> None:
        self.scored: dict[str, Score] = {}
        self.left = deque(left)
        self.num_left = len(left)
        """Prompts without scores, those in calls under way among them."""
        self.num_silent = 0
        """Calls, each begun after the one before, that gave no score since one gave some."""
        self._share = math.ceil(sum(len(each.items) for each in left) / FEW_CALLS)
        self._answered_at = -math.inf
        """When the newest call began that gave scores."""

    def take(self, most: int) -> list[_Unscored]:
        """Takes prompts with at most `most` responses, or one of them: fewer than that where the set is small, where
        nothing is scored at present, and of what failed.
        """
        room = (min(most, self._share) >> self.num_silent) // SHRINKS ** self.left[0].num_failed
        taken, num_bytes = [self.left.popleft()], CALL_BYTES
        room -= len(taken[0].items)
        num_bytes -= taken[0].num_bytes
        while self.left and self.left[0].num_failed == taken[0].num_failed:
            room -= len(self.left[0].items)
            num_bytes -= self.left[0].num_bytes
            if min(room, num_bytes) < 0:
                break
            taken.append(self.left.popleft())
        return taken

    def has_scored(self, began: float) -> None:
        """Notes that a call gave scores, which began at `began` (monotonic)."""
        self._answered_at = max(self._answered_at, began)
        self.num_silent = 0

    def was_silent(self, num_silent: int) -> None:
        """Notes that a call gave none, which began after `num_silent` like it."""
        self.num_silent = max(self.num_silent, num_silent + 1)

    def to_ask_again(self, away: Sequence[_Unscored], at: float) -> list[_Unscored]:
        """Notes that prompts have failed, `at` that time; returns those that are to be asked again. At the very end
        nobody is left who could be scored meanwhile.
        """
        now, is_end = time.monotonic(), bool(self.scored) and self.num_left <= FEW_CALLS
        again = []
        for each in away:
            if (is_end or self._answered_at >= each.failed_at) and now - each.counted_at >= APART_S:
                each.num_failed, each.counted_at = each.num_failed + 1, now
            each.failed_at, each.counted_at = min(each.failed_at, at), min(each.counted_at, now)
            if each.num_failed < TRIES:
                again.append(each)
        if given_up := sum(len(each.items) for each in away) - sum(len(each.items) for each in again):
            logger.warning("%d held-out responses are not scored, though others are", given_up)
        self.num_left -= len(away) - len(again)
        return again


class HeldOutScorer:
    """The scorer of held-out responses. It keeps from one set to the next what size of calls is answered in time. Used
    from one event loop, for a set at a time.
    """

    def __init__(self, settings: RunSettings, reward: RewardClient) -> None:
        self._shows_images = settings.shows_images
        self._timeout_s = settings.reward.timeout_s
        self._reward = reward
        self._size = CallSize(self._timeout_s)
        self._image_room = ImageRoom(CHUNK_IMAGE_BYTES)

    async def score(self, responses: Sequence[Response], wait: Callable[[float], Awaitable[None]]) -> dict[str, Score]:
        """The scores by item, in the order of `responses`. A scorer that is away is asked again after a `wait`, one
        call at a time until it gives scores, with all of a prompt's responses. They are given up when they failed TRIES
        times while others were scored.
        """
        shown = {response.answer.meta.id: response for response in responses} if self._shows_images else {}
        waiting = _Waiting(await asyncio.to_thread(_unscored, responses))  # of a large set it takes half a minute
        self._size = CallSize(self._timeout_s, self._size.most)  # a call of the last set may have been cut short
        running = set[asyncio.Task[None]]()
        async with FirstErrorGroup() as tasks:
            while waiting.left or running:
                while waiting.left and len(running) < (1 if waiting.num_silent else FEW_CALLS):
                    most = self._size.begin()
                    taken = waiting.take(min(most, self._max_items))
                    running.add(tasks.create_task(self._call(waiting, taken, most, shown, wait)))
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
        items, num_silent, began = [item for each in taken for item in each.items], waiting.num_silent, time.monotonic()
        scored, away = await self._scored(items, shown)
        num_new, now = len(scored.keys() - waiting.scored.keys()), time.monotonic()
        waiting.scored |= scored
        self._size.end(most, len(items), now - began, is_whole=not away)
        if num_new or not away:
            waiting.has_scored(began)
        else:
            waiting.was_silent(num_silent)
            if not num_silent and now - began >= self._timeout_s:
                self._size.was_too_large(len(items))
        failed = [each for each in taken if not away.isdisjoint(item.id for item in each.items)]
        waiting.num_left -= len(taken) - len(failed)
        again = waiting.to_ask_again(failed, began if num_new else now)
        if again:
            logger.debug("%d held-out prompts cannot be scored at present, trying again", len(again))
            await wait(PAUSE_S)
            waiting.left.extend(again)

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
