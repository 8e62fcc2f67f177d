"""The controller behind its service: builds the parts, holds the lock on the run, runs the loop and answers for it.

Owns the order of the start: store, lock, roles, loop; and what an end means: DONE, or FAILED with the first error. Knows no gRPC server.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc.aio

from rolecall.errors import DeadlineError, FencedError, RoleCallError, StoreUnavailableError, UnavailableError
from rolecall.rpc.channel import open_channel
from rolecall.scoring import open_client
from rolecall.settings import RunSettings
from rolecall.store.connection import connect
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.tokenizer import ChatTokenizer
from rolecall.v1 import controller_pb2, reference_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.v1.critic_pb2_grpc import CriticServiceStub
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.board import RunBoard
from services.controller.checkpoints import Checkpoints
from services.controller.config import admission_policy
from services.controller.evaluation import Evaluation, load_sets
from services.controller.fleet import Fleet
from services.controller.loop import Loop, Parts
from services.controller.prompts import PromptRenderer, PromptSequence, load_prompts
from services.controller.publish import PolicyPublisher
from services.controller.recovery import Recovery
from services.controller.scoring import GroupScorer
from services.controller.tasks import first_error
from services.controller.threads import StoreThreads
from services.controller.trackers import Trackers
from services.controller.trainers import CriticTrainer, Trainer

logger = logging.getLogger(__name__)

ROLE_POLL_S = 0.25
"""Pause between two looks at a role that is not up yet."""


class ControllerEngine:
    """One run. `run` drives it; the other methods are called by the servicer while it runs."""

    def __init__(self, settings: RunSettings) -> None:
        """Reads the data and connects to the store; ConfigError and StoreUnavailableError come from here."""
        self._settings = settings
        policy = admission_policy(settings)
        self._threads = StoreThreads()
        self._connection = connect(settings.store)
        self._ledger = Ledger(self._connection, settings.run.name)
        self._board = RunBoard()
        self._fleet = Fleet(settings, self._ledger, self._threads)
        self._channels: list[grpc.aio.Channel] = []
        tokenizer = ChatTokenizer(settings.model.path)
        renderer = PromptRenderer(tokenizer, settings.data.max_prompt_tokens)
        reward, channel = open_client(settings.reward, _address("reward", settings.reward.address), settings.rpc)
        self._channels.append(channel)
        self._references = {
            name: ReferenceServiceStub(self._open(f"references.{name}", section.address, "rolecall.v1.ReferenceService/ComputeLogprobs"))
            for name, section in settings.references.items()
        }
        actor = ActorServiceStub(self._open("actor", settings.actor.address, "rolecall.v1.ActorService/ComputeLogprobs"))
        rows = Rows(self._connection, settings.run.name, settings.store.num_shards)
        raw_prompts = load_prompts(settings.data.train, settings.data)
        critic = None
        if settings.critic is not None:
            stub = CriticServiceStub(self._open("critic", settings.critic.address, "rolecall.v1.CriticService/ComputeValues"))
            critic = CriticTrainer("critic", stub, settings.critic)
        self._reward = reward
        trainers = [Trainer("actor", actor, settings.actor), *([critic] if critic else [])]
        checkpoints = Checkpoints(settings.run.dir / "checkpoints", settings.run.keep_checkpoints)
        self._parts = Parts(
            settings=settings,
            ledger=self._ledger,
            rows=rows,
            threads=self._threads,
            fleet=self._fleet,
            publisher=PolicyPublisher(settings, self._ledger, self._threads, self._fleet, actor, tokenizer.vocab_size),
            actor=trainers[0],
            critic=critic,
            scorer=GroupScorer(settings, rows, self._threads, reward, self._references),
            evaluation=Evaluation(settings, self._fleet, reward, load_sets(settings, renderer)),
            prompts=PromptSequence(raw_prompts, renderer, seed=settings.run.seed, shuffle=settings.data.shuffle),
            policy=policy,
            trackers=Trackers(settings),
            checkpoints=checkpoints,
            recovery=Recovery(settings, self._ledger, rows, self._threads, trainers, checkpoints, self._board.wait_for),
            board=self._board,
        )

    def _open(self, section: str, address: str | None, *idempotent: str) -> grpc.aio.Channel:
        channel = open_channel(_address(section, address), self._settings.rpc, idempotent=idempotent)
        self._channels.append(channel)
        return channel

    # --- the run ------------------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Locks the run, waits for the roles, runs the loop to its end. The error that ended the run is on the board, and raised."""
        try:
            ctl = await self._threads.call(self._ledger.lock, self._settings.controller.lease_s)
            self._parts.publisher.ctl = self._parts.scorer.ctl = ctl
            try:
                await self._run_locked(ctl)
            finally:
                with contextlib.suppress(FencedError, StoreUnavailableError):  # nobody's run to give back, or nobody to give it to
                    await self._threads.call(self._ledger.unlock)
            self._board.move(controller_pb2.RUN_STATE_DONE)
        except Exception as error:
            self._board.fail(error.message if isinstance(error, RoleCallError) else f"{type(error).__name__}: {error}")
            raise

    async def _run_locked(self, ctl: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._beat()), tasks.create_task(self._fleet.watch())]
                await self._wait_for_roles()
                await Loop(self._parts, ctl).run()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _wait_for_roles(self) -> None:
        """Returns when every role answers. DeadlineError names those that did not within controller.start_timeout_s."""
        missing = {"reward", *self._references, *(trainer.name for trainer in self._parts.trainers)}
        timeout_s = self._settings.controller.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while missing:
                    self._board.wait_for(", ".join(sorted(missing)))
                    for name in sorted(missing):
                        if await self._answers(name):
                            missing.discard(name)
                    await asyncio.sleep(ROLE_POLL_S if missing else 0)
                self._board.wait_for("the rollouts")
                await self._fleet.wait_for_rollouts(max(1, self._settings.rollout.num_replicas), timeout_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"{', '.join(sorted(missing)) or 'the rollouts'} did not come up within controller.start_timeout_s = {timeout_s:.0f} s"
            ) from error

    async def _answers(self, name: str) -> bool:
        try:
            if name == "reward":
                await self._reward.describe()
            elif name in self._references:
                await self._references[name].GetInfo(reference_pb2.GetReferenceInfoRequest())
            else:
                await next(trainer for trainer in self._parts.trainers if trainer.name == name).info()
        except (UnavailableError, DeadlineError):
            return False
        return True

    async def _beat(self) -> None:
        """The controller's own heartbeat in the store: runs until cancelled. FencedError when another controller took the run."""
        while True:
            await self._threads.call(self._ledger.beat)
            await asyncio.sleep(self._settings.controller.lease_s / 5)

    async def close(self) -> None:
        """Lets go of everything."""
        self._parts.trackers.close()
        await self._fleet.close()
        for channel in self._channels:
            await channel.close()
        self._threads.close()
        self._connection.close()

    # --- what the servicer asks -----------------------------------------------------------------------------------------------------------------------

    def join(self, request: controller_pb2.JoinRequest) -> controller_pb2.JoinResponse:
        """Takes a worker into the fleet."""
        self._fleet.join(request)
        controller = self._settings.controller
        return controller_pb2.JoinResponse(ctl=self._ledger.ctl, heartbeat_s=controller.heartbeat_s, lease_s=controller.lease_s)

    def heartbeat(self, request: controller_pb2.HeartbeatRequest) -> controller_pb2.HeartbeatResponse:
        """Notes a worker's sign of life."""
        self._fleet.heartbeat(request)
        return controller_pb2.HeartbeatResponse(ctl=self._ledger.ctl)

    async def status(self) -> controller_pb2.RunStatus:
        """The run as it stands."""
        board = self._board
        state = controller_pb2.RUN_STATE_PAUSED if board.paused and board.state == controller_pb2.RUN_STATE_RUNNING else board.state
        if board.stop_requested and state == controller_pb2.RUN_STATE_RUNNING:
            state = controller_pb2.RUN_STATE_STOPPING
        return controller_pb2.RunStatus(
            run=self._settings.run.name,
            state=state,
            step=board.step,
            total_steps=self._settings.run.num_steps,
            published_step=self._parts.publisher.published_step,
            policy_version=self._parts.publisher.policy_version,
            ledger=await self._threads.call(self._ledger.counts) if self._ledger.ctl else None,
            workers=self._fleet.statuses(),
            metrics=[*board.step_metrics.to_proto(), *board.evaluation_metrics.to_proto()],
            error=board.error,
            waiting_for=board.waiting_for,
        )

    async def watch(self) -> AsyncIterator[controller_pb2.RunStatus]:
        """The run now and after every change, until it ends."""
        async for _ in self._board.changes():
            yield await self.status()

    def pause(self) -> None:
        """Admit nothing more."""
        self._board.pause()

    def resume(self) -> None:
        """Admit again."""
        self._board.resume()

    def stop(self, *, checkpoint: bool) -> None:
        """End after the step in progress."""
        self._board.stop(checkpoint=checkpoint)

    async def save_checkpoint(self) -> tuple[str, int]:
        """(path, step) of a checkpoint made at the next step boundary. The caller's deadline bounds the wait."""
        return await asyncio.shield(self._board.request_checkpoint().saved)


def _address(section: str, address: str | None) -> str:
    if address is None:
        raise UnavailableError(f"{section}.address is not set: `rolecall train` sets it for roles it starts, else give it in the configuration")
    return address
