"""Scores each group as it lands: the reward and every reference at the same time, no barrier between generation and
scoring. References that share devices with the rollouts are the exception: they score a batch.

Owns what a failure means: a scorer's failure is never a number. Items are retried by the client. After that, bad data
is raised, and collection.py drops the group; what is away is waited for: a reference up to controller.stall_timeout_s,
the scorer up to reward.away_timeout_s or for as long as it takes. The messages name the scorer. A group that was
scored before (the loop started over since) keeps its scores, its components by name: a scorer need not answer twice
alike, nor be the same. A ScoredGroup has the rewards that its rows hold; filters, preparation and measures read them
from it alone.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TypeAlias

import numpy as np

from rolecall.columns import IMAGES, TEACHER
from rolecall.errors import (
    DeadlineError,
    RateLimitedError,
    RoleCallError,
    ScorerError,
    ScorerUnavailableError,
    UnavailableError,
)
from rolecall.rpc.options import MAX_GROUP_BYTES
from rolecall.scoring.client import RewardClient
from rolecall.scoring.items import images_of, num_shown_in, score_item
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import RunSettings
from rolecall.store.rows import Rows
from rolecall.trajectory import is_truncated, rows_of
from rolecall.v1 import reward_pb2, training_pb2, trajectory_pb2
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from rolecall.wire import Array
from services.controller.groups.assembly import EpisodeEnd, GreedyResponse, ScoredGroup
from services.controller.groups.image_room import ImageRoom
from services.controller.tasks import FirstErrorGroup
from services.controller.threads import StoreThreads
from services.controller.together import Together

logger = logging.getLogger(__name__)

_Refs: TypeAlias = Sequence[trajectory_pb2.RowRef]
_Contents: TypeAlias = tuple[list[dict[str, Array]], list[trajectory_pb2.TrajectoryMeta]]
"""What is read of a group's rows."""

_VALUES, _NAMES = "reward_components", "reward_component_names"

MAX_IMAGE_BYTES = 2 * MAX_GROUP_BYTES
"""Bytes of images in the items that are scored at a time, or of one group where it has more: each response's item holds
all that it shows. In memory they are up to four times: in the item, in the request, and where that is on its way.
"""
RETRY_PAUSE_S = 2.0
"""Pause before a group is scored again whose scorer or reference was away."""


