"""The loop of an episode: the policy's turns in the engine, the environment's answers between them.

Owns the order of the two, budgets, and what becomes of a failure: an episode that the environment lost is begun again
in its place, up to max_attempts and within the time of the first, and then fails its group; one whose environment is
away goes back with its group. Neither is a trajectory. A group samples nothing before all its sessions are open, and
goes back when they cannot be: nobody holds places and waits for more. Tokens and calls of tools are turns/'s, calls of
the environment rolecall/environment/client.py's. Bounds: sessions of the groups in hand, each closed when its episode
ends, however it does.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from rolecall.data.continuation import ChatMessage, Continuation
from rolecall.data.images.files import media_type, parts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.images.tokens import run_lengths
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.answers import CONTINUES, roles_of
from rolecall.environment.checks import run_problem
from rolecall.environment.client import EnvironmentClient, EpisodeSession, open_environment
from rolecall.errors import (
    ConfigError,
    EnvironmentAwayError,
    EpisodeLostError,
    InvalidInputError,
    PromptTooLongError,
)
from rolecall.settings import RunSettings
from rolecall.store.prompts import Claim
from rolecall.telemetry import Metrics, export
from rolecall.v1 import environment_pb2, trajectory_pb2
from services.rollout.harness.endpoint import Endpoint
from services.rollout.harness.runs import AgentRuns, RunLimits
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.single_turn import SingleTurns
from services.rollout.trajectories import group_requests, prompt_token_ids
from services.rollout.turns.observations import Observations
from services.rollout.turns.prompts import PromptThread
from services.rollout.turns.shown import NUM_OPENED, ShownImage, chat_message, files_of, opened, showing
from services.rollout.turns.tool_calls import Heard, SessionCalls, ToolCalls, ToolSchema, tool_schemas
from services.rollout.turns.tree import Tree, Turn, TurnPrompt

logger = logging.getLogger(__name__)
T = TypeVar("T")

PLACE_S = 0.2
"""Pause before places for an evaluation are looked for again; its deadline is Generate's."""


@dataclass(frozen=True)
class EpisodeSettings:
    """The part of the run's settings that episodes need."""

    run: str
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
class _First:
    """The beginning of an episode that the rollout steps."""

    prompt: TurnPrompt
    """What its first turn is sampled from."""
    tools: Sequence[ToolSchema]
    """The tools that the first prompt shows."""
    calls: SessionCalls | None
    """Reads its calls of tools; None: it has no tools, or the run no parser."""


