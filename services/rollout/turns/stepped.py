"""Episodes that the rollout steps: the first prompt, then the policy's turns and what the environment answers to them.

Owns the order of the two, and the budgets of an episode. Tokens are tree.py's, calls of tools tool_calls.py's, and what
becomes of a failure is said by whoever begins an episode (episodes.py).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rolecall.data.continuation import ChatMessage
from rolecall.data.images.files import parts
from rolecall.data.images.tokens import run_lengths
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.answers import CONTINUES, roles_of
from rolecall.environment.client import EnvironmentClient, EpisodeSession
from rolecall.errors import InvalidInputError, PromptTooLongError
from rolecall.v1 import environment_pb2, trajectory_pb2
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.trajectories import prompt_token_ids
from services.rollout.turns.observations import Observations
from services.rollout.turns.prompts import PromptThread
from services.rollout.turns.shown import ShownImage, chat_message, files_of, opened, showing
from services.rollout.turns.tool_calls import Heard, SessionCalls, ToolCalls, ToolSchema, tool_schemas
from services.rollout.turns.tree import Tree, Turn, TurnPrompt


@dataclass(frozen=True)
class TurnLimits:
    """The part of the run's settings that turns need."""

    max_prompt_tokens: int
    """Longest first prompt: the row's messages and what the environment says first."""
    max_turns: int
    max_row_tokens: int
    """Most tokens of an episode's segments together."""
    max_image_bytes: int
    """Most bytes of the images that the environment shows in an episode; 0: it shows none."""
    max_malformed: int
    """Turns in a row whose calls of tools cannot be read, with which an episode ends."""


@dataclass(frozen=True)
class FirstTurn:
    """The beginning of an episode that the rollout steps."""

    prompt: TurnPrompt
    """What its first turn is sampled from."""
    tools: Sequence[ToolSchema]
    """The tools that the first prompt shows."""
    calls: SessionCalls | None
    """Reads its calls of tools; None: it has no tools, or the run no parser."""


