"""The controller behind its service: builds the parts, holds the lock on the run, runs the loop and answers for it.

Owns the order of the start: store, lock, roles, loop; and what an end means: DONE, or FAILED with the first error.
Knows no gRPC server.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc.aio

from rolecall.algorithms.advantages.custom import load as load_advantage
from rolecall.checkpoint.storage import open_storage
from rolecall.data.dataset import load_prompts
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import BudgetSpentError, FencedError, RoleCallError, StoreUnavailableError, UnavailableError
from rolecall.identity import settle
from rolecall.rpc.channel import open_channel
from rolecall.scoring.client import open_client
from rolecall.settings import CustomAdvantage, RunSettings
from rolecall.store.connection import connect
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.trackers import Trackers
from rolecall.v1 import controller_pb2, reference_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.v1.critic_pb2_grpc import CriticServiceStub
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.board import RunBoard
from services.controller.config import admission_policy
from services.controller.durable.recovery import Recovery
from services.controller.durable.run_point import Checkpoints
from services.controller.evaluation import Evaluation, load_sets
from services.controller.fleet.members import Fleet
from services.controller.groups.failures import RecoveryBudget, starts_over
from services.controller.groups.group_scorer import GroupScorer
from services.controller.groups.prompts import PromptRenderer, PromptSequence
from services.controller.loop import Loop
from services.controller.parts import Parts
from services.controller.publish.probe import make_probe
from services.controller.publish.publisher import PolicyPublisher
from services.controller.step.trainers import ActorTrainer, CriticTrainer
from services.controller.tasks import first_error
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

ROLE_POLL_S = 0.25
"""Pause between two looks at a role that is not up yet."""


class ControllerEngine:
    """One run. `run` drives it; the other methods are called by the servicer while it runs."""

    def __init__(self, settings: RunSettings) -> None:
        """Reads the data and the user's estimator and connects to the store; ConfigError and StoreUnavailableError come
        from here.
        """
        self._settings = settings
        settle(settings)
        raw_prompts = load_prompts(settings.data.train, settings.data, settings.reward, settings.algorithm.distillation)
        prompt_bytes = max(prompt.num_bytes for prompt in raw_prompts)
        policy = admission_policy(settings, prompt_bytes)
        if isinstance(settings.algorithm.advantage, CustomAdvantage):
            # what is wrong with it is said now, not when the first batch is sampled
            load_advantage(settings.algorithm.advantage)
        self._threads = StoreThreads()
        self._connection = connect(settings.store)
        self._ledger = Ledger(self._connection, settings.run.name)
        self._board = RunBoard()
        self._fleet = Fleet(settings, self._ledger, self._threads)
        self._channels: list[grpc.aio.Channel] = []
        self._unanswered: dict[str, str] = {}
        """Last error by role that is waited for."""
        tokenizer = ChatTokenizer(settings.model.path)
        renderer = PromptRenderer(tokenizer, settings.data.max_prompt_tokens)
        reward, channel = open_client(settings.reward, _address("reward", settings.reward.address), settings.rpc)
        self._channels.append(channel)
        self._references = {
            name: ReferenceServiceStub(
                self._open(f"references.{name}", section.address, "rolecall.v1.ReferenceService/ComputeLogprobs")
            )
            for name, section in settings.references.items()
        }
        actor = ActorServiceStub(
            self._open("actor", settings.actor.address, "rolecall.v1.ActorService/ComputeLogprobs")
        )
        rows = Rows(self._connection, settings.run.name, settings.store.num_shards)
        critic = None
        if settings.critic is not None:
            stub = CriticServiceStub(
                self._open("critic", settings.critic.address, "rolecall.v1.CriticService/ComputeValues")
            )
            critic = CriticTrainer("critic", stub, settings.actor)
        in_order = PromptSequence(raw_prompts, renderer, seed=settings.run.seed, shuffle=True)
        probe = make_probe(settings, in_order)
        self._reward = reward
        actor_trainer = ActorTrainer("actor", actor, settings.actor)
        trainers = [actor_trainer, *([critic] if critic else [])]
        checkpoints = Checkpoints(open_storage(settings.run.checkpoints), settings.run.keep_checkpoints)
        self._parts = Parts(
            settings=settings,
            ledger=self._ledger,
            rows=rows,
            threads=self._threads,
            fleet=self._fleet,
            publisher=PolicyPublisher(settings, self._ledger, self._threads, self._fleet, actor, probe),
            actor=actor_trainer,
            critic=critic,
            scorer=GroupScorer(settings, rows, self._threads, reward, self._references),
            evaluation=Evaluation(settings, self._fleet, reward, load_sets(settings, renderer)),
            prompts=PromptSequence(
                raw_prompts,
                renderer,
                seed=settings.run.seed,
                shuffle=settings.data.shuffle,
                curriculum=settings.algorithm.curriculum,
            ),
            policy=policy,
            trackers=Trackers(settings),
            checkpoints=checkpoints,
            recovery=Recovery(
                settings, self._ledger, rows, self._threads, trainers, checkpoints, prompt_bytes, self._board.wait_for
            ),
            board=self._board,
        )

    def _open(self, section: str, address: str | None, *idempotent: str) -> grpc.aio.Channel:
        channel = open_channel(_address(section, address), self._settings.rpc, idempotent=idempotent)
        self._channels.append(channel)
        return channel

    # --- the run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Locks the run, waits for the roles, runs the loop to its end. The error that ended the run is on the board,
        and raised.
        """
        try:
            latest = await self._threads.call(self._parts.checkpoints.latest)
            ctl = await self._threads.call(
                self._ledger.lock, self._settings.controller.lease_s, latest[1].ctl if latest else 0
            )
            self._parts.publisher.ctl = self._parts.scorer.ctl = ctl
            try:
                await self._run_locked(ctl)
            finally:
                # nobody's run to give back, or nobody to give it to
                with contextlib.suppress(FencedError, StoreUnavailableError):
                    await self._threads.call(self._ledger.unlock)
            self._board.move(controller_pb2.RUN_STATE_DONE)
        except Exception as error:
            self._board.fail(error.message if isinstance(error, RoleCallError) else f"{type(error).__name__}: {error}")
            raise

    async def _run_locked(self, ctl: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._beat()), tasks.create_task(self._fleet.watch())]
                await self._run_to_its_end(ctl)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _run_to_its_end(self, ctl: int) -> None:
        """Runs the loop, and starts it over from the store as often as failures.py allows."""
        budget = RecoveryBudget(self._settings.controller)
        while True:
            try:
                if await self._wait_for_roles():
                    budget.recovered()
                    await Loop(self._parts, ctl).run()
                return
            except RoleCallError as error:
                if not starts_over(error):
                    raise
                budget.spend(error, self._board.step, self._board.newest_landed, paused=self._board.paused)
                logger.warning("starting over from the store after step %d: %s", self._board.step, error.message)
                self._board.start_over(error.message)
            await self._threads.settle()

    async def _wait_for_roles(self) -> bool:
        """True when the store and every role answer, false when a stop is asked for meanwhile. BudgetSpentError names
        those that did not in time.
        """
        controller, recovering = self._settings.controller, self._board.num_recoveries > 0
        name, timeout_s = (
            ("stall_timeout_s", controller.stall_timeout_s)
            if recovering
            else ("start_timeout_s", controller.start_timeout_s)
        )
        missing = {
            "store",
            "reward",
            "rollouts",
            *self._references,
            *(trainer.name for trainer in self._parts.trainers),
        }
        self._unanswered.clear()
        try:
            async with asyncio.timeout(timeout_s):
                while missing:
                    self._board.wait_for(", ".join(sorted(missing)))
                    if self._board.stop_requested:
                        return False
                    missing = {role for role in missing if not await self._answers(role)}
                    await asyncio.sleep(ROLE_POLL_S if missing else 0)
        except TimeoutError as error:
            why = "".join(f"; {role}: {self._unanswered[role]}" for role in sorted(missing & self._unanswered.keys()))
            raise BudgetSpentError(
                f"{', '.join(sorted(missing))} did not come up within controller.{name} = {timeout_s:.0f} s; see "
                f"their logs{why}"
            ) from error
        return True

    async def _enough_rollouts(self) -> bool:
        """A run starts with all its local replicas; one that goes on does so with the first, and the others join at a
        step boundary.
        """
        number = len(self._fleet.rollouts())
        return number >= max(1, self._settings.rollout.num_replicas) or (
            number > 0 and (await self._threads.call(self._ledger.position)).published_step >= 0
        )

    async def _answers(self, name: str) -> bool:
        if self._fleet.is_lost(name):
            return False
        try:
            if name == "store":
                await self._threads.call(self._ledger.position)
            elif name == "rollouts":
                return await self._enough_rollouts()
            elif name == "reward":
                await self._reward.describe()
            elif name in self._references:
                await self._references[name].GetInfo(reference_pb2.GetReferenceInfoRequest())
            else:
                await next(trainer for trainer in self._parts.trainers if trainer.name == name).info()
        except RoleCallError as error:
            if not error.retryable:
                raise
            self._unanswered[name] = error.message
            return False
        return True

    async def _beat(self) -> None:
        """The controller's own heartbeat in the store, outages of which it outlives: runs until cancelled. FencedError
        when another controller took the run.
        """
        while True:
            try:
                await self._threads.call(self._ledger.beat)
            except StoreUnavailableError as error:
                logger.warning("the store does not hear this controller: %s", error.message)
            await asyncio.sleep(self._settings.controller.lease_s / 5)

    async def close(self) -> None:
        """Lets go of everything."""
        await asyncio.to_thread(self._parts.trackers.flush)
        await self._fleet.close()
        for channel in self._channels:
            await channel.close()
        self._threads.close()
        self._connection.close()

    # --- what the servicer asks -------------------------------------------------------------------

    def join(self, request: controller_pb2.JoinRequest) -> controller_pb2.JoinResponse:
        """Takes a worker into the fleet."""
        self._fleet.join(request)
        controller = self._settings.controller
        return controller_pb2.JoinResponse(
            ctl=self._ledger.ctl, heartbeat_s=controller.heartbeat_s, lease_s=controller.lease_s
        )

    def heartbeat(self, request: controller_pb2.HeartbeatRequest) -> controller_pb2.HeartbeatResponse:
        """Notes a worker's sign of life."""
        self._fleet.heartbeat(request)
        return controller_pb2.HeartbeatResponse(ctl=self._ledger.ctl)

    async def status(self) -> controller_pb2.RunStatus:
        """The run as it stands."""
        board = self._board
        state = (
            controller_pb2.RUN_STATE_PAUSED
            if board.paused and board.state == controller_pb2.RUN_STATE_RUNNING
            else board.state
        )
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
            num_recoveries=board.num_recoveries,
            last_failure=board.last_failure,
            last_drop=board.last_drop,
            trouble=self._reward.trouble,
        )

    async def watch(self) -> AsyncIterator[controller_pb2.RunStatus]:
        """The run now and after every change, until it ends."""
        async for _ in self._board.changes():
            yield await self.status()

    async def pause(self) -> None:
        """Admit nothing more, also after this controller was replaced."""
        self._board.pause()
        await self._remember_pause()

    async def resume(self) -> None:
        """Admit again."""
        self._board.resume()
        await self._remember_pause()

    async def _remember_pause(self) -> None:
        if self._ledger.ctl:  # before that the ledger's word is taken at the start
            await self._threads.call(self._ledger.pause, self._board.paused)

    def stop(self, *, checkpoint: bool) -> None:
        """End after the step in progress."""
        self._board.stop(checkpoint=checkpoint)

    async def save_checkpoint(self) -> tuple[str, int]:
        """(path, step) of a checkpoint made at the next step boundary. The caller's deadline bounds the wait."""
        saved = self._board.request_checkpoint()
        return await asyncio.shield(saved)  # bounded: by the caller's deadline


def _address(section: str, address: str | None) -> str:
    if address is None:
        raise UnavailableError(
            f"{section}.address is not set: `rolecall train` sets it for roles it starts, else give it in the "
            "configuration"
        )
    return address
