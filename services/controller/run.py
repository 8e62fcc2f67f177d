"""The controller behind its service: holds the lock on the run, runs the loop and answers for it.

Owns the order of the start: data, store, lock, roles, loop; and what an end means: DONE, or FAILED with the first
error.
Knows no gRPC server.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from rolecall.errors import (
    BudgetSpentError,
    FencedError,
    InvalidInputError,
    RoleCallError,
    RowMissingError,
    RunLockedError,
    StoreRolledBackError,
    StoreUnavailableError,
)
from rolecall.identity import settle
from rolecall.settings import RunSettings
from rolecall.telemetry import Metrics, export
from rolecall.telemetry.states import StateClock
from rolecall.trackers import End
from rolecall.v1 import controller_pb2, training_pb2
from rolecall.v1.rollout_pb2_grpc import RolloutServiceStub
from services.controller.durable.recovery import Recovery
from services.controller.groups.failures import RecoveryBudget, starts_over
from services.controller.loop import Loop
from services.controller.parts import Parts
from services.controller.roles import CHECKPOINTS, Roles
from services.controller.step.trainers import TrainerStub
from services.controller.tasks import FirstErrorGroup
from services.controller.wiring import read_data, wire

logger = logging.getLogger(__name__)

PROFILE_TIMEOUT_S = 24 * 3600.0
"""Deadline of a profile, which waits for the next steps, and in a paused run for its going on."""
TELL_LEASES = 2
"""Leases of patience with a worker that has not heard of the run's end: on a busy machine heartbeats come late."""
COUNTS_S = 2.0
"""Longest wait for the store's counts in an answer about the run: shorter than any caller's deadline."""


