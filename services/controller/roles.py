"""The wait for the roles of a run, and for the store and the checkpoints' storage, which its loop begins with.

Owns what an answer of each is. Which of them are awaited, and when, is run.py's.
"""

import asyncio

from rolecall.errors import BudgetSpentError, ConfigError, RoleCallError, ScorerLoadingError, ScorerUnavailableError
from rolecall.scoring.client import algorithm_problem
from rolecall.settings import shadows_of
from rolecall.v1 import reference_pb2
from services.controller.groups.failures import RecoveryBudget
from services.controller.groups.prompts import Cursor
from services.controller.parts import Parts

ROLE_POLL_S = 0.25
"""Pause between two looks at a role that is not up yet."""
CHECKPOINTS = "the checkpoints' storage"
"""The name under which the storage is awaited as a role is: a recovery reads the newest."""


class Roles:
    """The roles of one life of the loop, until they answer."""

    def __init__(self, parts: Parts, budget: RecoveryBudget) -> None:
        """Time in which people have paused the run is no failure of `budget`'s."""
        self._parts, self._budget = parts, budget
        self._unanswered: dict[str, RoleCallError] = {}
        """Last error by role that is waited for."""

    async def answer(self, missing: set[str]) -> bool:
        """True when every role of `missing`, and the store where it is one, answers; false when a stop is asked for
        meanwhile. BudgetSpentError names those that did not in time.
        """
        controller, recovering = self._parts.settings.controller, self._parts.board.num_recoveries > 0
        name, timeout_s = (
            ("stall_timeout_s", controller.stall_timeout_s)
            if recovering
            else ("start_timeout_s", controller.start_timeout_s)
        )
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while missing:
                    if self._parts.board.paused:  # people may have taken the roles away until they resume it
                        limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
                        self._budget.paused()
                    state = "recovering" if recovering else "starting"
                    self._parts.board.wait_for(", ".join(self._awaited(role) for role in sorted(missing)), state)
                    if self._parts.board.stop_requested:
                        return False
                    missing = {role for role in missing if not await self._answers(role)}
                    await asyncio.sleep(ROLE_POLL_S if missing else 0)
        except TimeoutError as error:
            why = "".join(
                f"; {role}: {self._unanswered[role].message}" for role in sorted(missing & self._unanswered.keys())
            )
            who = ", ".join(self._awaited(role) for role in sorted(missing))
            raise BudgetSpentError(
                f"{who} did not come up within controller.{name} = {timeout_s:.0f} s; see their logs{why}"
            ) from error
        return True

    async def _enough_rollouts(self) -> bool:
        """A run starts with all the replicas that it names; one that goes on does so with the first, and the others
        join at a step boundary.
        """
        number = len(self._parts.fleet.rollouts())
        return number >= self._parts.settings.num_first_rollouts or (
            number > 0 and (await self._parts.threads.call(self._parts.ledger.position)).published_step >= 0
        )

    async def _reward_answers(self) -> bool:
        """A run starts with all its scorers; one that goes on does so without those of weight 0 that are away.
        ScorerUnavailableError.
        """
        spec = await self._parts.reward.describe()
        if problem := algorithm_problem(self._parts.settings.algorithm, spec):
            raise ConfigError(problem)
        missing = shadows_of(self._parts.settings.reward.components) - {part.name for part in spec.components}
        if not missing or (await self._parts.threads.call(self._parts.ledger.position)).published_step >= 0:
            return True
        self._parts.reward.forget()
        raise ScorerUnavailableError(
            f"the scorers of {', '.join(f'reward.components.{name}' for name in sorted(missing))} have not answered; "
            "correct their addresses or start them, see the reward's log"
        )

    async def _answers(self, name: str) -> bool:
        if self._parts.fleet.is_lost(name):
            return False
        try:
            if name == "store":
                position = await self._parts.threads.call(self._parts.ledger.position)
                place = Cursor.decode(position.cursor)  # seen before any model has loaded
                await self._parts.threads.call(place.within, self._parts.raw_prompts)
            elif name == CHECKPOINTS:
                await self._parts.threads.call(self._parts.checkpoints.latest)
            elif name == "rollouts":
                return await self._enough_rollouts()
            elif name == "reward":
                return await self._reward_answers()
            elif name in self._parts.references:
                info = await self._parts.references[name].GetInfo(reference_pb2.GetReferenceInfoRequest())
                if info.instance != name:  # it would write the columns that it is asked for, of another model
                    raise ConfigError(
                        f"references.{name}.address: the reference {info.instance!r} answers there; correct the address"
                    )
            else:
                await next(trainer for trainer in self._parts.trainers if trainer.name == name).info()
        except RoleCallError as error:
            if not error.retryable:
                raise
            self._unanswered[name] = error
            return False
        return True

    def _awaited(self, name: str) -> str:
        if isinstance(self._unanswered.get(name), ScorerLoadingError):
            return f"{name} (a server of its scorers is loading)"
        number, wanted = len(self._parts.fleet.rollouts()), self._parts.settings.num_first_rollouts
        return f"{name} ({number} of {wanted})" if name == "rollouts" and 0 < number < wanted else name
