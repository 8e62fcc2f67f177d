"""Episodes that the environment's own agent runs: a key, RunEpisode, and what the agent's calls came to.

Owns the order of the end: the key is sealed first, whatever ended the episode, and only then is the row made. Which
failure is whose: what the engine fails in ends the episode as any sampling would, what the agent fails in is the
environment's.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.client import EpisodeSession
from rolecall.v1 import environment_pb2, trajectory_pb2
from services.rollout.harness.attempt import Attempt, Limits
from services.rollout.harness.calls import MODEL
from services.rollout.harness.endpoint import Endpoint
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.turns.prompts import PromptThread
from services.rollout.turns.tool_calls import ToolCalls

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunLimits:
    """The part of the run's settings that runs need."""

    max_prompt_tokens: int
    max_calls: int
    max_row_tokens: int
    max_image_bytes: int


class AgentRuns:
    """The runs of one rollout in one environment. Used from one event loop."""

    def __init__(
        self,
        limits: RunLimits,
        replica: Replica,
        tokenizer: ChatTokenizer,
        tool_calls: ToolCalls | None,
        endpoint: Endpoint,
        peer: str,
        prompts: PromptThread,
        open_images: asyncio.Semaphore,
    ) -> None:
        """`peer`: address of the environment, whose agents call the endpoint. `open_images`: held while images are
        open.
        """
        self._limits = limits
        self._replica = replica
        self._tokenizer = tokenizer
        self._tool_calls = tool_calls
        self._prompts = prompts
        self._open_images = open_images
        self._endpoint = endpoint
        self._peer = peer
        self._base_url = ""

    async def start(self) -> None:
        """Listens for the agents' calls, unless it does already. ConfigError when it cannot."""
        await self._endpoint.start()
        if not self._base_url:
            self._base_url = self._endpoint.base_url(self._peer)
            logger.info("agents of the environment at %s call the policy at %s", self._peer, self._base_url)

    async def play(
        self,
        first: SampleRequest,
        prompt: Sequence[trajectory_pb2.Message],
        session: EpisodeSession,
        *,
        began_at: float,
        ends_at: float,
    ) -> tuple[SampleRequest, Response]:
        """The episode of a session that is open; from `ends_at` on, a monotonic time, no call is taken. Errors as
        EpisodeSession.run and Replica.sample.
        """
        await self.start()
        own = self._limits
        limits = Limits(
            max_prompt_tokens=own.max_prompt_tokens,
            max_calls=own.max_calls,
            max_row_tokens=own.max_row_tokens,
            max_image_bytes=own.max_image_bytes,
            ends_at=ends_at,
        )
        attempt = Attempt(
            first, limits, self._replica, self._tokenizer, self._prompts, self._tool_calls, self._open_images
        )
        key, failed = self._endpoint.open(attempt)
        asked = environment_pb2.RunEpisodeRequest(
            base_url=self._base_url,
            api_key=key,
            model=MODEL,
            max_calls=limits.max_calls,
            max_tokens=first.sampling.max_tokens,
            deadline_s=max(0.001, ends_at - time.monotonic()),
        )
        running = asyncio.create_task(session.run(asked))
        try:
            ends: list[asyncio.Future[Any]] = [running, failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # bounded: by the run's own deadline
            if failed.done():
                raise failed.result()
            answer = running.result()
        finally:
            self._endpoint.seal(key)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)  # bounded: it is cancelled, and its waits end so
        over = "terminated" if answer.state == environment_pb2.EPISODE_STATE_TERMINATED else "truncated"
        reward = answer.reward if answer.HasField("reward") else None
        return attempt.ended(attempt.refused_by or over, reward, prompt, time.monotonic() - began_at)
