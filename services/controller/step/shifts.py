"""The shifts on devices that rollouts and trainers share: which side holds their memory, and how it changes hands.

    training     rollouts asleep; actor and critic hold all their state, or take it as they need it
    publishing   rollouts awake; the actor holds its parameters, which it sends, and nothing else of the trainers
    sampling     rollouts awake; everything of actor and critic is in host memory
    scoring      rollouts asleep, actor and critic in host memory: for references that leave the devices otherwise

    training ──Offload──▶ publishing ──Offload──▶ sampling ──Pause, Sleep──▶ [scoring ──Offload──▶] training

`begin` brings the devices to `training` from whatever an earlier life of the loop, another controller or a kill left
behind: every call may be repeated, and the locks of rolecall/shifts.py, not the calls, say when a side has left. No
shift is remembered anywhere else. Where nothing is shared, no method does anything.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from rolecall.errors import DeadlineError, DeviceFullError, FencedError, RoleCallError, UnavailableError
from rolecall.rpc.client_calls import is_being_cancelled
from rolecall.settings import OptimizerSection, RunSettings
from rolecall.shifts import ShiftLocks, Side
from rolecall.telemetry import Metrics
from rolecall.v1 import rollout_pb2, training_pb2
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.board import RunBoard
from services.controller.fleet.liveness import Loss, Rollout
from services.controller.fleet.members import Fleet
from services.controller.step.trainers import MOVE_TIMEOUT_S, ActorTrainer, CriticTrainer
from services.controller.tasks import at_once

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Seconds between two looks at whether a side has left the devices."""
RETRY_S = 1.0
"""Seconds before a rollout that did not answer is asked again to wake."""


