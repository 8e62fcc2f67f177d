"""The run, as the algorithm reads: admit, score as groups land, assemble, advantages, seal, train actor and critic,
commit, publish, evaluate, checkpoint.

Synchronous training is max_staleness = 0 of this loop. Four activities share one event loop: admission (intake.py),
collection (collection.py: each committed group is scored as it lands), the return of abandoned groups (reaping.py) and
the steps themselves. Every decision is in the store before it is acted on, so a loop that starts over (run.py, after
the failure of a role or the store) goes on from there, in this process or another.

A Loop is one life: it and all that it changes are made anew from what was recovered. Between any two of its effects it
passes a named instant, at which tests make things fail.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from rolecall.errors import BudgetSpentError, RoleCallError
from rolecall.store.budget import batch_bytes
from rolecall.telemetry import Metrics, tracer
from rolecall.v1 import controller_pb2, training_pb2, trajectory_pb2
from rolecall.wire import Array
from services.controller.awaiting import NextBatch, NextBatches
from services.controller.durable.run_point import RunPoint, take_point
from services.controller.durable.saving import NO_ROOM, CheckpointSaver
from services.controller.evaluating import Evaluations
from services.controller.groups.assembly import Assembly, ScoredGroup
from services.controller.groups.collection import Collection
from services.controller.groups.failures import RunEnd, starts_over
from services.controller.groups.group_scorer import GroupScorer
from services.controller.groups.intake import Intake
from services.controller.groups.prompts import Cursor, PromptSequence
from services.controller.groups.reaping import Reaper
from services.controller.parts import Parts
from services.controller.publish.delivery import Delivery
from services.controller.publish.joiners import Joiners
from services.controller.publish.publisher import PolicyPublisher
from services.controller.recovered import Recovered
from services.controller.reports import Reports
from services.controller.step import measures, preparation
from services.controller.step.adaptive import AdaptiveState
from services.controller.step.reference_shift import ReferenceShift
from services.controller.step.sealing import Sealing
from services.controller.tasks import FirstErrorGroup, at_once

logger = logging.getLogger(__name__)

ROOM_RETRY_S = 10.0
"""Seconds between two tries of the checkpoint that admission waits for."""


def pass_by(instant: str) -> None:
    """Does nothing at the instant."""


class Loop:
    """One life of a run's loop, from a recovered position to the last step."""

    def __init__(self, parts: Parts, recovered: Recovered, at: Callable[[str], None] = pass_by) -> None:
        """`at` is called with the name of every instant that the loop passes."""
        settings, position = parts.settings, recovered.position
        self._parts = parts
        self._settings = settings
        self._recovered = recovered
        self._at = at
        self._step = position.step
        self._state = AdaptiveState.decode(settings.algorithm, position.algorithm_state)
        self._end = RunEnd()
        first = recovered.sealed_gids or recovered.begun
        self._assembly = Assembly(parts.policy, parts.policy.taken_over(position.step, recovered.live, first))
        self._prompts = _prompt_sequence(parts, recovered)
        ledger, rows, threads, board = parts.ledger, parts.rows, parts.threads, parts.board
        self._publisher = _publisher(parts, recovered)
        self._intake = Intake(
            settings,
            ledger,
            threads,
            self._prompts,
            parts.policy,
            board,
            self._assembly,
            lambda: self._publisher.published_step,
            recovered,
        )
        self._collection = _collection(parts, recovered, self._prompts, self._assembly, self._intake, self._end)
        self._reaper = Reaper(
            settings.controller, ledger, threads, self._collection, self._end, position.failed.get("over_delivered", ())
        )
        self._saver = CheckpointSaver(parts.trainers, parts.checkpoints, parts.commits, threads, recovered.saved_step)
        self._sealing = Sealing(settings, ledger, rows, threads, at)
        self._batches = NextBatches(
            settings,
            recovered,
            self._assembly,
            parts.fleet,
            board,
            parts.reward,
            self._end,
            self._look,
            self._waits_for_room,
            lambda: self._prompts.cursor,
            lambda: self._intake.trouble,
            lambda: self._collection.is_scoring,
        )
        self._reports = Reports(parts)
        self._evaluations = Evaluations(
            parts, self._end, position.evaluated_step, lambda: self._publisher.policy_version
        )
        self._joiners = Joiners(self._publisher, settings.controller.heartbeat_s, in_shifts=parts.shifts.are_taken)
        self._step_metrics = Metrics()
        self._clock = measures.Stopwatch()
        self._next_try_at = 0.0

    async def run(self) -> None:
        """Returns when the last step is done or a stop was asked for. Raises the error that ended the loop;
        BudgetSpentError after a checkpoint.
        """
        try:
            await self._begin()
            await self._between_steps()
            self._parts.board.move(controller_pb2.RUN_STATE_RUNNING)
            await self._run_activities()
            await self._finish()
        finally:
            ends = self._joiners.stop(), self._reports.settle(), self._evaluations.cancel(), self._saver.cancel()
            # bounded: by what bounds a report; the others are cancelled. All end, and the loop's own error is raised
            await asyncio.gather(*ends, return_exceptions=True)

    async def _begin(self) -> None:
        """Takes over people's wish for a pause, and publishes unless the fleet holds the weights of this step."""
        parts, position = self._parts, self._recovered.position
        parts.board.begin(self._step)
        for step, metrics in self._recovered.untold.items():
            if step > parts.board.told_step:
                self._reports.begin(step, metrics, ())
        if parts.board.steered:  # perhaps before this process held the run
            await parts.threads.call(parts.ledger.pause, parts.board.paused)
        elif position.paused:
            parts.board.pause()
        if parts.shifts.are_taken:  # no batch would come, and so no shift, where all room waits for a checkpoint
            await self._save_if_due()
        attested = position.begun_version == position.policy_version == self._recovered.policy_version
        is_served = attested and parts.shifts.is_sampling and self._publisher.holds(self._step)
        if self._recovered.is_actor_restored or not is_served:
            await self._publish()
        else:
            self._joiners.serve()

    async def _run_activities(self) -> None:
        """The steps, beside the activities that run until cancelled."""
        activities = self._intake.run(), self._collection.run(), self._reaper.run(), self._parts.fleet.trainer_lost()
        async with FirstErrorGroup() as tasks:
            running = [tasks.create_task(activity) for activity in activities]
            await self._train()
            await self._reports.over()
            await self._evaluations.over(self._reach_others)
            for task in running:
                task.cancel()

    async def _finish(self) -> None:
        """A checkpoint of the last step where one is due, then the error that ended the run, if any."""
        error, board = self._end.error, self._parts.board
        if 0 < self._step == self._settings.run.total_steps or board.stop_with_checkpoint or error is not None:
            try:
                await self._last_checkpoint()
            except RoleCallError as failed:
                if error is None and not (board.stop_requested and starts_over(failed)):
                    raise
                why = "the run was stopped" if error is None else error.message  # and no loop comes after this one
                raise BudgetSpentError(
                    f"{why}; no checkpoint of step {self._step} could be saved: {failed.message}"
                ) from failed
        if error is not None:
            raise error

    async def _last_checkpoint(self) -> None:
        """Ends with a committed checkpoint of this step."""
        try:
            await self._saver.finish()
        except NO_ROOM as error:
            logger.warning("the checkpoint before the last could not be saved: %s", error.message)
        if self._saver.saved_step != self._step or self._step == 0:
            await self._checkpoint()
            await self._saver.finish()

    # --- the steps --------------------------------------------------------------------------------

    async def _train(self) -> None:
        settings, board = self._settings, self._parts.board
        self._clock = measures.Stopwatch()
        while self._step < settings.run.total_steps and not board.stop_requested and self._end.error is None:
            batch = await self._batches.next(self._step)
            if batch is None:
                return
            self._clock.lap("wait")
            self._parts.board.states.enter("working")
            with tracer().start_as_current_span("step", attributes={"step": self._step}):
                await self._one_step(batch)
            await self._between_steps()
            self._clock.leave_out()

    async def _between_steps(self) -> None:
        """The evaluation and the checkpoint that are due after this many steps."""
        await self._evaluations.after(self._step, self._reach_others)
        if not self._parts.shifts.are_taken:
            await self._save_if_due()

    async def _save_if_due(self) -> None:
        await self._save_if(self._wants_checkpoint)

    async def _save_if(self, wanted: Callable[[], bool]) -> None:
        try:
            await self._saver.raise_if_failed()
            if wanted():
                await self._checkpoint()
        except NO_ROOM as error:
            self._parts.board.saved(f"no checkpoint since step {self._saver.saved_step}: {error.message}")
            logger.error(
                "no checkpoint before step %d: %s; the last one stands, and another is tried",
                self._step + 1,
                error.message,
            )

    async def _one_step(self, batch: NextBatch) -> None:
        parts, clock, groups = self._parts, self._clock, batch.groups
        await self._joiners.stop()
        self._step_metrics = clock.waited(groups)
        self._step_metrics.merge(self._joiners.take_metrics())
        if parts.shifts.are_taken:
            is_asked = batch.sealed is None and any(group.references for group in groups)
            if is_asked and not await self._ask_references(groups):
                return
            await parts.shifts.to_training(self._recovered.ctl)
            clock.lap("shift")
            await self._save_if_due()  # of the step before: not earlier, for the state was not on the devices
            clock.leave_out()
        if batch.sealed is not None:
            step = await self._sealing.take_up(batch.sealed, groups, self._state)
        else:
            await self._compute(groups)
            step = await self._sealing.seal(self._step, groups, self._state)
        self._at("columns are written")
        # beside the training, which waits for nothing here
        self._step_metrics.merge(measures.of_sealed(self._settings, step.batch))
        self._count_what_came_in()
        measuring = asyncio.create_task(self._measure(groups, step.contents))
        measuring.add_done_callback(lambda task: task.cancelled() or task.exception())  # if the training fails first
        clock.lap("prepare")
        results = await self._apply(step.batch)
        await measuring  # bounded: by the store's own deadlines
        self._at("trained")
        clock.lap("train")
        self._state = self._state.after(self._settings.algorithm, step.batch, results)
        await parts.threads.call(
            parts.ledger.commit_step, self._step, results, self._state.encode(self._settings.algorithm)
        )
        self._at("step is committed")
        self._assembly.trained(step.batch.gids)
        self._intake.retain(batch_bytes(self._settings, step.batch, parts.prompt_bytes))
        self._collection.begin_step()
        clock.lap("commit")
        self._step += 1
        try:
            await self._evaluations.over()
            clock.lap("evaluation")
            await self._publish()
            clock.lap("publish")
            await self._reports.over()
            clock.lap("report")
        finally:  # the step counts, whatever becomes of its weights; nothing here may wait or raise
            self._step_metrics.merge(clock.metrics(groups))
            for result in results:
                self._step_metrics.merge(Metrics.from_proto(result.metrics))
            self._clock = measures.Stopwatch()
            reported, self._step_metrics = self._step_metrics, Metrics()
            self._reports.begin(self._step, reported, groups)

    async def _measure(self, groups: Sequence[ScoredGroup], contents: Sequence[Mapping[str, Array]]) -> None:
        """Adds the numbers of the batch to those of the step, and notes what is known by now for whoever reports it."""
        parts, of_version = self._parts, self._publisher.step_of_version
        measured = await parts.threads.call(measures.of_batch, self._settings, self._step, groups, contents, of_version)
        self._step_metrics.merge(measured)
        await parts.threads.call(parts.ledger.measured, self._step, self._step_metrics.to_proto())

    async def _ask_references(self, groups: Sequence[ScoredGroup]) -> bool:
        """Has the references score that leave the shared devices otherwise. A sealed batch has their columns. Whether
        they did; else the run is to stop, and the batch is left to whoever resumes it.
        """
        parts = self._parts
        await parts.shifts.to_scoring(self._recovered.ctl)
        self._clock.lap("shift")
        parts.board.wait_for("the references on the shared devices to score the batch", "computing")
        shift = ReferenceShift(self._settings, parts.references, self._recovered.ctl, parts.board)
        has_scored = await shift.score(groups)
        self._at("references have scored")
        self._clock.lap("references")
        return has_scored

    async def _compute(self, groups: Sequence[ScoredGroup]) -> None:
        """Has the trainers write the columns that are computed before the seal, where something reads them.

        Only a batch that nobody sealed needs them. A trainer may have applied a sealed one since, and could not compute
        them again.
        """
        parts = self._parts
        asked = parts.computing(preparation.columns_computed(self._settings.algorithm))
        if not asked:
            return
        names = " and ".join(trainer.name for trainer in asked)
        parts.board.wait_for(f"the columns that {names} compute of the batch", "computing")
        # These columns are written once: a loop that starts over after this must choose these groups, not keep the
        # columns for a later step.
        await parts.threads.call(parts.ledger.begin_batch, self._step, [group.gid for group in groups])
        rows = [ref for group in groups for ref in group.rows]
        await at_once([trainer.compute(self._recovered.ctl, rows, self._step) for trainer in asked])
        parts.board.states.enter("working")
        self._at("values are computed")
        self._clock.lap("values")

    async def _apply(self, batch: trajectory_pb2.TrainBatch) -> list[training_pb2.TrainResult]:
        """Has actor and critic train `batch`, at the same time."""
        ctl, board = self._recovered.ctl, self._parts.board
        board.wait_for(f"training of step {batch.step}", "training")
        results = await at_once(
            [trainer.train(ctl, batch.step, batch.digest, board.wait_for) for trainer in self._parts.trainers]
        )
        board.states.enter("working")
        return results

    async def _publish(self) -> None:
        shifts, board, ctl = self._parts.shifts, self._parts.board, self._recovered.ctl
        await self._joiners.stop()
        await shifts.to_publishing(ctl)
        board.wait_for(f"the fleet to take the weights of step {self._step}", "publishing")
        self._step_metrics.merge(await self._publisher.publish(self._step, lambda: board.stop_requested))
        board.published(self._publisher.published_step, self._publisher.policy_version)
        await shifts.to_sampling(ctl)
        self._step_metrics.merge(shifts.take_seconds())
        self._parts.board.states.enter("working")
        self._at("weights are published")
        self._joiners.serve()
        self._intake.wake()

    async def _look(self) -> None:
        """Does what may bring a wait for groups on."""
        await self._reach_others()
        await self._make_room()

    async def _make_room(self) -> None:
        """Tries the checkpoint again that failed at the step boundary, where admission waits for the rows that it would
        free: no other boundary would come. A batch that an earlier loop sealed comes first, for a trainer may be ahead.
        """
        sealed = self._recovered.sealed if self._step == self._recovered.position.step else None
        is_due = not self._saver.is_in_flight and time.monotonic() >= self._next_try_at
        if not self._waits_for_room() or not is_due or sealed is not None:
            return
        self._next_try_at = time.monotonic() + ROOM_RETRY_S
        await self._save_if(lambda: True)
        if not self._parts.shifts.is_sampling:
            await self._publish()

    def _waits_for_room(self) -> bool:
        """Whether admission waits for the rows that a checkpoint frees, and nothing is sampled or scored any more."""
        return self._intake.waits_for_room and self._assembly.num_live == self._assembly.num_ready

    async def _reach_others(self) -> None:
        """Publishes again when all that held the weights are gone and others wait for theirs: no step boundary would
        come. An evaluation that is under way goes on with them.
        """
        if self._publisher.nobody_serves():
            await self._publish()

    def _count_what_came_in(self) -> None:
        """Adds to the step's numbers how many prompts were read, and groups dropped, so far."""
        metrics = self._step_metrics
        metrics.max("data/epoch", self._prompts.cursor.epoch)
        metrics.max("data/prompts_too_long", self._prompts.cursor.num_too_long)
        metrics.max("data/prompts_unshown", self._prompts.cursor.num_unshown)
        dropped = self._intake.dropped
        metrics.max("groups/dropped", dropped.total())
        for reason, count in dropped.items():
            metrics.max(f"groups/dropped_{reason}", count)

    # --- checkpoints ------------------------------------------------------------------------------

    def _wants_checkpoint(self) -> bool:
        every = self._settings.run.checkpoint_every_steps
        due = self._step // every > self._saver.step // every
        wanted = due or self._is_crowded() or bool(self._parts.board.checkpoint_requests)
        return wanted and self._step < self._settings.run.total_steps

    def _is_crowded(self) -> bool:
        """Whether trained rows must be freed: in shifts, before this batch and the next may not fit beside them."""
        retained, policy = self._intake.retained_bytes, self._parts.policy
        if self._parts.shifts.are_taken:
            return retained + 2 * policy.groups_per_batch * policy.group_bytes > policy.max_bytes
        return retained > policy.max_bytes // 2 and not self._saver.is_in_flight

    async def _checkpoint(self) -> None:
        """Begins the checkpoint of this step; returns when the steps may go on."""
        await self._reports.over()  # it reads rows that this checkpoint frees
        await self._joiners.stop()  # the actor would take its state after sending its weights
        try:
            await self._begin_checkpoint()
        finally:  # also where there is no room for it
            self._joiners.serve()
        self._parts.board.states.enter("working")
        self._at("the checkpoint is begun")

    async def _begin_checkpoint(self) -> None:
        parts, step = self._parts, self._step
        await parts.shifts.to_training(self._recovered.ctl)
        parts.board.wait_for(f"the checkpoint of step {step}", "saving")
        await self._saver.finish()  # frees what it covers, or leaves the requests to the next
        covered_bytes, requests = self._intake.retained_bytes, parts.board.take_checkpoint_requests()

        async def point() -> RunPoint:
            # so that the history knows all that the checkpoint counts, also if the store is lost
            await self._reports.drain()
            return await parts.threads.call(
                take_point,
                self._settings.run,
                step,
                self._publisher.policy_version,
                parts.ledger,
                parts.rows,
                self._intake.backlog_at,
            )

        async def committed(path: str) -> None:
            self._at("checkpoint is committed")
            parts.board.saved()
            for request in requests:  # before the sweep, which may fail and be made up for by the next one
                if not request.done():
                    request.set_result((path, step))
            await parts.threads.call(parts.ledger.sweep, parts.rows, step)
            self._intake.free(covered_bytes)

        await self._saver.begin(self._recovered.ctl, step, point, committed, lambda: parts.board.give_back(requests))


