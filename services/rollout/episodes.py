"""Episodes of groups in an environment, of which a run may have several: their sessions, and what becomes of a failure.

An episode that the environment lost is begun again in its place, up to max_attempts and within the time of the first,
and then fails its group; one whose environment is away goes back with its group. Neither is a trajectory. A group
samples nothing before all its sessions are open, and goes back when they cannot be: nobody holds places and waits for
more. What happens in an episode is turns/stepped.py's, or harness/runs.py's where the environment's own agent runs it;
calls of the environment are rolecall/environment/client.py's. Bounds: sessions of the groups in hand, each closed when
its episode ends, however it does.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar

from rolecall.data.continuation import Continuation
from rolecall.data.images.files import media_type
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.checks import run_problem
from rolecall.environment.client import EnvironmentClient, EpisodeSession, open_environment
from rolecall.errors import ConfigError, EnvironmentAwayError, EpisodeLostError
from rolecall.settings import RunSettings
from rolecall.store.prompts import Claim
from rolecall.telemetry import Metrics, export
from rolecall.v1 import environment_pb2, trajectory_pb2
from services.rollout.groups import MixedGroups
from services.rollout.harness.endpoint import Endpoint
from services.rollout.harness.runs import AgentRuns, RunLimits
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.trajectories import group_requests
from services.rollout.turns.observations import Observations
from services.rollout.turns.prompts import PromptThread
from services.rollout.turns.shown import NUM_OPENED, files_of
from services.rollout.turns.stepped import FirstTurn, SteppedEpisodes, TurnLimits
from services.rollout.turns.tool_calls import ToolCalls

logger = logging.getLogger(__name__)
T = TypeVar("T")

PLACE_S = 0.2
"""Pause before places for an evaluation are looked for again; its deadline is Generate's."""


@dataclass(frozen=True)
class EpisodeSettings:
    """The part of the run's settings that episodes in one environment need."""

    run: str
    environment: str
    """Name of the environment in the run's file."""
    responses_per_group: int
    max_prompt_tokens: int
    """Longest first prompt: the row's messages and what the environment says first."""
    max_turns: int
    max_image_bytes: int
    """Most bytes of the images that the environment or its agent shows in an episode; 0: it shows none."""
    max_row_tokens: int
    """Most tokens of an episode's segments together."""
    max_malformed: int
    """Turns in a row whose calls of tools cannot be read, with which an episode ends."""
    max_attempts: int
    """Episodes begun for one trajectory."""
    budget_s: float
    """Seconds from when a group's sessions are opened on after which an episode has no further turn, whichever attempt
    it is: the group's own time does not begin anew.
    """

    @classmethod
    def of(cls, settings: RunSettings, name: str) -> Self:
        """Returns those of the run's environment `name`."""
        section = settings.environments[name]
        return cls(
            run=settings.run.name,
            environment=name,
            responses_per_group=settings.responses_per_group,
            max_prompt_tokens=settings.data.max_prompt_tokens,
            max_turns=section.max_turns,
            max_image_bytes=section.max_image_bytes or 0,
            max_row_tokens=settings.episode_tokens(section),
            max_malformed=section.max_malformed,
            max_attempts=section.max_attempts,
            budget_s=section.budget_share * settings.rollout.generation_timeout_s,
        )


@dataclass(frozen=True)
class _Place:
    """One trajectory to be, whatever becomes of its attempts."""

    name: str
    """Name of its session, of a later attempt with a number behind it."""
    group: str
    fence: int
    prompt: trajectory_pb2.Prompt
    request: SampleRequest
    """The request for a single response; its prompt is not used."""


@dataclass(frozen=True)
class _Begun:
    """An episode whose session is open."""

    session: EpisodeSession
    first: FirstTurn | None
    """None: the environment's own agent runs it."""
    began_at: float
    ends_at: float
    """Monotonic time after which it has no further turn."""
    attempt: int
    """Episodes of its place that were lost before."""