class DeviceShifts:
    """The shifts of one controller: it directs who holds the memory of shared devices."""

    def __init__(
        self,
        settings: RunSettings,
        fleet: Fleet,
        board: RunBoard,
        actor: ActorTrainer,
        critic: CriticTrainer | None,
        references: Mapping[str, ReferenceServiceStub],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._board = board
        self._actor, self._critic = actor, critic
        self._references = {name: references[name] for name in settings.references_in_shifts}
        self._locks = ShiftLocks(settings.run.dir) if settings.takes_shifts else None
        self._shift: Literal["none", "training", "publishing", "sampling", "scoring"] = "none"
        # The base of adapters comes from model.path, and nobody would send it.
        self._level = 2 if settings.published_adapters is None else 1
        self._pause_mode = rollout_pb2.PAUSE_MODE_KEEP if settings.keeps_over_shifts else rollout_pb2.PAUSE_MODE_ABORT
        self._seconds = Metrics()

    @property
    def are_taken(self) -> bool:
        """Whether anything is shared."""
        return self._locks is not None

    @property
    def is_sampling(self) -> bool:
        """Whether rollouts may sample."""
        return self._locks is None or self._shift == "sampling"

    def take_seconds(self) -> Metrics:
        """Returns what the changes since the last call took."""
        seconds, self._seconds = self._seconds, Metrics()
        return seconds

    async def begin(self, ctl: int) -> None:
        """Sends every rollout to sleep: trainers may load their models, and hold what they like."""
        self._shift = "none"
        await self._to_training(ctl)

    async def to_training(self, ctl: int) -> None:
        """The trainers' shift. DeviceFullError where they lack memory."""
        if self._locks is not None and self._shift != "training":
            started = time.monotonic()
            await self._to_training(ctl)
            self._board.wait_for("the trainers to take the shared devices", "switching")
            optimizers = self._settings.actor.optimizer, self._settings.critic_optimizer
            await at_once(
                [
                    trainer.onload(ctl, *_parts_of(optimizer))
                    for trainer, optimizer in zip((self._actor, self._critic), optimizers, strict=True)
                    if trainer is not None and optimizer is not None
                ]
            )
            self._took("to_training", started)

    async def to_scoring(self, ctl: int) -> None:
        """The references' shift: they may hold what they like, or load."""
        if self._locks is not None and self._shift != "scoring":
            started = time.monotonic()
            if self._shift != "sampling":
                await at_once([trainer.offload(ctl) for trainer in self._trainers])
            await self._clear(ctl, "references")
            self._shift = "scoring"
            self._took("to_scoring", started)

    async def _to_training(self, ctl: int) -> None:
        if self._locks is None:
            return
        await self._clear(ctl, "trainers")
        self._shift = "training"

    async def _clear(self, ctl: int, side: Side) -> None:
        """Has rollouts, and references that may be there, leave the devices to `side`."""
        was_scoring = self._shift == "scoring"
        there = set(self._references) if self._shift in ("none", "scoring") else set()
        who = "references" if was_scoring else "rollouts and references" if there else "rollouts"
        self._board.wait_for(f"the {who} to leave the shared devices", "switching")
        self._fleet.revoke()
        asleep: set[str] = set()

        async def ask() -> None:
            awake = [] if was_scoring else [each for each in self._fleet.rollouts() if each.consumer not in asleep]
            answered = await self._each(awake, lambda rollout: self._put_to_sleep(ctl, rollout))
            asleep.update(rollout.consumer for rollout in answered)
            there.difference_update(await self._offload(ctl, sorted(there)))

        await self._give_to(side, ask)

    async def _offload(self, ctl: int, references: Sequence[str]) -> list[str]:
        """Returns those that answered. One that is gone holds nothing, as its lock says; another is asked again."""
        request = training_pb2.OffloadRequest(ctl=ctl)
        calls = [self._references[name].Offload(request, timeout=MOVE_TIMEOUT_S) for name in references]
        outcomes = await asyncio.gather(*(_outcome(call) for call in calls))
        for name, error in zip(references, outcomes, strict=True):
            if isinstance(error, FencedError):
                raise error
            if error is not None and not isinstance(error, UnavailableError):
                logger.warning("reference %s does not leave the shared devices: %s", name, error.message)
        return [name for name, error in zip(references, outcomes, strict=True) if error is None]

    async def _put_to_sleep(self, ctl: int, rollout: Rollout) -> None:
        pause = rollout_pb2.PauseRequest(ctl=ctl, mode=self._pause_mode)
        try:
            await rollout.stub.Pause(pause, timeout=MOVE_TIMEOUT_S)
        except DeadlineError as error:  # of commits on their way out, which the store holds up; it is asked again
            raise UnavailableError(error.message) from error
        await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=ctl, level=self._level), timeout=MOVE_TIMEOUT_S)

    async def to_publishing(self, ctl: int) -> None:
        """Rollouts awake, beside the actor's parameters. DeviceFullError where they lack memory."""
        if self._locks is None or self._shift == "publishing":
            return
        started = time.monotonic()
        self._board.wait_for("the trainers to leave the shared devices", "switching")
        moves = [self._actor.offload(ctl, training_pb2.STATE_PART_OPTIMIZER, training_pb2.STATE_PART_GRADIENTS)]
        moves += [self._critic.offload(ctl)] if self._critic else []
        await at_once(moves)

        async def nobody() -> None:
            """A trainer that loads is waited for: the loss of the one before ends this wait."""

        await self._give_to("rollouts", nobody)
        self._board.wait_for("the rollouts to wake", "switching")
        await self._wake_all(ctl)
        self._shift = "publishing"
        self._took("to_publishing", started)

    async def _wake_all(self, ctl: int) -> None:
        """Wakes the rollouts. One that does not wake in time is given up: asleep, it would hold what it has begun."""
        wake_up = rollout_pb2.WakeUpRequest(ctl=ctl)
        give_up_at, woken = time.monotonic() + MOVE_TIMEOUT_S, set[str]()
        while asleep := [rollout for rollout in self._fleet.rollouts() if rollout.consumer not in woken]:
            if time.monotonic() > give_up_at:
                for rollout in asleep:
                    self._fleet.give_up(rollout, Loss(f"it did not wake within {MOVE_TIMEOUT_S:.0f} s", is_final=True))
                return
            answered = await self._each(asleep, lambda rollout: rollout.stub.WakeUp(wake_up, timeout=MOVE_TIMEOUT_S))
            woken.update(rollout.consumer for rollout in answered)
            if len(answered) < len(asleep):
                await asyncio.sleep(RETRY_S)

    async def to_sampling(self, ctl: int) -> None:
        """Nothing of the trainers is left on the devices."""
        if self._locks is not None and self._shift != "sampling":
            started = time.monotonic()
            await at_once([trainer.offload(ctl) for trainer in self._trainers])
            self._shift = "sampling"
            self._took("to_sampling", started)

    @property
    def _trainers(self) -> list[ActorTrainer | CriticTrainer]:
        return [self._actor, self._critic] if self._critic else [self._actor]

    def _took(self, change: str, started: float) -> None:
        self._seconds.sum(f"shift/{change}_s", time.monotonic() - started)

    async def _give_to(self, side: Side, ask: Callable[[], Awaitable[None]]) -> None:
        """Returns when nobody of another side is on the devices; `ask`s them meanwhile. Who is about to load there
        is waited for. DeadlineError.
        """
        assert self._locks is not None
        timeout_s = MOVE_TIMEOUT_S + self._settings.controller.start_timeout_s
        give_up_at = time.monotonic() + timeout_s
        await ask()
        while not self._locks.give_to(side):
            if time.monotonic() > give_up_at:
                raise DeadlineError(
                    f"the shared devices could not be given to the {side} within {timeout_s:.0f} s: a process of "
                    "another side is on them and does not leave; see the logs of those that `rolecall status` names"
                )
            await asyncio.sleep(LOOK_S)
            await ask()

    async def _each(self, rollouts: Sequence[Rollout], call: Callable[[Rollout], Awaitable[object]]) -> list[Rollout]:
        """Returns those that answered. One that cannot do it is given up, and started again; the fleet sees to who is
        gone. DeviceFullError, FencedError.
        """
        outcomes = await asyncio.gather(*(_outcome(call(rollout)) for rollout in rollouts))
        for rollout, error in zip(rollouts, outcomes, strict=True):
            if isinstance(error, FencedError | DeviceFullError):
                raise error
            if isinstance(error, UnavailableError):
                logger.warning("%s does not answer: %s", rollout.consumer, error.message)
            elif error is not None and rollout in self._fleet.rollouts():
                self._fleet.give_up(rollout, Loss(f"it cannot sleep or wake: {error.message}", is_final=True))
        return [rollout for rollout, error in zip(rollouts, outcomes, strict=True) if error is None]

    def close(self) -> None:
        """Lets go of the devices."""
        if self._locks is not None:
            self._locks.close()


def _parts_of(optimizer: OptimizerSection) -> list[training_pb2.StatePart.ValueType]:
    """The state of a trainer that is on the device for as long as its shift."""
    parts = [training_pb2.STATE_PART_PARAMETERS, training_pb2.STATE_PART_GRADIENTS]
    return parts if optimizer.offload else [*parts, training_pb2.STATE_PART_OPTIMIZER]


async def _outcome(call: Awaitable[object]) -> RoleCallError | None:
    try:
        await call  # bounded: each is a call, and a call has a deadline
    except RoleCallError as error:
        return error
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        return UnavailableError("the connection was closed: it was given up")
    return None