class SteppedEpisodes:
    """The episodes that one rollout steps. Used from one event loop."""

    def __init__(
        self,
        limits: TurnLimits,
        replica: Replica,
        environment: EnvironmentClient,
        tokenizer: ChatTokenizer,
        tool_calls: ToolCalls | None,
        prompts: PromptThread,
        observations: Observations,
        open_images: asyncio.Semaphore,
    ) -> None:
        """`open_images`: held while images are open."""
        self._limits = limits
        self._replica = replica
        self._environment = environment
        self._tokenizer = tokenizer
        self._tool_calls = tool_calls
        self._prompts = prompts
        self._observations = observations
        self._open_images = open_images
        self.visual_tokens = prompts.visual_tokens if limits.max_image_bytes else None
        """The tokens of images that the environment may show; None: it may show none."""

    async def first(
        self,
        name: str,
        prompt: trajectory_pb2.Prompt,
        request: SampleRequest,
        opening: environment_pb2.ResetResponse,
        files: Sequence[bytes],
    ) -> FirstTurn:
        """The beginning of the episode `name`: the row's messages and what the environment said, with the images in
        `files`, rendered once. PromptTooLongError when that leaves no room for a response or is longer than
        max_prompt_tokens, InvalidInputError when it cannot be rendered, is empty or shows too many bytes of images,
        EpisodeLostError when the environment's images or tools cannot be shown.
        """
        own = _spoken(prompt.messages)
        if request.images:
            own = tuple({**message, "content": parts(message["content"])} for message in own)
        if sum(map(len, files)) > self._limits.max_image_bytes:
            raise InvalidInputError(
                f"the first messages of episode {name} show images of more than environments.*.max_image_bytes "
                f"{self._limits.max_image_bytes}; raise it, or have the environment show less"
            )
        images = (*self._own_images(prompt, request), *await self._opened(files))
        messages = (*own, *map(chat_message, opening.messages))
        tools = tool_schemas(opening.tools)
        calls = self._tool_calls.of_session(tools) if self._tool_calls is not None and tools else None
        image_tokens = [image.num_tokens for image in images]
        rendered = partial(self._prompts.continuation.opening, messages, tools, len(own), image_tokens)
        try:
            with showing(messages[len(own) :]):
                ids = await self._prompts.run(rendered)
        except PromptTooLongError as error:
            raise PromptTooLongError(f"the first prompt of episode {name}: {error.message}") from error
        if len(ids) > self._limits.max_prompt_tokens:
            raise PromptTooLongError(
                f"the first prompt of episode {name} has {len(ids)} tokens, data.max_prompt_tokens is "
                f"{self._limits.max_prompt_tokens}; raise it, or have the environment say less"
            )
        self._replica.require_room(ids, f"episode {name}")
        longest = min(len(ids) + request.sampling.max_tokens, self._replica.info.max_model_tokens)
        return FirstTurn(TurnPrompt(None, messages, ids, longest, "first", images), tools, calls)

    def _own_images(self, prompt: trajectory_pb2.Prompt, request: SampleRequest) -> Iterable[ShownImage]:
        """The images that the row shows."""
        tokens, files = self._prompts.visual_tokens, request.images
        if not files or tokens is None:
            return ()
        # a prompt that was in flight at a checkpoint may have the tokens of the environment's images, too
        lengths = run_lengths(prompt_token_ids(prompt), tokens.token_id)[: len(files)]
        return map(ShownImage, files, lengths)

    async def _opened(self, files: Sequence[bytes]) -> tuple[ShownImage, ...]:
        """The images in `files` of the environment. EpisodeLostError when one cannot be shown."""
        if not files or self.visual_tokens is None:
            return ()
        async with self._open_images:  # bounded: by generation_timeout_s of whoever asks, as what is inside
            return await asyncio.to_thread(opened, files, self.visual_tokens)

    async def play(
        self,
        request: SampleRequest,
        said: Sequence[trajectory_pb2.Message],
        session: EpisodeSession,
        first: FirstTurn,
        *,
        began_at: float,
        ends_at: float,
    ) -> tuple[SampleRequest, Response]:
        """The episode of a session that is open, about a row that begins with the messages `said`: turns until it is
        over or a budget is spent; from `ends_at` on, a monotonic time, there is none. Errors as EpisodeSession.step and
        Replica.sample.
        """
        own = len(said)
        tree = Tree(request, self._prompts.continuation, self._limits.max_row_tokens, own)
        prompt, shown, num_malformed = first.prompt, first.prompt.messages, 0

        def ended(ended_by: str, reward: trajectory_pb2.EpisodeReward | None) -> tuple[SampleRequest, Response]:
            return tree.ended(
                ended_by,
                reward,
                turn_rewards=self._environment.spec.turn_rewards,
                row_messages=said,
                generation_s=time.monotonic() - began_at,
            )

        while True:
            turn, calls = await self._turn(tree, prompt, first)
            files: Sequence[bytes] = ()
            if calls.problem:
                num_malformed += 1
                heard: Sequence[ChatMessage] = [{"role": self._tool_role, "content": calls.problem}]
            else:
                num_malformed = 0
                answer = await session.step(turn.text, is_cut=turn.is_cut, tool_calls=calls.calls)
                files = files_of(answer.messages, self.visual_tokens)
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
                num_bytes = sum(len(image.file) for image in prompt.images[len(request.images) :])
                spent = self._spent_on_images(num_bytes + sum(map(len, files)), tree, ends_at)
            if not spent:
                after = partial(tree.after, turn, (*prompt.messages, told, *heard), first.tools, shown)
                following = await self._following(after, files, shown[own:])
                if following is None:
                    spent = "tokens"
                else:
                    prompt = following
            if not spent and time.monotonic() >= ends_at:
                spent = "time"
            if spent:
                return ended(spent, await session.grade())

    async def _following(
        self,
        after: Callable[[tuple[ShownImage, ...]], TurnPrompt],
        files: Sequence[bytes],
        shown: Sequence[ChatMessage],
    ) -> TurnPrompt | None:
        """The prompt that is `after` a turn, with the images in `files`; None: there is no room for another one."""
        images = await self._opened(files)
        try:
            with showing(shown):
                prompt = await self._prompts.run(partial(after, images))
        except PromptTooLongError:
            return None
        return prompt if prompt.room >= 1 else None

    async def _turn(self, tree: Tree, prompt: TurnPrompt, first: FirstTurn) -> tuple[Turn, Heard]:
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
        if num_malformed >= self._limits.max_malformed:
            return "malformed"
        return "turns" if num_turns >= self._limits.max_turns else ""

    def _spent_on_images(self, num_bytes: int, tree: Tree, ends_at: float) -> str:
        """The budget that keeps an episode from being shown another image, with which it has `num_bytes` of the
        environment's; empty while there is none. Behind a placeholder that the policy sampled nobody could tell which
        one stands for the image. No image is opened that nobody has the time to be shown.
        """
        if num_bytes > self._limits.max_image_bytes or tree.is_hidden_behind():
            return "images"
        return "time" if time.monotonic() >= ends_at else ""


def _spoken(messages: Iterable[trajectory_pb2.Message]) -> tuple[ChatMessage, ...]:
    """Messages as chat templates are given them."""
    return tuple({"role": message.role, "content": message.content} for message in messages)
