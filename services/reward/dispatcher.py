"""The dispatcher of responses to scorers: every component scores them, at the same time, and the weighted sum is the
reward.

Owns the components: local ones share a pool of worker processes, external ones are RewardServices called with
`rolecall.scoring.client`, or HTTP servers called with `external/component.py`. Knows no servers and no requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from rolecall.errors import RoleCallError, ScorerError, ScorerUnavailableError, WorkerLostError
from rolecall.scoring.awaited import TIMEOUT
from rolecall.scoring.client import open_external
from rolecall.scoring.exchange import only
from rolecall.scoring.items import groups_of
from rolecall.scoring.retries import Retries
from rolecall.scoring.scores import Failure, Outcome, Score, decode_reward
from rolecall.settings import CodeScorer, ExternalScorer, RpcSection, scorer_environment
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.telemetry.states import StateClock
from rolecall.v1 import reward_pb2
from services.reward import catalog
from services.reward.compose import compose, compose_spec
from services.reward.config import RewardSettings
from services.reward.pool import CPU_SPENT, WORKER_DIED, WorkerPool
from services.reward.underway import Underway

logger = logging.getLogger(__name__)

DESCRIBE_PAUSE_S = 0.5
_AT_FAULT = (WORKER_DIED, TIMEOUT, WorkerLostError.reason)
"""Codes of an item that has no score for want of a worker or, if it is a program, of the machine's memory. An item
that fails so each time takes them away itself.
"""


class Component(Protocol):
    """A named part of the reward. `RewardClient` is one, too."""

    async def describe(self) -> reward_pb2.DescribeResponse:
        """Returns what it reads and returns."""
        ...

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """One outcome per item, in order."""
        ...


class Elsewhere(Component, Protocol):
    """A component whose scorer is another server."""

    @property
    def described(self) -> reward_pb2.DescribeResponse | None:
        """The newest description that means the same as the first; None before there is one."""
        ...

    @property
    def trouble(self) -> str:
        """The reason why it gives no scores at present; empty while it does."""
        ...


class LocalComponent:
    """A built-in scorer or a user's function, run by the pool."""

    def __init__(self, name: str, scorer: catalog.LocalScorer, pool: WorkerPool, max_attempts: int) -> None:
        self._name = name
        self._spec = catalog.describe(name, scorer)
        self._pool = pool
        self._retries = Retries(max_attempts, ScorerMeter(name), lambda: self._spec.whole_groups)

    async def describe(self) -> reward_pb2.DescribeResponse:
        """Returns the description that follows from the configuration."""
        return self._spec

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """One outcome per item, in order; retryable failures were tried max_attempts times. An item that kills or holds
        its worker each time is bad data.
        """
        return await self._retries.outcomes(self._attempt, items)

    async def _attempt(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        sent = [only(item, self._spec) for item in items]
        return [_outcome(result) for result in await self._pool.score(self._name, sent)]


class Dispatcher:
    """The components of a reward service, asked at once. `start` before `score`, `close` at the end."""

    def __init__(self, settings: RewardSettings, rpc: RpcSection) -> None:
        self._settings = settings
        local, components = settings.local, settings.components
        self._shadows = settings.shadows
        timeouts_s = {name: components[name].timeout_s for name in local}
        environment = scorer_environment(settings.environment)
        self._pool = (
            WorkerPool(local, timeouts_s, settings.num_workers, settings.search_path, environment) if local else None
        )
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._external: dict[str, Elsewhere] = {
            name: self._open(name, scorer, rpc) for name, scorer in settings.external.items()
        }
        self._components: dict[str, Component] = {}
        for name in components:
            if name in self._external:
                self._components[name] = self._external[name]
            elif self._pool is not None:
                self._components[name] = LocalComponent(name, local[name], self._pool, self._attempts(name))
        self.states = StateClock(("starting", "waiting", "scoring"))
        """What it does: it scores while any item is under way."""
        self._underway = Underway(self._scored, self._units)
        self._num_calls = 0
        self._weights = {name: component.weight for name, component in components.items()}
        self._routed = {
            name: component
            for name, component in components.items()
            if component.when or (component.is_given and not settings.plays_all)
        }
        self._fields = {field for component in self._routed.values() for field in component.when}
        """Fields of the items' metadata that say which components apply."""
        self._trials = {name: client for name, client in self._external.items() if name in self._shadows}
        """Shadows whose scorer is elsewhere: nothing waits for them but their own scores."""
        self._asked = {name: asyncio.Event() for name in self._trials}
        """Set once a shadow elsewhere has answered what it is, or has not."""
        self._reaching: list[asyncio.Task[None]] = []
        self._gives_token_rewards = False
        """Known from the start on; a scorer that changes it within the run is refused."""

    async def start(self, *, awaits_shadows: bool = True) -> None:
        """Returns when every component can score, or all but the shadows. ConfigError when a local one never will,
        ScorerUnavailableError when an external one that is waited for does not answer.
        """
        if not awaits_shadows:
            self._reaching = [asyncio.create_task(self._look_for(*trial)) for trial in self._trials.items()]
        if self._pool is not None:
            await self._pool.start()
        awaited = {name: self._external[name] for name in self._external if awaits_shadows or name not in self._trials}
        await asyncio.gather(*(self._reach(name, client) for name, client in awaited.items()))
        self._gives_token_rewards = (await self.describe()).token_rewards
        self.states.enter("waiting")

    async def describe(self) -> reward_pb2.DescribeResponse:
        """The description of the weighted sum, without the shadows elsewhere that have not been there yet. It says of
        them beforehand what would change its meaning when they come: that they may compare the responses of a group.
        """
        specs = {}
        # bounded: by the deadline of one Describe; what a shadow reads is not known before
        await asyncio.gather(*(asked.wait() for asked in self._asked.values()))
        for name, component in self._components.items():
            spec = self._trials[name].described if name in self._trials else await component.describe()
            if spec is not None:
                specs[name] = spec
        joined = compose_spec("reward", specs, self._weights, self._routed, self._shadows)
        joined.whole_groups = joined.whole_groups or (bool(self._trials) and self._settings.takes_large)
        return joined

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoreResult]:
        """One result per item, in order. Ids must be unique."""
        outcomes = await self._underway.outcomes(items)
        return [
            compose(
                item,
                of_item if of_item.keys() - self._shadows else {},
                self._weights,
                token_rewards=self._gives_token_rewards,
            )
            for item, of_item in zip(items, outcomes, strict=True)
        ]

    def _units(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Sequence[int]]:
        """Each group by itself where nothing is lost by that, so that one that hangs holds up no other; else all of
        them as they came: scorers elsewhere and functions of many take large batches.
        """
        pool = self._pool
        if self._settings.external or (pool is not None and any(map(pool.batches, self._settings.local))):
            return [range(len(items))] if items else []
        return groups_of(items)

    def _attempts(self, name: str) -> int:
        """Tries of an item by a component; a shadow must not hold the others up."""
        return 1 if name in self._shadows else self._settings.components[name].max_attempts

    async def _scored(self, items: Sequence[reward_pb2.ScoreItem]) -> list[dict[str, Outcome]]:
        """An outcome by component that applies, in the components' order, per item."""
        self._num_calls += 1
        self.states.enter("scoring")
        try:
            return await self._outcomes(items)
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self.states.enter("waiting")

    async def _outcomes(self, items: Sequence[reward_pb2.ScoreItem]) -> list[dict[str, Outcome]]:
        places = self._places(items)
        scored = await asyncio.gather(
            *(self._components[name].score([items[place] for place in found]) for name, found in places.items())
        )
        outcomes: list[dict[str, Outcome]] = [{} for _ in items]
        for (name, found), of_component in zip(places.items(), scored, strict=True):
            for place, outcome in zip(found, of_component, strict=True):
                if name not in self._shadows:
                    outcomes[place][name] = outcome
                elif isinstance(outcome, Score):
                    outcomes[place][name] = replace(outcome, token_rewards=None)
        return outcomes

    def _places(self, items: Sequence[reward_pb2.ScoreItem]) -> dict[str, Sequence[int]]:
        """Places of the items that each component applies to; no component without any."""
        fields = [{field: item.metadata[field] for field in self._fields if field in item.metadata} for item in items]
        places: dict[str, Sequence[int]] = {}
        for name in self._components:
            routed = self._routed.get(name)
            places[name] = [
                place
                for place, (item, metadata) in enumerate(zip(items, fields, strict=True))
                if routed is None or routed.applies_to(metadata, item.environment)
            ]
        return {name: found for name, found in places.items() if found}

    @property
    def trouble(self) -> str:
        """The scorers that give no scores at present: external ones, and where they are, and those whose last items all
        took too long; empty when all do.
        """
        silent = [
            f"{name} at {self._settings.external[name].address}"
            for name, client in self._external.items()
            if client.trouble
        ]
        late = self._pool.late if self._pool is not None else {}
        silent += [f"{name} ({lateness})" for name, lateness in late.items()]
        return f"no scores from {', '.join(silent)}" if silent else ""

    async def close(self) -> None:
        """Kills the workers and closes the connections."""
        self._underway.close()
        for task in self._reaching:
            task.cancel()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        for close in self._closers:
            await close()

    def _open(self, name: str, scorer: ExternalScorer | CodeScorer, rpc: RpcSection) -> Elsewhere:
        timeout_s, max_attempts = self._settings.components[name].timeout_s, self._attempts(name)
        if scorer.kind == "external":
            client, channel = open_external(name, scorer, rpc, timeout_s=timeout_s, max_attempts=max_attempts)
            self._closers.append(channel.close)
            return client
        from services.reward.external.component import open_http  # httpx2: a quarter of a second

        component = open_http(name, scorer, rpc, timeout_s=timeout_s, max_attempts=max_attempts)
        self._closers.append(component.close)
        return component

    async def _look_for(self, name: str, client: Elsewhere) -> None:
        """Has a shadow described before it is to score; told where it is not."""
        try:
            await self._reach(name, client)
        except RoleCallError as error:
            logger.warning("no item is scored by the shadow %s until it answers: %s", name, error.message)

    async def _reach(self, name: str, client: Elsewhere) -> None:
        start_timeout_s = self._settings.start_timeout_s
        last: RoleCallError | None = None
        try:
            async with asyncio.timeout(start_timeout_s):
                while True:
                    try:
                        await client.describe()
                        return
                    except RoleCallError as error:
                        if not error.retryable:
                            raise
                        last = error
                    finally:
                        if name in self._asked:
                            self._asked[name].set()
                    await asyncio.sleep(DESCRIBE_PAUSE_S)
        except TimeoutError:
            raise ScorerUnavailableError(
                f"the scorer of component {name!r} did not answer within {start_timeout_s:.0f} s: "
                f"{last.message if last else 'no connection'}",
                component=name,
            ) from last


def _outcome(result: reward_pb2.ScoreResult) -> Outcome:
    match result.WhichOneof("outcome"):
        case "error" if result.error.code == CPU_SPENT:  # bounds are of scorers of answers, and it has none
            return Score(0.0)
        case "error":
            at_fault = result.error.code in _AT_FAULT
            return Failure(result.error.code, result.error.message, result.error.retryable, is_blamed=at_fault)
        case "reward":
            return decode_reward(result.reward)
        case None:  # an unset reward would read as 0
            return Failure(ScorerError.reason, "its process answered neither a reward nor an error")