def _publisher(parts: Parts, recovered: Recovered) -> PolicyPublisher:
    """The publisher of the policy to the run's fleet."""
    settings, ledger, threads, fleet = parts.settings, parts.ledger, parts.threads, parts.fleet
    delivery = Delivery(settings, ledger, threads, fleet, parts.actor.stub, parts.probe, recovered.ctl)
    return PolicyPublisher(settings, ledger, threads, fleet, delivery, recovered)


def _collection(
    parts: Parts, recovered: Recovered, prompts: PromptSequence, assembly: Assembly, intake: Intake, end: RunEnd
) -> Collection:
    """The collection of groups, scored by the run's reward and references, from where the ledger stands."""
    settings, rows, threads, position = parts.settings, parts.rows, parts.threads, recovered.position
    return Collection(
        settings,
        parts.ledger,
        rows,
        threads,
        GroupScorer(settings, rows, threads, parts.reward, parts.references, recovered.ctl),
        prompts,
        parts.board,
        assembly,
        intake,
        end,
        recovered.sealed_gids,
        position.failed.get("scorer_error", ()),
        position.next_gid,
    )


def _prompt_sequence(parts: Parts, recovered: Recovered) -> PromptSequence:
    """The training prompts from where the ledger stands."""
    return PromptSequence(
        parts.raw_prompts,
        parts.renderer,
        seed=parts.settings.run.seed,
        shuffle=parts.settings.data.shuffle,
        curriculum=parts.settings.algorithm.curriculum,
        cursor=Cursor.decode(recovered.position.cursor),
        rates=recovered.rates,
    )