class ControllerRun:
    """One run. `run` drives it; the other methods are called by the servicer while it runs."""

    def __init__(self, settings: RunSettings) -> None:
        """Reads the user's estimator and connects to the store; ConfigError and StoreUnavailableError come from
        here. The data is read by `run`, for it may take minutes, in which workers join and people look; with
        data.preprocess here.
        """
        self._settings = settings
        settle(settings)
        self._wiring = wire(settings)
        self._connected = connected = self._wiring.connections
        self._ledger, self._threads, self._board = connected.ledger, connected.threads, connected.board
        self._fleet = connected.fleet
        # a function of the user's may need the main thread, as for signals, and may hold the interpreter
        self._data = read_data(self._wiring, lambda what: None) if settings.data.preprocess is not None else None
        self._parts: Parts
        """There once `run` has read the data."""
        self._counting: asyncio.Future[controller_pb2.LedgerCounts] | None = None
        """The newest look at the store's counts: one at a time, however many ask while the store is away."""
        self._remembering = asyncio.Lock()
        self._is_left = False
        """Whether it was stopped while a thread waited for the lock on the run, and may take it still."""
        self._over = False
        self._told: set[str] = set()
        """Consumer names of those that know it."""

    @property
    def states(self) -> StateClock:
        """Returns what the loop did with its time."""
        return self._board.states

    # --- the run ----------------------------------------------------------------------------------

    async def run(self, has_read: Callable[[], None] = lambda: None) -> None:
        """Reads the data, after which it calls `has_read`, locks the run, waits for the roles, runs the loop to its
        end. The error that ended the run is on the board, and raised.
        """
        try:
            self._parts = await self._read()
            has_read()
            latest = await self._threads.call(self._parts.checkpoints.latest)
            try:
                ctl = await self._threads.call(self._lock, latest[1].ctl if latest else 0)
            except asyncio.CancelledError:
                self._is_left = True
                raise
            try:
                position = await self._threads.call(self._ledger.position)
                # so that people are told where the run stands while its roles are waited for
                self._board.begin(position.step)
                self._board.published(position.published_step, position.policy_version)
                if self._board.steered:
                    await self._remember_pause()  # asked for while the data was read
                elif position.paused:
                    self._board.pause()  # now: people may have taken away the roles that are waited for
                recovery = _recovery(self._parts)
                await self._threads.call(recovery.require_columns, position, latest[1].step if latest else 0)
                await self._run_locked(ctl)
            finally:
                # nobody's run to give back, nobody to give it to, or a store that the next controller has to judge
                with contextlib.suppress(FencedError, StoreUnavailableError, StoreRolledBackError):
                    await self._threads.call(self._ledger.unlock)
            if self._board.failure:
                raise BudgetSpentError(self._board.failure)
            self._board.move(controller_pb2.RUN_STATE_DONE)
            self._over = True
        except Exception as error:
            self._over = _is_final(error)
            self._board.fail(error.message if isinstance(error, RoleCallError) else f"{type(error).__name__}: {error}")
            raise

    def _lock(self, known_ctl: int) -> int:
        """Takes the run, in a thread; gives it back at once when it was stopped meanwhile."""
        ctl = self._ledger.lock(self._settings.controller.lease_s, known_ctl)
        if self._is_left:
            self._ledger.unlock()
        return ctl

    async def _read(self) -> Parts:
        """The parts of the run, its data read beside the event loop."""
        loop = asyncio.get_running_loop()

        def tell(what: str) -> None:
            loop.call_soon_threadsafe(self._board.wait_for, what)

        self._board.wait_for("the prompts")
        # as long as the files are large; who stops this process does not wait for it
        data = self._data or await asyncio.to_thread(read_data, self._wiring, tell)
        self._data = None
        self._board.wait_for("the roles")
        return Parts(**vars(self._connected), **vars(data))

    async def _run_locked(self, ctl: int) -> None:
        async with FirstErrorGroup() as tasks:
            helpers = [tasks.create_task(self._beat()), tasks.create_task(self._fleet.watch())]
            await self._run_to_its_end(ctl)
            for helper in helpers:
                helper.cancel()

    async def _run_to_its_end(self, ctl: int) -> None:
        """Runs the loop, and starts it over from the store as often as failures.py allows."""
        budget = RecoveryBudget(self._settings.controller)
        while True:
            try:
                await self._live(ctl, budget)
                return
            except RoleCallError as error:
                if not (starts_over(error) or await self._store_went_back(error)):
                    raise
                budget.spend(error, self._board.step, self._board.newest_landed, paused=self._board.paused)
                logger.warning("starting over from the store after step %d: %s", self._board.step, error.message)
                self._board.start_over(error.message)
            await self._threads.settle()

    async def _live(self, ctl: int, budget: RecoveryBudget) -> None:
        """One life of the loop, to its end; none when a stop is asked for before it begins: BudgetSpentError where a
        checkpoint was asked for with it, and the newest one is of another step. Rollouts that share the trainers'
        devices begin to load when the trainers have, and stand where the store does; references in between, which a
        loop that starts over finds when it needs them.
        """
        parts = self._parts
        roles, shifts, recovering = Roles(parts, budget), parts.shifts, self._board.num_recoveries > 0
        scoring = set(self._settings.references_in_shifts)
        first = {"store", CHECKPOINTS, *(trainer.name for trainer in parts.trainers), *parts.references} - scoring
        then = {"rollouts"}
        # A scorer that is away is waited for by its groups, and the run has started with it.
        first |= set() if recovering else {"reward"}
        await shifts.begin(ctl)
        if not await roles.answer(first if shifts.are_taken else first | then):
            return await self._require_saved()
        if scoring and not recovering:
            await shifts.to_scoring(ctl)
            if not await roles.answer(scoring):
                return await self._require_saved()
            await shifts.to_training(ctl)
        budget.recovered()
        self._board.states.enter("recovering" if recovering else "starting")  # no more paused: its roles are here
        recovered = await _recovery(parts).run(ctl)
        await shifts.to_publishing(ctl)
        if shifts.are_taken and not await roles.answer(then):
            return await self._require_saved()
        await Loop(parts, recovered).run()

    async def _require_saved(self) -> None:
        """BudgetSpentError when the stop asks for a checkpoint, and the newest one is not of the step that the store
        stands at: no loop comes that makes it.
        """
        if not self._board.stop_with_checkpoint:
            return
        why = self._board.failure or f"the run was stopped while it waited for {self._board.waiting_for}"
        try:
            step = (await self._threads.call(self._ledger.position)).step
            latest = await self._threads.call(self._parts.checkpoints.latest)
        except RoleCallError as error:
            raise BudgetSpentError(f"{why}; whether there is a checkpoint is not known: {error.message}") from error
        if latest is None or latest[1].step != step:
            raise BudgetSpentError(f"{why}; no checkpoint of step {step} was saved")

    async def _store_went_back(self, error: RoleCallError) -> bool:
        """Whether the loop failed because the store lost what it had acknowledged, or may have: it is away now. Then a
        trainer finds no sealed batch, for instance. Rows that a batch needs are never gone else, nor columns of them:
        `Recovery.require_columns` refuses settings that train on others than were written.
        """
        try:
            await self._threads.call(
                self._ledger.fenced.give_up_rows if isinstance(error, RowMissingError) else self._ledger.beat
            )
        except StoreUnavailableError:
            return True
        except StoreRolledBackError:
            pass  # of this kind, or of another
        return self._ledger.fenced.take_set_back()

    async def _beat(self) -> None:
        """The controller's own heartbeat in the store, outages of which it outlives: runs until cancelled, and shows
        the numbers that say whether store and checkpoints take what they are given. FencedError when another controller
        took the run.
        """
        while True:
            heard = Metrics()
            heard.min("checkpoint/saved", 0 if self._board.unsaved else 1)
            try:
                await self._threads.call(self._ledger.beat)
                heard.min("store/reachable", 1)
            except (StoreUnavailableError, StoreRolledBackError) as error:  # what was lost is the loop's to act on
                logger.warning("the store does not hear this controller: %s", error.message)
                heard.min("store/reachable", 0)
            export(heard)
            await asyncio.sleep(self._settings.controller.lease_s / 5)

    async def close(self) -> None:
        """Lets go of everything; trackers show how the run stands."""
        failed = self._board.state == controller_pb2.RUN_STATE_FAILED
        if self._board.failure:  # given up, if this process was ended before its loop was
            end = End.FAILED
        elif self._over:
            end = End.FAILED if failed else End.DONE
        else:
            end = End.GOES_ON if failed else End.STOPPED
        await self._wiring.close(end)

    # --- what the servicer asks -------------------------------------------------------------------

    def join(self, request: controller_pb2.JoinRequest) -> controller_pb2.JoinResponse:
        """Takes a worker into the fleet."""
        self._fleet.join(request)
        controller = self._settings.controller
        return controller_pb2.JoinResponse(
            ctl=self._ledger.ctl, heartbeat_s=controller.heartbeat_s, lease_s=controller.lease_s
        )

    def role_of(self, worker: str) -> controller_pb2.Role.ValueType | None:
        """The role as which a worker of this name joined; None while none is a member."""
        return self._fleet.role_of(worker)

    def heartbeat(self, request: controller_pb2.HeartbeatRequest) -> controller_pb2.HeartbeatResponse:
        """Notes a worker's sign of life, and tells it when the run is over."""
        self._fleet.heartbeat(request)
        if self._over:
            self._told.add(f"{request.worker}.{request.incarnation}")
        return controller_pb2.HeartbeatResponse(ctl=self._ledger.ctl, over=self._over)

    async def told_the_end(self) -> None:
        """Returns when every worker that lives has been told that the run is over, after TELL_LEASES leases at the
        latest; at once when it goes on under another controller.
        """
        if self._over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_LEASES * self._settings.controller.lease_s):
                    while not self._fleet.consumers() <= self._told:
                        await asyncio.sleep(self._settings.controller.heartbeat_s / 4)

    async def status(self) -> controller_pb2.RunStatus:
        """The run as it stands, within COUNTS_S. Counts that the store does not give in time are absent, and `trouble`
        says why.
        """
        board, workers, trouble = self._board, self._fleet.statuses(), [self._connected.reward.trouble]
        if any(trouble):  # which of its scorers is behind it a service of ours knows itself
            trouble += [f"{each.worker}: {each.phase}" for each in workers if each.role == controller_pb2.ROLE_REWARD]
        trouble.append(board.unsaved)
        ledger = None
        try:
            if self._ledger.ctl:
                ledger = await self._counts()
        except StoreUnavailableError as error:
            trouble.insert(0, error.message)
        except TimeoutError:
            trouble.insert(0, f"the store gave no counts within {COUNTS_S:g} s")
        # Also while the roles are awaited that people have taken away: they know, and a start would look like news.
        rests = board.state == controller_pb2.RUN_STATE_RUNNING or board.states.state == "paused"
        state = controller_pb2.RUN_STATE_PAUSED if board.paused and rests else board.state
        if board.stop_requested and state == controller_pb2.RUN_STATE_RUNNING:
            state = controller_pb2.RUN_STATE_STOPPING
        return controller_pb2.RunStatus(
            run=self._settings.run.name,
            state=state,
            step=board.step,
            total_steps=self._settings.run.total_steps,
            published_step=board.published_step,
            policy_version=board.policy_version,
            ledger=ledger,
            workers=workers,
            metrics=[*board.step_metrics.to_proto(), *board.evaluation_metrics.to_proto()],
            error=board.error,
            waiting_for=board.waiting_for,
            num_recoveries=board.num_recoveries,
            last_failure=board.last_failure,
            last_drop=board.last_drop,
            trouble="; ".join(filter(None, trouble)),
        )

    async def _counts(self) -> controller_pb2.LedgerCounts:
        """The ledger's balance. TimeoutError after COUNTS_S; the look goes on for those who ask next."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.ensure_future(self._threads.call(self._ledger.counts))
            # it may fail when all who asked have gone
            self._counting.add_done_callback(lambda look: look.cancelled() or look.exception())
        async with asyncio.timeout(COUNTS_S):
            return await asyncio.shield(self._counting)

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
        async with self._remembering:  # bounded: by the store's retry_s; in line, so that the last wish stands
            if self._ledger.ctl:  # before that the ledger's word is taken at the start
                await self._threads.call(self._ledger.pause, self._board.paused)

    def stop(self, *, checkpoint: bool, failure: str) -> None:
        """End after the step in progress, as failed where `failure` says of what."""
        self._board.stop(checkpoint=checkpoint, failure=failure)

    async def profile(self, worker: str, num_steps: int) -> AsyncIterator[training_pb2.ProfileResponse]:
        """Has a trainer or a rollout record its next steps, and yields what it answers. The caller's deadline bounds
        the wait. InvalidInputError for a worker that this run does not have.
        """
        stubs: dict[str, TrainerStub | RolloutServiceStub] = {
            **{trainer.name: trainer.stub for trainer in self._connected.trainers},
            **{rollout.join.worker: rollout.stub for rollout in self._fleet.rollouts()},
        }
        if worker not in stubs:
            raise InvalidInputError(f"this run has no worker {worker} to profile; name one of {', '.join(stubs)}")
        request = training_pb2.ProfileRequest(ctl=self._ledger.ctl, num_steps=num_steps)
        async for response in stubs[worker].Profile(request, timeout=PROFILE_TIMEOUT_S):
            yield response

    async def save_checkpoint(self) -> tuple[str, int]:
        """(path, step) of a checkpoint made at the next step boundary. The caller's deadline bounds the wait."""
        saved = self._board.request_checkpoint()
        return await asyncio.shield(saved)  # bounded: by the caller's deadline


def _recovery(parts: Parts) -> Recovery:
    """The way back into the run of these parts."""
    return Recovery(
        parts.settings,
        parts.ledger,
        parts.rows,
        parts.threads,
        parts.trainers,
        parts.checkpoints,
        parts.prompt_bytes,
        parts.board.wait_for,
    )


def _is_final(error: Exception) -> bool:
    """Whether the run is over with `error`: no other controller has it, and starting this one again cannot help."""
    return (
        isinstance(error, RoleCallError)
        and not error.retryable
        and not isinstance(error, (FencedError, RunLockedError))
    )