class GroupScorer:
    """Turns committed groups into scored ones; at most controller.max_score_calls at a time, the rest wait here
    (bounded by admission).
    """

    def __init__(
        self,
        settings: RunSettings,
        rows: Rows,
        threads: StoreThreads,
        reward: RewardClient,
        references: Mapping[str, ReferenceServiceStub],
        ctl: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._rows = rows
        self._threads = threads
        self._reading = Together(threads, self._keep_and_read)
        self._writing = Together(threads, self._put)
        self._reward = reward
        self._references = references
        self._ctl = ctl
        self._room = asyncio.Semaphore(settings.controller.max_score_calls)
        self._image_room = ImageRoom(MAX_IMAGE_BYTES)
        self._clock = clock
        self._scored_at = float("-inf")
        """When a group was scored last, on `clock`."""

    async def score(self, group: trajectory_pb2.CommittedGroup) -> ScoredGroup:
        """Reward columns and reference columns are in the group's rows when this returns, but for those of references
        that take shifts (step/reference_shift.py); the greedy response has a reward alone.

        ScorerError when an item cannot be scored, or has no token rewards and the loss reads them, RowMissingError when
        a row is gone, ScorerUnavailableError when the scorer stayed away and no group was scored for
        reward.away_timeout_s, UnavailableError or DeadlineError when a reference did, for controller.stall_timeout_s. A
        scorer that limits its rate may let one group wait for longer, while others get through.
        """
        landed_at_s, landed_at = time.monotonic(), self._clock()
        while True:
            try:
                scored = await self._attempt(group, landed_at_s)
            except (UnavailableError, DeadlineError, RateLimitedError) as error:
                if self._clock() - max(landed_at, self._scored_at) > self._patience_s(error):
                    raise
                logger.debug("group %d cannot be scored at present, trying again: %s", group.gid, error)
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._scored_at = self._clock()
                return scored

    def _patience_s(self, error: RoleCallError) -> float:
        """How long whoever failed with `error` may be away."""
        if not isinstance(error, ScorerUnavailableError):
            return self._settings.controller.stall_timeout_s
        away_timeout_s = self._settings.reward.away_timeout_s
        return math.inf if away_timeout_s is None else away_timeout_s

    async def _attempt(self, group: trajectory_pb2.CommittedGroup, landed_at_s: float) -> ScoredGroup:
        async with self._room:  # bounded: every call inside has a deadline, and admission bounds how many wait
            refs, num_responses = rows_of(group), len(group.rows)
            rows, metas = await self._reading.call(refs)
            async with FirstErrorGroup() as tasks:
                scored_before = all("reward" in row for row in rows)
                scoring = None if scored_before else tasks.create_task(self._score(refs, metas, rows))
                asked, in_shifts = self._asked(metas[0].prompt), self._settings.references_in_shifts
                later = tuple(each for each in asked if each[0] in in_shifts)
                for name, prefix in asked:
                    if name not in in_shifts:
                        tasks.create_task(self._ask(name, prefix, refs[:num_responses]))
            names = await self._component_names()
            scores = _kept_scores(rows, names) if scoring is None else scoring.result()
        return replace(_scored_group(group, rows, metas, scores, names, landed_at_s), references=later)

    async def _score(
        self,
        refs: Sequence[trajectory_pb2.RowRef],
        metas: Sequence[trajectory_pb2.TrajectoryMeta],
        rows: Sequence[Mapping[str, Array]],
    ) -> list[Score]:
        """The scores, written to the rows at once: a reference that is away has nobody scored again."""
        scores = _scores_of(metas, await self._outcomes(refs, metas, rows))
        if "token_rewards" in self._settings.columns_trained_on:
            _require_token_rewards(scores)
        return await self._keep(refs, rows, scores, await self._component_names())

    async def _outcomes(
        self,
        refs: Sequence[trajectory_pb2.RowRef],
        metas: Sequence[trajectory_pb2.TrajectoryMeta],
        rows: Sequence[Mapping[str, Array]],
    ) -> list[Outcome]:
        """An outcome for each item. Nobody else holds the items, which may be large."""
        if self._settings.shows_images and await self._reads_images():
            async with self._image_room.holding(partial(self._threads.call, self._showing, refs, metas, rows)) as items:
                return await self._reward.score(items)
        return await self._reward.score(
            [score_item(meta, row["token_ids"]) for meta, row in zip(metas, rows, strict=True)]
        )

    async def _keep(
        self,
        refs: Sequence[trajectory_pb2.RowRef],
        rows: Sequence[Mapping[str, Array]],
        scores: list[Score],
        names: Sequence[str],
    ) -> list[Score]:
        """Writes `scores` to the rows; the scores that the rows hold then. A column is written once, so those of an
        earlier attempt stand, also where it was cut short between two shards.
        """
        columns = [_reward_columns(score, names, row) for score, row in zip(scores, rows, strict=True)]
        if await self._writing.call((refs, columns)):
            return scores
        return _kept_scores((await self._reading.call(refs))[0], names)

    def _put(self, groups: Sequence[tuple[_Refs, Sequence[Mapping[str, Array]]]]) -> list[bool]:
        """Writes columns to the rows of each group. False for all of them where any row had its columns before: then
        the rows are to be read.
        """
        refs = [ref for of_group, _ in groups for ref in of_group]
        columns = [column for _, of_group in groups for column in of_group]
        return [self._rows.put(refs, columns) == 0] * len(groups)

    def _keep_and_read(self, groups: Sequence[_Refs]) -> list[_Contents]:
        refs = [ref for group in groups for ref in group]
        self._rows.persist(refs)  # the rollout may have died between its commit and its own persist
        rows, metas = self._rows.read_with_meta(
            refs, ["token_ids", "response_mask"], ["reward", "token_rewards", _VALUES, _NAMES]
        )
        contents, start = [], 0
        for group in groups:
            own = slice(start, start := start + len(group))
            for meta in metas[own][1:]:  # the first alone holds the prompt
                meta.prompt.CopyFrom(metas[own][0].prompt)
            contents.append((rows[own], metas[own]))
        return contents

    async def _component_names(self) -> list[str]:
        """The names of the components that the scorer gives, sorted."""
        try:
            spec = await self._reward.describe()
        except RoleCallError as error:  # whatever it is: the scorer has given scores, and is asked again
            raise ScorerUnavailableError(f"{error.reason}: {error.message}") from error
        return sorted(component.name for component in spec.components)

    async def _reads_images(self) -> bool:
        """Whether the scorer does. ScorerError when what it says of itself is not believed."""
        try:
            return reward_pb2.SCORE_FIELD_IMAGES in (await self._reward.describe()).reads
        except ScorerError:
            raise
        except RoleCallError as error:
            raise ScorerUnavailableError(f"{error.reason}: {error.message}") from error

    def _showing(
        self, refs: _Refs, metas: Sequence[trajectory_pb2.TrajectoryMeta], rows: Sequence[Mapping[str, Array]]
    ) -> tuple[list[reward_pb2.ScoreItem], int]:
        """The items with the images that they show, and the bytes of these."""
        images = self._images(refs, metas)
        shown = zip(metas, rows, images, strict=True)
        items = [score_item(meta, row["token_ids"], files) for meta, row, files in shown]
        return items, sum(len(file) for files in images for file in files)

    def _images(self, refs: _Refs, metas: Sequence[trajectory_pb2.TrajectoryMeta]) -> list[Sequence[bytes]]:
        """The files for each item; rows whose messages show no more than their prompt are not read for it again."""
        read = [not place or num_shown_in(meta.episode.messages) > 0 for place, meta in enumerate(metas)]
        rows = iter(self._rows.read(list(compress(refs, read)), [IMAGES]))
        columns = [trajectory_pb2.Images.FromString(next(rows)[IMAGES].tobytes()) if each else None for each in read]
        assert columns[0] is not None
        of_prompt = columns[0].files[: len(columns[0].files) - metas[0].episode.num_images]
        return [images_of(meta, each) if each else of_prompt for meta, each in zip(metas, columns, strict=True)]

    def _asked(self, prompt: trajectory_pb2.Prompt) -> list[tuple[str, str]]:
        """(instance, prefix of its columns) of the references that speak of this prompt's responses: the KL's, and the
        one teacher that is the prompt's.
        """
        algorithm = self._settings.algorithm
        asked = (
            [(algorithm.kl.reference, "")]
            if algorithm.kl is not None and algorithm.kl.reference in self._references
            else []
        )
        distillation = algorithm.distillation
        if distillation is not None:
            field = distillation.field
            teacher = distillation.teacher_of(
                prompt.metadata[field] if field is not None and field in prompt.metadata else None
            )
            if teacher is None:
                raise ScorerError(
                    f"prompt {prompt.uid} has no teacher: its field {field!r} names none of "
                    f"{sorted(distillation.teachers)}"
                )
            asked.append((teacher, TEACHER))
        return asked

    async def _ask(self, name: str, prefix: str, refs: list[trajectory_pb2.RowRef]) -> None:
        request = training_pb2.ComputeColumnRequest(ctl=self._ctl, rows=refs, prefix=prefix)
        await self._references[name].ComputeLogprobs(request, timeout=self._settings.actor.compute_timeout_s)


def _scores_of(metas: Sequence[trajectory_pb2.TrajectoryMeta], outcomes: Sequence[Outcome]) -> list[Score]:
    """The scores. ScorerUnavailableError or ScorerError for an item that has none."""
    scores = []
    for meta, outcome in zip(metas, outcomes, strict=True):
        if isinstance(outcome, Failure):
            kind = ScorerUnavailableError if outcome.retryable else ScorerError
            raise kind(f"{outcome.code}: {outcome.message} (trajectory {meta.id}, prompt {meta.prompt.uid})")
        scores.append(outcome)
    return scores


def _require_token_rewards(scores: Sequence[Score]) -> None:
    if any(score.token_rewards is None for score in scores):
        raise ScorerError(
            "algorithm.policy_loss: it trains on token_rewards, and the scorer gave none; use one that does, or leave "
            "them out of the loss's columns"
        )


def _kept_scores(rows: Sequence[Mapping[str, Array]], present: Sequence[str]) -> list[Score]:
    """The scores that the rows hold, under the names of the components that gave them: a run may have been resumed
    with others. `present` are those of now, and of rows that were scored before names were kept.
    """
    scores = []
    for row in rows:
        names = json.loads(row[_NAMES].tobytes()) if _NAMES in row else present
        values = dict(zip(names, row[_VALUES].tolist(), strict=True)) if _VALUES in row else {}
        applying = {name: value for name, value in values.items() if not np.isnan(value)}
        earned = row["token_rewards"][row["response_mask"] != 0] if "token_rewards" in row else None
        scores.append(Score(float(row["reward"][0]), applying, earned))
    return scores


def _reward_columns(score: Score, names: Sequence[str], row: Mapping[str, Array]) -> dict[str, Array]:
    columns: dict[str, Array] = {"reward": np.array([score.value], np.float32)}
    if names:
        columns[_VALUES] = np.array([score.components.get(name, np.nan) for name in names], np.float32)
        columns[_NAMES] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    if score.token_rewards is not None:
        token_rewards = np.zeros(row["response_mask"].shape, np.float32)
        token_rewards[row["response_mask"] != 0] = score.token_rewards
        columns["token_rewards"] = token_rewards
    return columns


def _scored_group(
    group: trajectory_pb2.CommittedGroup,
    rows: Sequence[Mapping[str, Array]],
    metas: Sequence[trajectory_pb2.TrajectoryMeta],
    scores: Sequence[Score],
    names: Sequence[str],
    landed_at_s: float,
) -> ScoredGroup:
    """`group` with the scores of its rows, of which a greedy response's is the last, and the components `names`."""
    num_responses = len(group.rows)
    rewards, totals = (np.array(each, np.float32) for each in zip(*((s.value, s.total) for s in scores), strict=True))
    return ScoredGroup(
        gid=group.gid,
        rows=tuple(group.rows),
        min_policy_version=group.min_policy_version,
        rewards_G=rewards[:num_responses],
        totals_G=totals[:num_responses],
        components={
            name: np.array([score.components.get(name, np.nan) for score in scores[:num_responses]], np.float32)
            for name in names
        },
        num_response_tokens_G=np.array([int(row["response_mask"].sum()) for row in rows[:num_responses]], np.int32),
        truncated_G=np.array([is_truncated(meta) for meta in metas[:num_responses]]),
        generation_s=max(meta.generation_s for meta in metas),
        landed_at_s=landed_at_s,
        scored_at_s=time.monotonic(),
        greedy=GreedyResponse(group.greedy_row, float(rewards[-1]), float(totals[-1]))
        if group.HasField("greedy_row")
        else None,
        prompt_uid=metas[0].prompt.uid,
        environment=metas[0].prompt.environment,
        episodes=tuple(
            EpisodeEnd(
                len(meta.episode.turns),
                meta.episode.num_tool_calls,
                meta.episode.num_malformed,
                meta.episode.num_cut_observation_tokens,
                meta.episode.num_images,
                meta.episode.ended_by,
                meta.episode.tokens if meta.episode.HasField("tokens") else None,
            )
            for meta in metas[:num_responses]
            if meta.HasField("episode")
        ),
    )