@dataclass(frozen=True)
class _Begun:
    """An episode whose session is open."""

    session: EpisodeSession
    first: _First | None
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
        the policy, if it has some. `observations`: shortens what the environment answers, by the tokenizer of
        `prompts`. `problem`: what keeps the run from an environment that says this of itself, by the run's template.
        """
        self._settings = settings
        self._replica = replica
        self._environment = environment
        self._tokenizer = tokenizer
        self._tool_calls = tool_calls
        self._continuation = Continuation(tokenizer, visual_tokens=prompts.visual_tokens)
        """Answers what the template can do, on the event loop."""
        self._prompts = prompts
        self._visual_tokens = prompts.visual_tokens if settings.max_image_bytes else None
        """The tokens of images that the environment may show; None: it may show none."""
        self._open = asyncio.Semaphore(NUM_OPENED)
        self._observations = observations
        self._problem = problem
        self._runs = AgentRuns(
            RunLimits(
                settings.max_prompt_tokens, settings.max_turns, settings.max_row_tokens, settings.max_image_bytes
            ),
            replica,
            tokenizer,
            tool_calls,
            endpoint,
            prompts,
            self._open,
        )
        self._num_lost = 0
        self._opening = asyncio.Lock()

    async def room(self, num_in_hand: int, max_groups: int) -> int:
        """Implements GroupSampler.room: as many groups as there are places for all their episodes. ConfigError when the
        environment never has places for one, or the run cannot play in it.
        """
        if max_groups == 0 or await self._environment.num_free() == 0:
            return 0
        if (problem := self._problem(self._environment.spec, self._continuation)) is not None:
            raise ConfigError(problem)
        if self._environment.spec.runs_episodes:
            await self._runs.endpoint.start()
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
        """Episodes outside the ledger, one for each request for a response to `prompt`. Waits while the environment is
        away or full. ConfigError when it never has places for all, EpisodeLostError, InvalidInputError as `sample`.
        """
        for number in count():
            group = f"{self._settings.run}/{name}/{number}"
            places = [_Place(f"{group}/{i}", group, 0, prompt, request) for i, request in enumerate(requests)]
            try:
                return await self.play(places, self._places_for(len(places)))
            except EnvironmentAwayError as error:
                logger.warning("%s waits: %s", name, error.message)
                await asyncio.sleep(PLACE_S)
        raise AssertionError

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
                f"environment.address: environment {self._environment.spec.name!r} has max_sessions {places}, and {by} "
                f"needs {needed} at a time; raise it, or lower {setting}"
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
        await self._runs.endpoint.close()
        await self._environment.close()
        self._prompts.close()

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
                files = self._files(opening.messages)
                first = None if runs else await self._first(place, opening, files)
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
                if begun.first is None:
                    said = place.prompt.messages
                    return await self._runs.play(
                        place.request, said, begun.session, began_at=begun.began_at, ends_at=begun.ends_at
                    )
                return await self._play(place, begun, begun.first)
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

    async def _first(self, place: _Place, opening: environment_pb2.ResetResponse, files: Sequence[bytes]) -> _First:
        """The first prompt: the row's messages and what the environment said, with the images in `files`, rendered
        once.
        """
        own = _spoken(place.prompt.messages)
        if place.request.images:
            own = tuple({**message, "content": parts(message["content"])} for message in own)
        if sum(map(len, files)) > self._settings.max_image_bytes:
            raise InvalidInputError(
                f"the first messages of episode {place.name} show images of more than environment.max_image_bytes "
                f"{self._settings.max_image_bytes}; raise it, or have the environment show less"
            )
        images = (*self._own_images(place), *await self._opened(files))
        messages = (*own, *map(chat_message, opening.messages))
        tools = tool_schemas(opening.tools)
        calls = self._tool_calls.of_session(tools) if self._tool_calls is not None and tools else None
        image_tokens = [image.num_tokens for image in images]
        rendered = partial(self._prompts.continuation.opening, messages, tools, len(own), image_tokens)
        try:
            with showing(messages[len(own) :]):
                ids = await self._prompts.run(rendered)
        except PromptTooLongError as error:
            raise PromptTooLongError(f"the first prompt of episode {place.name}: {error.message}") from error
        if len(ids) > self._settings.max_prompt_tokens:
            raise PromptTooLongError(
                f"the first prompt of episode {place.name} has {len(ids)} tokens, data.max_prompt_tokens is "
                f"{self._settings.max_prompt_tokens}; raise it, or have the environment say less"
            )
        self._replica.require_room(ids, f"episode {place.name}")
        longest = min(len(ids) + place.request.sampling.max_tokens, self._replica.info.max_model_tokens)
        return _First(TurnPrompt(None, messages, ids, longest, "first", images), tools, calls)

    def _own_images(self, place: _Place) -> Iterable[ShownImage]:
        """The images that the row shows."""
        tokens, files = self._prompts.visual_tokens, place.request.images
        if not files or tokens is None:
            return ()
        # a prompt that was in flight at a checkpoint may have the tokens of the environment's images, too
        lengths = run_lengths(prompt_token_ids(place.prompt), tokens.token_id)[: len(files)]
        return map(ShownImage, files, lengths)

    def _files(self, messages: Iterable[environment_pb2.Observation]) -> Sequence[bytes]:
        """The files of the images that the environment's messages show. EpisodeLostError where the run shows none."""
        files = files_of(messages)
        if files and self._visual_tokens is None:
            raise EpisodeLostError(
                "the environment answered an image, and this run shows none of it: set environment.max_image_bytes, "
                "for a model that sees images, or have it answer text"
            )
        return files

    async def _opened(self, files: Sequence[bytes]) -> tuple[ShownImage, ...]:
        """The images in `files` of the environment. EpisodeLostError when one cannot be shown."""
        if not files or self._visual_tokens is None:
            return ()
        async with self._open:  # bounded: by generation_timeout_s of whoever asks, as what is inside
            return await asyncio.to_thread(opened, files, self._visual_tokens)

    async def _play(self, place: _Place, begun: _Begun, first: _First) -> tuple[SampleRequest, Response]:
        """Turns until the episode is over or a budget is spent."""
        own = len(place.prompt.messages)
        tree = Tree(place.request, self._prompts.continuation, self._settings.max_row_tokens, own)
        prompt, shown, num_malformed = first.prompt, first.prompt.messages, 0

        def ended(ended_by: str, reward: trajectory_pb2.EpisodeReward | None) -> tuple[SampleRequest, Response]:
            return tree.ended(
                ended_by,
                reward,
                turn_rewards=self._environment.spec.turn_rewards,
                row_messages=place.prompt.messages,
                generation_s=time.monotonic() - begun.began_at,
            )

        while True:
            turn, calls = await self._turn(tree, prompt, first)
            files: Sequence[bytes] = ()
            if calls.problem:
                num_malformed += 1
                heard: Sequence[ChatMessage] = [{"role": self._tool_role, "content": calls.problem}]
            else:
                num_malformed = 0
                answer = await begun.session.step(turn.text, is_cut=turn.is_cut, tool_calls=calls.calls)
                files = self._files(answer.messages)
                if answer.state != CONTINUES:
                    over = "terminated" if answer.state == environment_pb2.EPISODE_STATE_TERMINATED else "truncated"
                    return ended(over, answer.reward if answer.HasField("reward") else None)
                if answer.HasField("reward"):
                    turn.reward = answer.reward.value
                shorten = partial(self._observations.shortened, [*map(chat_message, answer.messages)])
                heard, num_left_out = await self._prompts.run(shorten)
                tree.num_cut_observation_tokens += num_left_out
            told = {"role": "assistant", "content": turn.text}
            shown = (*shown, turn.told, *heard)
            spent = self._spent(turn.number, num_malformed)
            if not spent and files:
                num_bytes = sum(len(image.file) for image in prompt.images[len(place.request.images) :])
                spent = self._spent_on_images(num_bytes + sum(map(len, files)), tree, begun)
            if not spent:
                images = await self._opened(files)
                going_on = partial(tree.after, turn, (*prompt.messages, told, *heard), first.tools, shown, images)
                try:
                    with showing(shown[own:]):
                        prompt = await self._prompts.run(going_on)
                    spent = "" if prompt.room >= 1 else "tokens"
                except PromptTooLongError:
                    spent = "tokens"
            if not spent and time.monotonic() >= begun.ends_at:
                spent = "time"
            if spent:
                return ended(spent, await begun.session.grade())

    async def _turn(self, tree: Tree, prompt: TurnPrompt, first: _First) -> tuple[Turn, Heard]:
        """Samples a turn, and reads its calls of tools."""
        number, request = tree.request(prompt, prompt.room)
        response = await self._replica.sample(request)
        turn = tree.sampled(number, prompt, response, self._tokenizer.decode(response.sample.token_ids))
        turn.is_seen = True
        calls = Heard()
        if first.calls is not None:
            calls = first.calls.hear(prompt.token_ids, response.sample.token_ids, is_cut=turn.is_cut)
        turn.is_malformed, turn.num_tool_calls, turn.calls_told = bool(calls.problem), len(calls.calls), calls.told
        return turn, calls

    @property
    def _tool_role(self) -> str:
        """Role of what the policy is told of a call that cannot be read."""
        roles = roles_of(self._environment.spec)
        return "tool" if "tool" in roles else roles[0]

    def _spent(self, num_turns: int, num_malformed: int) -> str:
        """The budget that leaves no turn after the `num_turns` there were, whatever its prompt; empty while there is
        none.
        """
        if num_malformed >= self._settings.max_malformed:
            return "malformed"
        return "turns" if num_turns >= self._settings.max_turns else ""

    def _spent_on_images(self, num_bytes: int, tree: Tree, begun: _Begun) -> str:
        """The budget that keeps an episode from being shown another image, with which it has `num_bytes` of the
        environment's; empty while there is none. Behind a placeholder that the policy sampled nobody could tell which
        one stands for the image. No image is opened that nobody has the time to be shown.
        """
        if num_bytes > self._settings.max_image_bytes or tree.is_hidden_behind():
            return "images"
        return "time" if time.monotonic() >= begun.ends_at else ""


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
    settings: RunSettings, replica: Replica, tokenizer: ChatTokenizer, tool_calls: ToolCalls | None
) -> SingleTurns | Episodes:
    """The sampler of the run's groups. `tool_calls`: None where the run names no parser of them."""
    section = settings.environment
    if section is None:
        return SingleTurns(replica)
    episodes = EpisodeSettings(
        run=settings.run.name,
        responses_per_group=settings.responses_per_group,
        max_prompt_tokens=settings.data.max_prompt_tokens,
        max_turns=section.max_turns,
        max_image_bytes=settings.max_environment_image_bytes,
        max_row_tokens=settings.max_row_tokens,
        max_malformed=section.max_malformed,
        max_attempts=section.max_attempts,
        budget_s=section.budget_share * settings.rollout.generation_timeout_s,
    )
    endpoint = Endpoint(section.endpoint_bind, settings.rpc, host=settings.rollout.advertise_host, peer=section.address)
    environment = open_environment(section, settings.rpc)
    visual_tokens = PromptEncoder.of(settings, tokenizer).visual_tokens
    prompts = PromptThread(tokenizer, replica.info.max_model_tokens, visual_tokens)
    return Episodes(
        episodes,
        replica,
        environment,
        tokenizer,
        tool_calls,
        endpoint,
        prompts,
        Observations(prompts.tokenizer, section.max_observation_tokens, section.observation_cut),
        partial(run_problem, settings),
    )


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


def _spoken(messages: Iterable[trajectory_pb2.Message]) -> tuple[ChatMessage, ...]:
    """Messages as chat templates are given them."""
    return tuple({"role": message.role, "content": message.content} for message in messages)
