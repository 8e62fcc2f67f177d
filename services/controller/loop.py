"""The run, as the algorithm reads: admit, score as groups land, assemble, advantages, seal, train actor and critic,
commit, publish, evaluate, checkpoint.

Synchronous training is max_staleness = 0 of this loop. Four activities share one event loop: admission (intake.py),
collection (collection.py: each committed group is scored as it lands), the return of abandoned groups (reaping.py) and
the steps themselves. Every decision is in the store before it is acted on, so a loop that starts over (run.py, after
the failure of a role or the store) goes on from there, in this process or another.
"""

import asyncio
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rolecall.errors import BudgetSpentError, DiskFullError, RoleCallError, StoreRolledBackError
from rolecall.settings import RunSettings
from rolecall.store.budget import batch_bytes
from rolecall.telemetry import Metrics, export, tracer
from rolecall.v1 import controller_pb2, training_pb2, trajectory_pb2
from rolecall.wire import Array
from services.controller.durable.recovery import encode_prompts
from services.controller.durable.run_point import RunPoint
from services.controller.durable.saving import NO_ROOM, CheckpointSaver
from services.controller.groups.assembly import Assembly, ScoredGroup
from services.controller.groups.collection import Collection
from services.controller.groups.failures import FailureBudget, StallClock
from services.controller.groups.intake import Intake
from services.controller.groups.reaping import Reaper
from services.controller.parts import Parts
from services.controller.step import measures, preparation
from services.controller.step.adaptive import AdaptiveState
from services.controller.tasks import first_error

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Loop:
    """One run, from a recovered position to its last step."""

    def __init__(self, parts: Parts, ctl: int) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._ctl = ctl
        self._assembly = Assembly(parts.policy)
        self._intake = Intake(
            parts.settings,
            parts.ledger,
            parts.threads,
            parts.prompts,
            parts.policy,
            parts.publisher,
            parts.board,
            self._assembly,
        )
        self._background: set[asyncio.Task[None]] = set()
        self._step = 0
        self._saver = CheckpointSaver(parts.trainers, parts.checkpoints, parts.threads, saved_step=0)
        self._collection = Collection(
            parts.settings,
            parts.ledger,
            parts.rows,
            parts.threads,
            parts.scorer,
            parts.prompts,
            parts.board,
            self._assembly,
            self._intake,
            self._stop_for,
        )
        self._reaper = Reaper(parts.settings.controller, parts.ledger, parts.threads, self._collection, self._stop_for)
        self._state = AdaptiveState.start(parts.settings.algorithm)
        self._spent: BudgetSpentError | None = None
        self._budget_spent = asyncio.Event()
        self._step_metrics = Metrics()
        self._clock = measures.Stopwatch()

    async def run(self) -> None:
        """Returns when the last step is done or a stop was asked for. Raises the error that ended the loop;
        BudgetSpentError after a checkpoint.
        """
        await self._recover()
        try:
            await self._between_steps()
            self._parts.board.move(controller_pb2.RUN_STATE_RUNNING)
            await self._run_activities()
            await self._end()
        finally:
            await self._saver.cancel()

    async def _run_activities(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for activity in (
                    self._intake.run(),
                    self._collection.run(lambda scoring: self._in_background(tasks, scoring)),
                    self._reaper.run(),
                    self._parts.fleet.trainer_lost(),
                ):
                    self._in_background(tasks, activity)
                await self._train()
                for task in self._background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    def _in_background(self, tasks: asyncio.TaskGroup, activity: Coroutine[Any, Any, None]) -> None:
        """Runs `activity` until it or the training ends."""
        task = tasks.create_task(activity)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end(self) -> None:
        if (
            self._step == self._settings.run.num_steps
            or self._parts.board.stop_with_checkpoint
            or self._spent is not None
        ):
            try:
                await self._last_checkpoint()
            except RoleCallError as error:
                if self._spent is None:
                    raise
                raise BudgetSpentError(
                    f"{self._spent.message}; no checkpoint of step {self._step} could be saved: {error.message}"
                ) from error
        if self._spent is not None:
            raise self._spent

    async def _last_checkpoint(self) -> None:
        """Ends with a committed checkpoint of this step."""
        try:
            await self._saver.finish()
        except NO_ROOM as error:
            logger.warning("the checkpoint before the last could not be saved: %s", error.message)
        if self._saver.saved_step != self._step or self._step == 0:
            await self._checkpoint()
            await self._saver.finish()

    def _stop_for(self, error: BudgetSpentError) -> None:
        """Ends the run at the next step boundary, with a checkpoint and `error`."""
        self._spent = self._spent or error
        self._budget_spent.set()

    # --- where the last loop left off -------------------------------------------------------------

    async def _recover(self) -> None:
        """Takes the ledger's position, and trainers and fleet to it."""
        recovered = await self._parts.recovery.run(self._ctl)
        position, parts = recovered.position, self._parts
        self._step = parts.board.step = position.step
        self._state = AdaptiveState.decode(self._settings.algorithm, position.algorithm_state)
        self._saver.saved_step = self._saver.step = recovered.saved_step
        parts.publisher.policy_version = recovered.policy_version
        parts.publisher.step_of_version.update(recovered.step_of_version)
        window = self._settings.controller.failure_window
        self._collection.failures = FailureBudget(
            self._settings.reward.max_failed_groups, window, position.failed.get("scorer_error", ())
        )
        self._reaper.dead_letters = FailureBudget(
            self._settings.controller.max_dead_letters, window, position.failed.get("over_delivered", ())
        )
        if self._settings.algorithm.curriculum is not None:
            parts.prompts.rates = await parts.threads.call(parts.ledger.rates)
        sealed = await parts.threads.call(parts.ledger.sealed, self._step)
        self._collection.sealed = frozenset(sealed.gids) if sealed is not None else frozenset()
        begun = await parts.threads.call(parts.ledger.begun, self._step)
        self._assembly.take_over(self._step, recovered.live, self._collection.sealed or frozenset(begun))
        self._intake.start_from(recovered)
        if parts.board.steered:  # perhaps before this process held the run
            await parts.threads.call(parts.ledger.pause, parts.board.paused)
        elif position.paused:
            parts.board.pause()
        attested = position.begun_version == position.policy_version == parts.publisher.policy_version
        if recovered.is_actor_restored or not (attested and parts.publisher.holds(self._step)):
            await self._publish()

    # --- the steps --------------------------------------------------------------------------------

    async def _train(self) -> None:
        settings, board = self._settings, self._parts.board
        self._clock = measures.Stopwatch()
        while self._step < settings.run.num_steps and not board.stop_requested and self._spent is None:
            groups = await self._next_groups()
            if groups is None:
                return
            self._clock.lap("wait")
            with tracer().start_as_current_span("step", attributes={"step": self._step}):
                await self._one_step(groups)
            await self._drain()
            self._clock.lap("report")
            await self._between_steps()
            self._clock.leave_out()

    async def _between_steps(self) -> None:
        """The evaluation and the checkpoint that are due after this many steps: also when the loop that applied the
        last of them did not get to it.
        """
        every, step = self._settings.evaluation.every_steps, self._step
        due = step in (0, self._settings.run.num_steps) or (every and step % every == 0)
        if due and self._parts.board.evaluated_step != step:
            await self._evaluate()
        try:
            await self._saver.raise_if_failed()
            if self._wants_checkpoint():
                await self._checkpoint()
        except NO_ROOM as error:
            logger.error(
                "no checkpoint before step %d: %s; the last one stands, and the next step tries again",
                step + 1,
                error.message,
            )

    async def _one_step(self, groups: list[ScoredGroup]) -> None:
        self._step_metrics = Metrics()
        clock = self._clock
        self._step_metrics.merge(clock.waited(groups))
        rows = [ref for group in groups for ref in group.rows]
        sealed = await self._parts.threads.call(self._parts.ledger.sealed, self._step)
        # A batch that an earlier loop sealed holds these columns, and a trainer may have applied it since: it could not
        # compute them again.
        asked = self._parts.computing(preparation.columns_computed(self._settings.algorithm)) if sealed is None else []
        if asked:
            self._parts.board.wait_for(
                f"what the {' and the '.join(trainer.name for trainer in asked)} say of the batch"
            )
            # What they say is written once: a loop that starts over after this must choose these groups, not keep what
            # it says of them for a later step.
            await self._parts.threads.call(self._parts.ledger.begin_batch, self._step, [group.gid for group in groups])
            await self._at_once([trainer.compute(self._ctl, rows, self._step) for trainer in asked])
            clock.lap("values")
        batch = await self._take_up(sealed, groups, rows) if sealed is not None else await self._seal(groups, rows)
        clock.lap("prepare")
        results = await self._apply(batch)
        clock.lap("train")
        self._state = self._state.after(self._settings.algorithm, batch, results)
        await self._parts.threads.call(
            self._parts.ledger.commit_step, self._step, results, self._state.encode(self._settings.algorithm)
        )
        self._assembly.trained(batch.gids)
        self._intake.retained_bytes += batch_bytes(self._settings, batch, self._parts.recovery.prompt_bytes)
        self._collection.begin_step()
        clock.lap("commit")
        self._step += 1
        await self._publish()
        clock.lap("publish")
        self._clock = measures.Stopwatch()
        await self._report(groups, results, clock)

    async def _drain(self) -> None:
        """Moves the ledger's history and dead letters to files, which bounds them in the store."""
        parts, folder = self._parts, self._settings.run.dir
        try:
            await parts.threads.call(parts.ledger.drain, "history", folder / "history.jsonl")
            await parts.threads.call(parts.ledger.drain, "dead", folder / "dead.jsonl")
        except DiskFullError as error:
            logger.warning("the ledger's history stays in the store: %s", error.message)

    async def _next_groups(self) -> list[ScoredGroup] | None:
        """The groups of this step's batch: those sealed by an earlier loop, or the ones admission.py chooses; None when
        the run is to end before it.
        """
        sealed = await self._parts.threads.call(self._parts.ledger.sealed, self._step)
        ending = asyncio.create_task(self._budget_spent.wait())
        if sealed is not None:
            waiting = asyncio.create_task(self._assembly.groups(sealed.gids))
        else:
            begun = await self._parts.threads.call(self._parts.ledger.begun, self._step)
            waiting = asyncio.create_task(self._assembly.next_batch(self._step, begun))
        stall = StallClock(_patience_s(self._settings))
        try:
            while True:
                self._tell_what_is_awaited()
                await asyncio.wait(
                    [waiting, ending] if sealed is None else [waiting],
                    timeout=stall.look_s,
                    return_when=FIRST_COMPLETED,
                )
                if not waiting.done() and stall.has_stalled(self._what_moves(), paused=self._parts.board.paused):
                    self._stop_for(self._stalled())
                    return None
                if sealed is None and self._ends_now():
                    return None
                if waiting.done():
                    return waiting.result()
                if self._parts.publisher.nobody_serves():
                    # All that held the weights are gone and others wait for theirs: no step boundary would come.
                    await self._publish()
        finally:
            waiting.cancel()
            ending.cancel()

    def _what_moves(self) -> object:
        """What changes while a batch is on its way: groups end, or rollouts sample; the longest responses take longer
        than controller.stall_timeout_s.
        """
        return self._assembly.num_changes, [
            (rollout.consumer, rollout.progress) for rollout in self._parts.fleet.rollouts()
        ]

    def _stalled(self) -> BudgetSpentError:
        return BudgetSpentError(
            f"step {self._step}: no group was finished for controller.stall_timeout_s = "
            f"{_patience_s(self._settings):.0f} s; "
            f"{self._assembly.num_live} are live, {self._assembly.num_ready} ready, "
            f"rollouts: {[rollout.consumer + ' ' + rollout.phase for rollout in self._parts.fleet.rollouts()]}"
            + (f"; {self._parts.scorer.trouble}" if self._parts.scorer.trouble else "")
        )

    def _ends_now(self) -> bool:
        """Whether the batch that is awaited is not to be trained any more: a budget is spent, or a stop was asked for
        and nobody samples or scores.
        """
        fleet = self._parts.fleet
        scorer_gone = any(fleet.is_lost(name) for name in ("reward", *self._settings.references))
        return self._spent is not None or (self._parts.board.stop_requested and (scorer_gone or not fleet.rollouts()))

    def _tell_what_is_awaited(self) -> None:
        """For people: a run without rollouts waits for them, not for groups."""
        awaited = f"groups of step {self._step}" if self._parts.fleet.rollouts() else "rollouts: none is alive"
        self._parts.board.wait_for(awaited)

    async def _seal(
        self, groups: Sequence[ScoredGroup], rows: list[trajectory_pb2.RowRef]
    ) -> trajectory_pb2.TrainBatch:
        """Fixes the batch, then writes its columns: in this order, so that whoever crashes in between writes the same
        columns again.
        """
        parts = self._parts
        contents = await parts.threads.call(
            parts.rows.read, rows, preparation.columns_read(self._settings), preparation.OPTIONAL_COLUMNS
        )
        greedy = (
            [group.greedy.row for group in groups if group.greedy is not None]
            if self._settings.algorithm.wants_greedy_response
            else []
        )
        greedy_contents = await parts.threads.call(
            parts.rows.read, greedy, preparation.GREEDY_COLUMNS, preparation.OPTIONAL_COLUMNS
        )
        batch, columns = await parts.threads.call(
            preparation.prepare, self._settings, self._step, groups, contents, greedy_contents, self._state
        )
        self._measure(batch, groups, contents)
        await parts.threads.call(parts.ledger.seal, batch)
        await parts.threads.call(parts.rows.put, rows, columns)
        return batch

    async def _take_up(
        self, batch: trajectory_pb2.TrainBatch, groups: Sequence[ScoredGroup], rows: list[trajectory_pb2.RowRef]
    ) -> trajectory_pb2.TrainBatch:
        """A batch that an earlier loop sealed stands as it is, whatever the settings are now; its columns are written
        where that loop did not get to it.
        """
        parts = self._parts
        contents = await parts.threads.call(
            parts.rows.read, rows, preparation.columns_reported(self._settings), ["advantages", "old_logprobs"]
        )
        if not all("advantages" in row for row in contents):
            return await self._seal(groups, rows)
        self._measure(batch, groups, contents)
        return batch

    def _measure(
        self, batch: trajectory_pb2.TrainBatch, groups: Sequence[ScoredGroup], contents: Sequence[Mapping[str, Array]]
    ) -> None:
        self._step_metrics.merge(
            measures.of_batch(self._settings, self._step, groups, contents, self._parts.publisher.step_of_version)
        )
        self._step_metrics.merge(measures.of_sealed(self._settings, batch))

    async def _apply(self, batch: trajectory_pb2.TrainBatch) -> list[training_pb2.TrainResult]:
        """Actor and critic at the same time."""
        parts = self._parts
        parts.board.wait_for(f"training of step {batch.step}")
        return await self._at_once(
            [trainer.train(self._ctl, batch.step, batch.digest, parts.board.wait_for) for trainer in parts.trainers]
        )

    async def _at_once(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """What `calls` return; the first error ends the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(call) for call in calls]
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        return [task.result() for task in running]

    async def _publish(self) -> None:
        self._parts.board.wait_for(f"the fleet to take the weights of step {self._step}")
        self._step_metrics.merge(await self._parts.publisher.publish(self._step))
        self._intake.wake()

    async def _report(
        self, groups: Sequence[ScoredGroup], results: Sequence[training_pb2.TrainResult], clock: measures.Stopwatch
    ) -> None:
        parts, metrics = self._parts, self._step_metrics
        for result in results:
            metrics.merge(Metrics.from_proto(result.metrics))
        metrics.merge(clock.metrics(groups))
        metrics.merge(await measures.of_fleet(parts.fleet))
        metrics.max("data/epoch", parts.prompts.cursor.epoch)
        metrics.max("data/prompts_too_long", parts.prompts.cursor.num_too_long)
        metrics.max("groups/dropped", self._intake.dropped.total())
        for reason, count in self._intake.dropped.items():
            metrics.max(f"groups/dropped_{reason}", count)
        samples = await parts.threads.call(
            measures.samples, parts.rows, self._step, groups, self._settings.controller.num_samples_kept
        )
        await parts.threads.call(parts.trackers.log, self._step, metrics.values())
        await parts.threads.call(parts.trackers.keep_samples, self._step, samples)
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
            logger.warning(
                "the evaluation of step %d took longer than evaluation.timeout_s and is left out", self._step
            )
            return
        await parts.threads.call(parts.trackers.log, self._step, metrics.values())
        await parts.threads.call(parts.trackers.keep_samples, self._step, samples)
        export(metrics)
        parts.board.evaluation_metrics, parts.board.evaluated_step = metrics, self._step
        parts.board.move(parts.board.state)

    # --- checkpoints ------------------------------------------------------------------------------

    def _wants_checkpoint(self) -> bool:
        every = self._settings.run.checkpoint_every_steps
        due = self._step // every > self._saver.step // every
        crowded = self._intake.retained_bytes > self._parts.policy.max_bytes // 2 and not self._saver.is_in_flight
        return self._step < self._settings.run.num_steps and (
            due or crowded or bool(self._parts.board.checkpoint_requests)
        )

    async def _checkpoint(self) -> None:
        """Begins the checkpoint of this step; returns when the steps may go on."""
        parts, step, covered_bytes = self._parts, self._step, self._intake.retained_bytes
        parts.board.wait_for(f"the checkpoint of step {step}")
        requests, parts.board.checkpoint_requests = parts.board.checkpoint_requests, []

        async def committed(path: str) -> None:
            for request in requests:  # before the sweep, which may fail and be made up for by the next one
                if not request.done():
                    request.set_result((path, step))
            await parts.threads.call(parts.ledger.sweep, parts.rows, step)
            self._intake.retained_bytes -= covered_bytes
            self._intake.wake()

        await self._saver.begin(
            self._ctl, step, self._point, committed, lambda: parts.board.checkpoint_requests.extend(requests)
        )

    async def _point(self) -> RunPoint:
        """The controller's share of a checkpoint: the ledger at one instant, and the prompts that were in flight
        then.
        """
        await self._drain()  # so that the history knows all that the checkpoint counts, also if the store is lost
        position = await self._parts.threads.call(self._parts.ledger.position)
        if position.step != self._step:
            raise StoreRolledBackError(
                f"the store stands at step {position.step} and the run at {self._step}: it was restored from an "
                "older copy; start the run again"
            )
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
            waiting=encode_prompts(self._intake.waiting(position.next_gid)),
            algorithm_state=position.algorithm_state.decode(),
            ctl=self._ctl,
        )


def _patience_s(settings: RunSettings) -> float:
    """controller.stall_timeout_s, or the deadline of a call that a group waits for where that is longer."""
    return max(
        settings.controller.stall_timeout_s,
        settings.reward.timeout_s,
        settings.actor.compute_timeout_s if settings.references else 0.0,
    )
