"""The run, as the algorithm reads: admit, score as groups land, assemble, advantages, seal, train actor and critic, commit, publish, evaluate, checkpoint.

Synchronous training is max_staleness = 0 of this loop. Four activities share one event loop: admission (intake.py), collection (each committed group is
scored as it lands), the return of abandoned groups (leases.py) and the steps themselves. Every decision is in the store before it is acted on, so a
controller that starts again goes on from there.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.algorithms.advantages import needs
from rolecall.errors import BudgetSpentError, DeadlineError, RowMissingError, ScorerError
from rolecall.settings import RunSettings
from rolecall.store.budget import batch_bytes
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics, attached, export, tracer
from rolecall.v1 import controller_pb2, training_pb2, trajectory_pb2
from services.controller import assembly, measures
from services.controller.admission import AdmissionPolicy
from services.controller.assembly import Assembly, ScoredGroup
from services.controller.board import RunBoard
from services.controller.checkpoints import Checkpoints, RunPoint
from services.controller.evaluation import Evaluation
from services.controller.fleet import Fleet
from services.controller.intake import Intake
from services.controller.leases import Leases
from services.controller.prompts import PromptSequence
from services.controller.publish import PolicyPublisher
from services.controller.recovery import Recovery
from services.controller.scoring import GroupScorer
from services.controller.tasks import first_error
from services.controller.threads import StoreThreads
from services.controller.trackers import Trackers
from services.controller.trainers import CriticTrainer, Trainer

logger = logging.getLogger(__name__)

READ_BLOCK_S = 1.0
"""Longest blocking read of the trajectories stream."""

READ_COUNT = 256
"""Most committed groups taken in one read."""


@dataclass(frozen=True)
class Parts:
    """What the loop coordinates."""

    settings: RunSettings
    ledger: Ledger
    rows: Rows
    threads: StoreThreads
    fleet: Fleet
    publisher: PolicyPublisher
    actor: Trainer
    critic: CriticTrainer | None
    scorer: GroupScorer
    evaluation: Evaluation
    prompts: PromptSequence
    policy: AdmissionPolicy
    trackers: Trackers
    checkpoints: Checkpoints
    recovery: Recovery
    board: RunBoard

    @property
    def trainers(self) -> list[Trainer]:
        """Actor, and critic when there is one."""
        return [self.actor, self.critic] if self.critic else [self.actor]


class Loop:
    """One run, from a recovered position to its last step."""

    def __init__(self, parts: Parts, ctl: int) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._ctl = ctl
        self._assembly = Assembly(parts.policy)
        self._intake = Intake(parts.settings, parts.ledger, parts.threads, parts.prompts, parts.policy, parts.publisher, parts.board, self._assembly)
        self._step = 0
        self._filtered_in_step = 0
        self._step_metrics = Metrics()
        self._clock = measures.Stopwatch()

    async def run(self) -> None:
        """Returns when the last step is done or a stop was asked for. Raises the error that ended the run."""
        await self._recover()
        await self._publish()
        if self._step == 0:
            await self._evaluate()
        self._parts.board.move(controller_pb2.RUN_STATE_RUNNING)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._intake.run()), tasks.create_task(self._collect(tasks)), tasks.create_task(self._reap())]
                await self._train()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        if self._step == self._settings.run.num_steps or self._parts.board.stop_with_checkpoint:
            await self._checkpoint(final=True)

    # --- where the last controller left off ---------------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Takes the ledger's position, and the trainers to it."""
        recovered = await self._parts.recovery.run(self._ctl)
        self._step = self._parts.board.step = recovered.position.step
        self._parts.publisher.policy_version = recovered.policy_version
        self._intake.start_from(recovered)

    # --- groups that their worker gave up ---------------------------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        """Gives unrenewed groups to others, and drops those that were delivered too often. Runs until cancelled."""
        parts, controller = self._parts, self._settings.controller
        leases = Leases(controller.lease_s)
        while True:
            for entry in leases.expired(await parts.threads.call(parts.ledger.pending)):
                logger.warning("%s no longer renews entry %s; another rollout gets its group", entry.consumer, entry.entry_id)
                await parts.threads.call(parts.ledger.reap, entry.consumer, entry.entry_id, controller.max_deliveries)
            for gid in await parts.threads.call(parts.ledger.overdelivered):
                logger.error("group %d failed %d times and is dropped; see the rollouts' logs", gid, controller.max_deliveries)
                await self._drop(gid, (), "over_delivered", f"given to a rollout {controller.max_deliveries} times and never committed")
            await asyncio.sleep(controller.lease_s / 4)

    # --- scoring as groups land ---------------------------------------------------------------------------------------------------------------------

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        """Scores every committed group once, from the oldest that is not trained. Runs until cancelled."""
        position = "0"
        while True:
            for entry, group in await self._parts.threads.call(self._parts.ledger.read_committed, position, READ_COUNT, READ_BLOCK_S):
                position = entry
                tasks.create_task(self._score(group))

    async def _score(self, group: trajectory_pb2.CommittedGroup) -> None:
        with attached(group.traceparent), tracer().start_as_current_span("score", attributes={"gid": group.gid}):
            try:
                scored = await self._parts.scorer.score(group)
            except ScorerError as error:
                await self._drop(group.gid, group.rows, "scorer_error", str(error))
                self._parts.scorer.count_failure(error)
                return
            except RowMissingError as error:
                logger.error("group %d was committed and its rows are gone; it is dropped and another prompt takes its place: %s", group.gid, error)
                await self._drop(group.gid, group.rows, "row_missing", str(error))
                return
            if self._settings.algorithm.drop_groups_without_signal and not scored.has_signal:
                await self._filter(scored)
            else:
                self._assembly.scored(scored)

    async def _filter(self, group: ScoredGroup) -> None:
        self._filtered_in_step += 1
        if self._filtered_in_step > self._settings.algorithm.max_dropped_groups_per_step:
            raise BudgetSpentError(
                f"{self._filtered_in_step} groups without signal in step {self._step}, more than algorithm.max_dropped_groups_per_step; "
                "the prompts are all solved or all hopeless for this policy"
            )
        await self._drop(group.gid, group.rows, "without_signal", "")

    async def _drop(self, gid: int, rows: Sequence[trajectory_pb2.RowRef], reason: str, error: str) -> None:
        await self._parts.threads.call(self._parts.ledger.drop, gid, reason, error)
        await self._parts.threads.call(self._parts.rows.delete, list(rows))
        self._intake.num_dropped += 1
        self._assembly.dropped(gid)
        self._intake.wake()

    # --- the steps ----------------------------------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        settings, board = self._settings, self._parts.board
        self._clock = measures.Stopwatch()
        while self._step < settings.run.num_steps and not board.stop_requested:
            with tracer().start_as_current_span("step", attributes={"step": self._step}):
                await self._one_step()
            await self._drain()
            self._clock.lap("report")
            if (settings.evaluation.every_steps and self._step % settings.evaluation.every_steps == 0) or self._step == settings.run.num_steps:
                await self._evaluate()
            if self._wants_checkpoint():
                await self._checkpoint(final=False)
            self._clock.leave_out()

    async def _one_step(self) -> None:
        self._step_metrics = Metrics()
        clock = self._clock
        groups = await self._next_groups()
        clock.lap("wait")
        self._step_metrics.merge(clock.waited(groups))
        rows = [ref for group in groups for ref in group.rows]
        if needs(self._settings.algorithm.advantage) and self._parts.critic:
            self._parts.board.wait_for("the critic's values")
            await self._parts.critic.compute_values(self._ctl, rows)
            clock.lap("values")
        batch = await self._seal(groups, rows)
        clock.lap("prepare")
        results = await self._apply(batch)
        clock.lap("train")
        await self._parts.threads.call(self._parts.ledger.commit_step, self._step, results)
        self._assembly.trained(batch.gids)
        self._intake.retained_bytes += batch_bytes(self._settings, batch)
        self._filtered_in_step = 0
        clock.lap("commit")
        self._step += 1
        await self._publish()
        clock.lap("publish")
        self._clock = measures.Stopwatch()
        await self._report(groups, results, clock)

    async def _drain(self) -> None:
        """Moves the ledger's history and dead letters to files, which bounds them in the store."""
        parts, folder = self._parts, self._settings.run.dir
        await parts.threads.call(parts.ledger.drain, "history", folder / "history.jsonl")
        await parts.threads.call(parts.ledger.drain, "dead", folder / "dead.jsonl")

    async def _next_groups(self) -> list[ScoredGroup]:
        """The groups of this step's batch: those sealed by an earlier controller, or the ones admission.py chooses."""
        stall_timeout_s = self._settings.controller.stall_timeout_s
        sealed = await self._parts.threads.call(self._parts.ledger.sealed, self._step)
        self._parts.board.wait_for(f"groups of step {self._step}")
        if sealed is not None:
            waiting = asyncio.create_task(self._assembly.groups(sealed.gids, stall_timeout_s))
        else:
            waiting = asyncio.create_task(self._assembly.next_batch(self._step, stall_timeout_s))
        try:
            while not (await asyncio.wait([waiting], timeout=self._settings.controller.lease_s))[0]:
                if self._parts.publisher.nobody_serves():
                    # All that held the weights are gone and others wait for theirs: no step boundary would come.
                    await self._publish()
            return waiting.result()
        except TimeoutError as error:
            raise DeadlineError(
                f"step {self._step}: no group was finished for controller.stall_timeout_s = {stall_timeout_s:.0f} s; {self._assembly.num_live} are live, "
                f"{self._assembly.num_ready} ready, rollouts: {[rollout.consumer + ' ' + rollout.phase for rollout in self._parts.fleet.rollouts()]}"
            ) from error
        finally:
            waiting.cancel()

    async def _seal(self, groups: Sequence[ScoredGroup], rows: list[trajectory_pb2.RowRef]) -> trajectory_pb2.TrainBatch:
        """Fixes the batch, then writes its columns: in this order, so that whoever crashes in between writes the same columns again."""
        parts = self._parts
        contents = await parts.threads.call(parts.rows.read, rows, assembly.columns_read(self._settings), assembly.OPTIONAL_COLUMNS)
        batch, columns = await parts.threads.call(assembly.prepare, self._settings, self._step, groups, contents)
        self._step_metrics.merge(measures.of_batch(self._settings, self._step, groups, contents, parts.publisher.step_of_version))
        await parts.threads.call(parts.ledger.seal, batch)
        await parts.threads.call(parts.rows.put, rows, columns)
        return batch

    async def _apply(self, batch: trajectory_pb2.TrainBatch) -> list[training_pb2.TrainResult]:
        """Actor and critic at the same time."""
        parts = self._parts
        parts.board.wait_for(f"training of step {batch.step}")
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(trainer.train(self._ctl, batch.step, batch.digest, parts.board.wait_for)) for trainer in parts.trainers]
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        return [call.result() for call in calls]

    async def _publish(self) -> None:
        self._parts.board.wait_for(f"the fleet to take the weights of step {self._step}")
        self._step_metrics.merge(await self._parts.publisher.publish(self._step))
        self._intake.wake()

    async def _report(self, groups: Sequence[ScoredGroup], results: Sequence[training_pb2.TrainResult], clock: measures.Stopwatch) -> None:
        parts, metrics = self._parts, self._step_metrics
        for result in results:
            metrics.merge(Metrics.from_proto(result.metrics))
        metrics.merge(clock.metrics(groups))
        metrics.merge(await measures.of_fleet(parts.fleet))
        metrics.max("data/epoch", parts.prompts.cursor.epoch)
        metrics.max("data/prompts_too_long", parts.prompts.cursor.num_too_long)
        metrics.max("groups/dropped", self._intake.num_dropped)
        samples = await parts.threads.call(measures.samples, parts.rows, self._step, groups, self._settings.controller.num_samples_kept)
        await parts.threads.call(parts.trackers.log, self._step, metrics.values())
        await parts.threads.call(parts.trackers.keep_samples, samples)
        export(metrics)
        parts.board.step_metrics = metrics
        parts.board.step = self._step
        parts.board.move(parts.board.state)

    async def _evaluate(self) -> None:
        parts = self._parts
        parts.board.wait_for(f"the evaluation of step {self._step}")
        try:
            metrics, samples = await parts.evaluation.run(self._step, parts.publisher.policy_version)
        except TimeoutError:
            logger.warning("the evaluation of step %d took longer than evaluation.timeout_s and is left out", self._step)
            return
        await parts.threads.call(parts.trackers.log, self._step, metrics.values())
        await parts.threads.call(parts.trackers.keep_samples, samples)
        export(metrics)
        parts.board.evaluation_metrics = metrics
        parts.board.move(parts.board.state)

    # --- checkpoints --------------------------------------------------------------------------------------------------------------------------------

    def _wants_checkpoint(self) -> bool:
        due = self._step % self._settings.run.checkpoint_every_steps == 0
        crowded = self._intake.retained_bytes > self._parts.policy.max_bytes // 2
        return self._step < self._settings.run.num_steps and (due or crowded or self._parts.board.checkpoint_request is not None)

    async def _checkpoint(self, *, final: bool) -> None:
        """Every role's share, then the manifest that makes them one checkpoint, then the rows it covers are freed."""
        parts = self._parts
        parts.board.wait_for(f"the checkpoint of step {self._step}")
        started = time.monotonic()
        request, parts.board.checkpoint_request = parts.board.checkpoint_request, None
        path = await parts.threads.call(parts.checkpoints.begin, self._step)
        await asyncio.gather(*(trainer.save(self._ctl, path / trainer.name, self._step, export_huggingface=final) for trainer in parts.trainers))
        await parts.threads.call(parts.checkpoints.commit, await self._point())
        await parts.threads.call(parts.ledger.sweep, parts.rows, self._step)
        self._intake.retained_bytes = 0
        self._intake.wake()
        logger.info("checkpoint of step %d saved to %s in %.1f s", self._step, path, time.monotonic() - started)
        if request is not None and not request.saved.done():
            request.saved.set_result((str(path), self._step))

    async def _point(self) -> RunPoint:
        """The controller's share of a checkpoint: the ledger at one instant, and the prompts that were in flight then."""
        position = await self._parts.threads.call(self._parts.ledger.position)
        return RunPoint(
            run=self._settings.run.name,
            lineage=position.lineage,
            step=self._step,
            policy_version=self._parts.publisher.policy_version,
            epoch=position.epoch,
            next_gid=position.next_gid,
            trained=position.trained,
            dropped=dict(position.dropped),
            cursor=position.cursor.decode(),
            untrained=await self._parts.recovery.untrained_prompts(position.next_gid),
        )
