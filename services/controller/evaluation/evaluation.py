"""Held-out evaluation: every prompt of a set through Rollout.Generate on the weights of one step, then the run's own
scorer.

Outside the ledger: nothing here is trained on. Rollouts and a scorer that are away are waited for, up to the deadline
of the evaluation. A response that no rollout could give, or no scorer could score, is counted as missing.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.errors import RoleCallError, UnavailableError
from rolecall.scoring.client import RewardClient
from rolecall.scoring.scores import Score
from rolecall.settings import RunSettings
from rolecall.settings.deadlines import TOKENS_PER_S
from rolecall.telemetry import Metrics
from rolecall.trajectory import seed_of
from rolecall.v1 import rollout_pb2, trajectory_pb2
from services.controller.board import RunBoard
from services.controller.evaluation.figures import summarise
from services.controller.evaluation.responses import Response, bytes_of
from services.controller.evaluation.scoring import SCORE_CHUNK, HeldOutScorer
from services.controller.evaluation.sets import HeldOutSet
from services.controller.fleet.liveness import Rollout
from services.controller.fleet.members import Fleet
from services.controller.samples import sample
from services.controller.tasks import at_once

logger = logging.getLogger(__name__)

LEAST_S = 600.0
"""Seconds that any evaluation gets."""
ROUNDS = 3
"""Most times that the rollouts which hold the weights are asked for what nobody has answered."""
LOOK_S = 2.0
"""Pause between two looks for a rollout with the weights."""


@dataclass(frozen=True)
class Patience:
    """The time that an evaluation has. While people pause the run it stands still: they may have taken roles away."""

    board: RunBoard
    timeout_s: float
    limit: asyncio.Timeout

    async def wait(self, seconds: float) -> None:
        """Waits before somebody who was away is asked again."""
        await asyncio.sleep(seconds)
        if self.board.paused:
            self.limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)


class Evaluation:
    """The evaluation of the fleet's current policy on every held-out set, one at a time."""

    def __init__(
        self,
        settings: RunSettings,
        fleet: Fleet,
        reward: RewardClient,
        board: RunBoard,
        sets: Sequence[HeldOutSet],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._scorer = HeldOutScorer(settings, reward)
        self._board = board
        self._sets = sets
        self.lacks_rollouts = False
        """Whether one is under way that waits, since no rollout that lives holds the weights."""

    @property
    def timeout_s(self) -> float:
        """Deadline of one evaluation, which the next publish waits for no longer: LEAST_S, and the longest response of
        every set, as often as a single rollout would go through its prompts, at 2 tokens/s, but no less than one call
        of a rollout may take; then every Score call, one after another, with all its attempts.
        """
        reward, rollout = self._settings.reward, self._settings.rollout
        num_tokens, num_calls = 0, 0
        for held_out in self._sets:
            num_tokens += math.ceil(len(held_out.prompts) / self._width(held_out)) * self._max_tokens(held_out)
            num_calls += math.ceil(len(held_out.prompts) / max(1, SCORE_CHUNK // held_out.section.num_responses))
        sampling_s = max(LEAST_S + num_tokens / TOKENS_PER_S, rollout.generation_timeout_s)
        return sampling_s + num_calls * reward.timeout_s * reward.max_attempts

    async def run(self, step: int, version: Callable[[], int]) -> tuple[Metrics, list[dict[str, Any]]]:
        """Metrics "eval/<set>/..." and samples for people, of the weights after `step` steps. `version` says under
        which version they stand at present: another, where they were published again. TimeoutError after its deadline.
        """
        metrics, samples = Metrics(), []
        timeout_s, solved_at = self.timeout_s, self._settings.reward.solved_at
        try:
            async with asyncio.timeout(timeout_s) as limit:
                patience = Patience(self._board, timeout_s, limit)
                for held_out in self._sets:
                    started = time.monotonic()
                    responses = await self._generate(held_out, step, version, patience)
                    scored = await self._scorer.score(responses, patience.wait)
                    await asyncio.to_thread(summarise, held_out, responses, scored, solved_at, metrics)
                    metrics.max(f"eval/{held_out.name}/time_s", time.monotonic() - started)
                    samples += self._samples(step, held_out, responses, scored)
        finally:
            self.lacks_rollouts = False
        return metrics, samples

    def _samples(
        self, step: int, held_out: HeldOutSet, responses: Sequence[Response], scored: dict[str, Score]
    ) -> list[dict[str, Any]]:
        """The responses that are kept for people: the first of each prompt, then the second of each."""
        by_index = sorted(responses, key=lambda response: response.answer.meta.index)
        return [
            sample(step, held_out.name, meta, response.prompt, scored.get(meta.id), response.num_tokens)
            for response in by_index[: self._settings.trackers.num_samples_kept]
            for meta in (response.answer.meta,)
        ]

    async def _generate(
        self, held_out: HeldOutSet, step: int, version: Callable[[], int], patience: Patience
    ) -> list[Response]:
        queue = list(enumerate(held_out.prompts))[::-1]
        results: dict[int, list[Response]] = {}
        timeout_s = self._settings.rollout.generation_timeout_s
        width = self._width(held_out)

        async def work(rollout: Rollout, policy_version: int) -> None:
            while queue:
                index, prompt = queue.pop()
                request = self._request(held_out, step, index, policy_version)
                if images := held_out.images.get(index, ()):
                    try:
                        request.prompt.images[:] = await asyncio.to_thread(bytes_of, images)
                    except RoleCallError as error:
                        logger.warning("evaluation prompt %s (%s) cannot be shown: %s", request.id, prompt.uid, error)
                        continue
                try:
                    results[index] = [
                        Response(prompt, answer, images)
                        async for answer in rollout.stub.Generate(request, timeout=timeout_s)
                    ]
                except UnavailableError as error:
                    logger.warning("%s breaks off in an evaluation: %s", rollout.consumer, error)
                    broke_at[rollout] = time.monotonic()
                    queue.insert(0, (index, prompt))  # behind all others
                    return
                except RoleCallError as error:
                    logger.warning(
                        "evaluation prompt %s (%s) failed on %s: %s", request.id, prompt.uid, rollout.consumer, error
                    )

        num_rounds, broke_at = 0, dict[Rollout, float]()
        while queue and num_rounds < ROUNDS:
            if num_rounds:  # one broke off when the others had nothing to do any more
                await patience.wait(self._settings.controller.lease_s)
            holders = await self._holders(version, patience, broke_at)
            await at_once([work(rollout, version()) for rollout in holders for _ in range(width)])
            num_rounds += 1
        return [response for index in sorted(results) for response in results[index]]

    async def _holders(
        self, version: Callable[[], int], patience: Patience, broke_at: Mapping[Rollout, float]
    ) -> list[Rollout]:
        """The rollouts that hold the weights and were heard since they broke off, once there are any. TimeoutError
        after controller.stall_timeout_s without one that holds them.
        """
        lacking_since = math.inf
        while True:
            living = [rollout for rollout in self._fleet.rollouts() if rollout.policy_version == version()]
            self.lacks_rollouts = not living
            if holders := [rollout for rollout in living if rollout.last_seen > broke_at.get(rollout, -math.inf)]:
                return holders
            now = time.monotonic()
            lacking_since = math.inf if living or self._board.paused else min(lacking_since, now)
            if now - lacking_since > self._settings.controller.stall_timeout_s:
                raise TimeoutError("no rollout has held its weights for controller.stall_timeout_s")
            await patience.wait(LOOK_S)

    def _width(self, held_out: HeldOutSet) -> int:
        """Prompts that a rollout is asked at a time."""
        return max(1, self._settings.rollout.max_num_seqs // held_out.section.num_responses)

    def _max_tokens(self, held_out: HeldOutSet) -> int:
        return held_out.section.max_tokens or self._settings.sampling.max_tokens

    def _request(self, held_out: HeldOutSet, step: int, index: int, policy_version: int) -> rollout_pb2.GenerateRequest:
        """A prompt's request, without its images, with a seed of its own: the same at every step, and not that of other
        prompts, whose errors would add up.
        """
        section = held_out.section
        sampling = trajectory_pb2.SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            max_tokens=self._max_tokens(held_out),
            stop_token_ids=self._settings.sampling.stop_token_ids,
        )
        return rollout_pb2.GenerateRequest(
            id=f"eval/{step}/{held_out.name}/{index}",
            prompt=held_out.prompts[index],
            num_responses=section.num_responses,
            sampling=sampling,
            seed=seed_of(self._settings.run.seed, index, 0),
            policy_version=policy_version,
        )
