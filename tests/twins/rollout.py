"""A rollout around any engine: the real replica, gate, pull loop, servicer and server, put together as
services/rollout/__main__.py does.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.rpc.fence import Fence
from rolecall.rpc.server import Server
from rolecall.settings import RunSettings
from rolecall.shifts import Post
from rolecall.store.connection import Connection
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_ctl
from rolecall.v1 import rollout_pb2_grpc
from services.rollout.config import keep_timeout_s
from services.rollout.episodes import sampler_of
from services.rollout.groups import MixedGroups
from services.rollout.pull import PullLoop, PullSettings
from services.rollout.replica import Replica
from services.rollout.sampling import RolloutEngine
from services.rollout.service import SERVICE_NAME, RolloutServicer
from services.rollout.vllm.profiles import EngineProfiles

WAIT_S = 0.1
"""Longest wait for prompts. A thread that waits for them cannot be cancelled, and the end of a test waits for it."""


class BriefQueue(PromptQueue):
    """A rollout's prompts, which are looked for more often than by a process that nobody waits for."""

    def wait(self, timeout_s: float) -> bool:
        return super().wait(min(timeout_s, WAIT_S))


class RolloutTwin:
    """The parts of one rollout, which serves and pulls from `start` to `close`."""

    def __init__(
        self,
        engine: RolloutEngine,
        settings: PullSettings,
        queue: PromptQueue,
        rows: Rows,
        tokenizer: ChatTokenizer,
        server: Server,
        *,
        replica: type[Replica] = Replica,
        fence: Fence,
        sampler: Callable[[Replica], MixedGroups] = MixedGroups,
        pause_timeout_s: float = 5.0,
        load_timeout_s: float = 5.0,
        keep_timeout_s: float = 5.0,
        post: Post | None = None,
    ) -> None:
        self.server = server
        self.on_turn: Callable[[str], None] = lambda phase: None
        """Told the phase of every turn of the pull loop."""
        self.replica = replica(
            engine,
            pause_timeout_s=pause_timeout_s,
            load_timeout_s=load_timeout_s,
            keep_timeout_s=keep_timeout_s,
            on_serving=server.set_serving,
            post=post,
        )
        self.sampler = sampler(self.replica)
        self.pull = PullLoop(
            settings, self.replica, self.sampler, queue, rows, tokenizer, lambda phase: self.on_turn(phase)
        )
        self.profiles = EngineProfiles(engine, self.replica.held, Path("profiles"), settings.consumer)
        servicer = RolloutServicer(
            self.replica,
            self.pull,
            self.sampler,
            tokenizer,
            fence,
            self.profiles,
            consumer=settings.consumer,
            max_groups=settings.max_groups,
            generation_timeout_s=settings.generation_timeout_s,
        )
        server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, SERVICE_NAME)

    @classmethod
    def of_run(
        cls,
        settings: RunSettings,
        consumer: str,
        engine: RolloutEngine,
        tokenizer: ChatTokenizer,
        connection: Connection,
        bind: str = "127.0.0.1:0",
        fence: Fence | None = None,
        post: Post | None = None,
    ) -> Self:
        """Makes the rollout `consumer` ("<worker>.<incarnation>") with the deadlines and sizes of `settings`."""
        pull = PullSettings(
            consumer,
            settings.rollout.max_groups or 1,
            settings.controller.lease_s,
            settings.rollout.generation_timeout_s,
            settings.store.row_expiry_s,
            settings.controller.max_deliveries,
            shows_images=settings.shows_images,
        )
        return cls(
            engine,
            pull,
            BriefQueue(connection, settings.run.name, consumer),
            Rows(connection, settings.run.name, settings.store.num_shards),
            tokenizer,
            Server(settings.rpc, bind),
            fence=fence or Fence(lambda: read_ctl(connection, settings.run.name)),
            sampler=lambda replica: sampler_of(settings, replica, tokenizer),
            pause_timeout_s=settings.rollout.generation_timeout_s,
            load_timeout_s=settings.weights.publish_timeout_s,
            keep_timeout_s=keep_timeout_s(settings.weights),
            post=post,
        )

    async def start(self) -> str:
        """Serves and pulls; returns the address."""
        address = await self.server.start()
        self.pulling = asyncio.create_task(self.pull.run())
        return address

    async def close(self, grace_s: float = 0.1) -> None:
        """Ends at once what it does and gives nothing back."""
        self.pulling.cancel()
        await asyncio.gather(self.pulling, return_exceptions=True)
        await self.sampler.close()
        await self.server.drain(grace_s)


class NumberTokenizer(ChatTokenizer):
    """A tokenizer that decodes to the numbers themselves. It reads no file, so a rollout starts a second sooner."""

    def __init__(self) -> None:
        self.digest = "numbers"

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


async def first_failure(*parts: "asyncio.Future[None]") -> None:
    """Raises what the first failing part raised; a pull loop that was drained ends well and ends nothing."""
    await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
    for part in parts:
        if part.done():
            part.result()