class Episodes:
    """A GroupSampler of episodes in one environment. Used from one event loop."""

    def __init__(
        self,
        settings: EpisodeSettings,
        replica: Replica,
        environment: EnvironmentClient,
        tokenizer: ChatTokenizer,
        tool_calls: ToolCalls | None,
        endpoint: Endpoint,
        prompts: PromptThread,
        observations: Observations,
        problem: Callable[[environment_pb2.DescribeEnvironmentResponse, Continuation], str | None],
    ) -> None:
        """`tool_calls`: None where the run names no parser of them. `endpoint`: where the environment's own agents call
        the policy, if it has some. Whoever made it and `prompts`, which environments share, closes them.
        `observations`: shortens what the environment answers, by the tokenizer of `prompts`. `problem`: what
        keeps the run from an environment that says this of itself, by the run's template.
        """
        self._settings = settings
        self._environment = environment
        self._continuation = Continuation(tokenizer, visual_tokens=prompts.visual_tokens)
        """Answers what the template can do, on the event loop."""
        self._problem = problem
        open_images = asyncio.Semaphore(NUM_OPENED)
        run_limits = RunLimits(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_calls=settings.max_turns,
            max_row_tokens=settings.max_row_tokens,
            max_image_bytes=settings.max_image_bytes,
        )
        turn_limits = TurnLimits(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_turns=settings.max_turns,
            max_row_tokens=settings.max_row_tokens,
            max_image_bytes=settings.max_image_bytes,
            max_malformed=settings.max_malformed,
        )
        self._runs = AgentRuns(
            run_limits, replica, tokenizer, tool_calls, endpoint, environment.address, prompts, open_images
        )
        self._steps = SteppedEpisodes(
            turn_limits, replica, environment, tokenizer, tool_calls, prompts, observations, open_images
        )
        self._num_lost = 0
        self._opening = asyncio.Lock()

    @property
    def server(self) -> object:
        """Implements GroupSampler.server: its client counts the sessions of all."""
        return self._environment

    async def room(self, num_in_hand: int, max_groups: int) -> int:
        """Implements GroupSampler.room: as many groups as there are places for all their episodes. ConfigError when the
        environment never has places for one, or the run cannot play in it.
        """
        if max_groups == 0 or await self._environment.num_free() == 0:
            return 0
        if (problem := self._problem(self._environment.spec, self._continuation)) is not None:
            raise ConfigError(problem)
        if self._environment.spec.runs_episodes:
            await self._runs.start()
        places, needed = self._environment.max_sessions, self._settings.responses_per_group
        if not places:
            return max_groups
        self._check_places(needed, "a group", "sampling.num_responses")
        free = places - needed * num_in_hand - self._environment.num_ending
        return max(0, min(max_groups, free // needed))

    async def sample(self, claim: Claim) -> tuple[list[SampleRequest], list[Response]]:
        """Implements GroupSampler.sample. EpisodeLostError when the environment lost an episode max_attempts times, or
        at the end of its time, EnvironmentAwayError when it is away or full, InvalidInputError when it cannot do the
        task at all.
        """
        group, fence = claim.group, int(claim.delivery)
        name = f"{self._settings.run}/{claim.ledger}/{group.gid}"
        if fence > 1:
            await self._environment.close_older(name, fence)
        places = [
            _Place(f"{name}/{i}/{claim.token}", name, fence, group.prompt, request)
            for i, request in enumerate(group_requests(group, claim.token))
        ]
        return await self.play(places)

    async def respond(
        self, name: str, prompt: trajectory_pb2.Prompt, requests: Sequence[SampleRequest]
    ) -> tuple[list[SampleRequest], list[Response]]:
        """Implements GroupSampler.respond, one episode for each request. Waits while the environment is
        away or full. ConfigError when it never has places for all, EpisodeLostError, InvalidInputError as `sample`.
        """
        numbers = count()
        while True:
            group = f"{self._settings.run}/{name}/{next(numbers)}"
            places = [_Place(f"{group}/{i}", group, 0, prompt, request) for i, request in enumerate(requests)]
            try:
                return await self.play(places, self._places_for(len(places)))
            except EnvironmentAwayError as error:
                logger.warning("%s waits: %s", name, error.message)
                await asyncio.sleep(PLACE_S)

    @asynccontextmanager
    async def _places_for(self, num_places: int) -> AsyncIterator[None]:
        """Begins when the environment has so many places, and nobody else takes them meanwhile. ConfigError when it
        never has.
        """
        async with self._opening:  # bounded: by generation_timeout_s of Generate
            while (free := await self._environment.num_free()) is not None and free < num_places:
                self._check_places(num_places, "a prompt of an evaluation", "evaluation.sets.*.num_responses")
                await asyncio.sleep(PLACE_S)
            yield

    def _check_places(self, needed: int, by: str, setting: str) -> None:
        """Returns unless the environment says that it has fewer places than `needed`: ConfigError."""
        places = self._environment.max_sessions
        if 0 < places < needed:
            raise ConfigError(
                f"environments.{self._settings.environment}: {self._environment.spec.name!r} has max_sessions "
                f"{places}, and {by} needs {needed} at a time; raise it, or lower {setting}"
            )

    async def play(
        self, places: Sequence[_Place], opening: AbstractAsyncContextManager[None] | None = None
    ) -> tuple[list[SampleRequest], list[Response]]:
        """Opens all sessions, inside `opening`, then plays. Leaves nothing open."""
        open_sessions: set[EpisodeSession] = set()
        try:
            async with opening or nullcontext():  # bounded: by generation_timeout_s of whoever asks
                ends_at = time.monotonic() + self._settings.budget_s
                begun = await _all(self._begin(place, open_sessions, ends_at) for place in places)
            played = await _all(
                self._played(place, first, open_sessions) for place, first in zip(places, begun, strict=True)
            )
        finally:
            for session in open_sessions:
                session.leave()
        return [request for request, _ in played], [response for _, response in played]

    async def close(self) -> None:
        """Implements GroupSampler.close."""
        await self._environment.close()

    # --- one trajectory -----------------------------------------------------------------------------

    async def _begin(
        self, place: _Place, open_sessions: set[EpisodeSession], ends_at: float, attempt: int = 0
    ) -> _Begun:
        """An open session, of this attempt or a later one."""
        while True:
            name = f"{place.name}.{attempt}" if attempt else place.name
            session = self._environment.session(name, place.group, place.fence)
            open_sessions.add(session)
            began_at = time.monotonic()
            try:
                runs = self._environment.spec.runs_episodes
                opening = await session.reset(
                    _task(place.prompt, shows_images=runs),
                    place.request.seed,
                    shows_images=self._settings.max_image_bytes > 0,
                )
                files = files_of(opening.messages, self._steps.visual_tokens)
                first = None
                if not runs:
                    first = await self._steps.first(place.name, place.prompt, place.request, opening, files)
                return _Begun(session, first, began_at, ends_at, attempt)
            except EpisodeLostError as error:
                session.leave()
                attempt += 1
                self._may_try(place, attempt, ends_at, error)

    async def _played(
        self, place: _Place, begun: _Begun, open_sessions: set[EpisodeSession]
    ) -> tuple[SampleRequest, Response]:
        """A whole episode, of this attempt or a later one."""
        while True:
            try:
                request, said, session = place.request, place.prompt.messages, begun.session
                began_at, ends_at = begun.began_at, begun.ends_at
                if begun.first is None:
                    return await self._runs.play(request, said, session, began_at=began_at, ends_at=ends_at)
                return await self._steps.play(request, said, session, begun.first, began_at=began_at, ends_at=ends_at)
            except EpisodeLostError as error:
                self._may_try(place, begun.attempt + 1, begun.ends_at, error)
            finally:
                begun.session.leave()
            begun = await self._begin(place, open_sessions, begun.ends_at, begun.attempt + 1)

    def _may_try(self, place: _Place, attempt: int, ends_at: float, error: EpisodeLostError) -> None:
        """Counts the episode as lost. EpisodeLostError where no attempt is left, or no time for one."""
        logger.warning("episode %s was lost: %s", place.name, error.message)
        self._num_lost += 1
        metrics = Metrics()
        metrics.sum("rollout/lost_episodes", self._num_lost)
        export(metrics)
        if attempt >= self._settings.max_attempts:
            raise error
        if time.monotonic() >= ends_at:
            raise EpisodeLostError(
                f"{error.message}; its time is spent, a share of rollout.generation_timeout_s, and no other is begun "
                "in its place"
            ) from error


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error cancels the rest."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)  # bounded: by generation_timeout_s of whoever asks
    finally:
        for task in tasks:
            task.cancel()
        # bounded: they are cancelled, and their waits end with that
        await asyncio.gather(*tasks, return_exceptions=True)


def sampler_of(
    settings: RunSettings, replica: Replica, tokenizer: ChatTokenizer, tool_calls: Mapping[str, ToolCalls] = {}
) -> MixedGroups:
    """The sampler of the run's groups. `tool_calls`: the readers of them, by environments that name a parser."""
    if not settings.environments:
        return MixedGroups(replica)
    endpoint = Endpoint(settings.rollout.endpoint_bind, settings.rpc, host=settings.rollout.advertise_host)
    visual_tokens = PromptEncoder.of(settings, tokenizer).visual_tokens
    prompts = PromptThread(tokenizer, replica.info.max_model_tokens, visual_tokens)
    servers = {section.server: section for section in settings.environments.values()}
    clients = {server: open_environment(section, settings.rpc) for server, section in servers.items()}
    played = {
        name: Episodes(
            EpisodeSettings.of(settings, name),
            replica,
            clients[section.server],
            tokenizer,
            tool_calls.get(name),
            endpoint,
            prompts,
            Observations(prompts.tokenizer, section.max_observation_tokens, section.observation_cut),
            partial(run_problem, settings, name),
        )
        for name, section in settings.environments.items()
    }

    async def close_shared() -> None:
        await endpoint.close()
        prompts.close()

    answers_once = all(section.when for section in settings.environments.values())
    return MixedGroups(replica, played, close_shared, answers_once=answers_once)


def _task(prompt: trajectory_pb2.Prompt, *, shows_images: bool) -> environment_pb2.Task:
    """The row that an episode is about, with its images for an agent, who shows them to the policy."""
    files = prompt.images if shows_images else ()
    return environment_pb2.Task(
        uid=prompt.uid,
        messages=prompt.messages,
        ground_truth=prompt.ground_truth,
        metadata=prompt.metadata if prompt.HasField("metadata") else None,
        other_ground_truths=prompt.other_ground_truths,
        images=[environment_pb2.ImagePart(media_type=media_type(file), data=file) for file in files],
    )
