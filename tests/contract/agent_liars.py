"""Liars that run episodes by an agent of their own, and break a rule of RunEpisode: each one of them, and keeps all
others.
"""

import asyncio
from typing import Any

import httpx

from rolecall.errors import RateLimitedError, RoleCallError, SessionLostError
from tests.contract.agent_honest import HonestAgent, Ran, RunCall, SpentError
from tests.contract.environment_honest import LEASE_S, Answer, CloseCall, Closed, Kept, State, StepCall
from tests.contract.liars import Liars

LIARS = Liars(HonestAgent)


@LIARS.being("run.asks")
class Knowing(HonestAgent):
    """It does without the policy."""

    async def talk(self, kept: Kept, request: RunCall) -> None:
        kept.said.append("I know.")


@LIARS.being("run.instead")
class Both(HonestAgent):
    """It takes turns, too."""

    async def Step(self, request: StepCall, context: Any) -> Answer:
        self.kept(request.session)
        return Answer(state=State.EPISODE_STATE_CONTINUES)


@LIARS.being("run.state")
class Stateless(HonestAgent):
    """It does not say how an episode ended."""

    async def work(self, kept: Kept, request: RunCall) -> Ran:
        ran: Ran = await super().work(kept, request)
        return Ran(reward=ran.reward)


@LIARS.being("run.reward")
class Unrewarded(HonestAgent):
    """It declares a reward, and gives none."""

    async def work(self, kept: Kept, request: RunCall) -> Ran:
        ran: Ran = await super().work(kept, request)
        return Ran(state=ran.state)


@LIARS.being("run.reward")
class Undeclared(HonestAgent):
    """It rewards, and declares none."""

    def __init__(self) -> None:
        super().__init__()
        self.spec.ClearField("reward")
        self.spec.ClearField("components")


@LIARS.being("reward.value")
class Generous(HonestAgent):
    """Its rewards are beyond their range."""

    def reward(self, kept: Kept) -> Any:
        given = super().reward(kept)
        given.value += 1.0
        return given


@LIARS.being("reward.components")
class Bare(HonestAgent):
    """Its rewards have no components."""

    def reward(self, kept: Kept) -> Any:
        given = super().reward(kept)
        given.components.clear()
        return given


@LIARS.being("run.repeated")
class Again(HonestAgent):
    """A repeated run is run again."""

    async def RunEpisode(self, request: RunCall, context: Any) -> Any:
        kept = self.kept(request.session)
        if kept.answering is not None and kept.answering.done() and self.is_same(kept, request):
            kept.answering = None
            kept.said.clear()
        return await super().RunEpisode(request, context)


@LIARS.being("run.attached")
class Twice(HonestAgent):
    """Asked again while it runs, it sends another agent along."""

    async def RunEpisode(self, request: RunCall, context: Any) -> Any:
        kept = self.kept(request.session)
        if kept.answering is not None and not kept.answering.done() and self.is_same(kept, request):
            return await self.work(Kept(kept.request, kept.opening), request)
        return await super().RunEpisode(request, context)


@LIARS.being("run.conflict")
class Obliging(HonestAgent):
    """Whatever is asked gets the answer that there is."""

    def is_same(self, kept: Kept, request: RunCall) -> bool:
        return True


@LIARS.being("run.budget")
class Stubborn(HonestAgent):
    """It does not take 403 for an answer."""

    async def ask(self, client: httpx.AsyncClient, request: RunCall, said: list[dict[str, str]]) -> str:
        while True:
            try:
                return await super().ask(client, request, said)
            except SpentError:
                await asyncio.sleep(0.5)


@LIARS.being("run.failure")
class Consoling(HonestAgent):
    """When the endpoint fails, the episode is worth nothing."""

    async def talk(self, kept: Kept, request: RunCall) -> None:
        try:
            await super().talk(kept, request)
        except RoleCallError as error:
            if "401" in error.message:
                raise


@LIARS.being("run.failure")
class Lonely(HonestAgent):
    """When nobody listens, the episode is worth nothing."""

    async def talk(self, kept: Kept, request: RunCall) -> None:
        try:
            await super().talk(kept, request)
        except RoleCallError as error:
            if "gone" not in error.message:
                raise


@LIARS.being("run.revoked")
class Loyal(HonestAgent):
    """It waits until its key is good again."""

    async def ask(self, client: httpx.AsyncClient, request: RunCall, said: list[dict[str, str]]) -> str:
        while True:
            try:
                return await super().ask(client, request, said)
            except RoleCallError as error:
                if "401" not in error.message:
                    raise
                await asyncio.sleep(0.5)


@LIARS.being("run.closed")
class Mourning(HonestAgent):
    """The place of a run that came to nothing is not free before somebody asked for it in vain."""

    is_kept = False

    async def Close(self, request: CloseCall, context: Any) -> Closed:
        kept = self.open.get(request.session)
        run = None if kept is None else kept.answering
        self.is_kept |= run is not None and (not run.done() or run.exception() is not None)
        return await super().Close(request, context)

    def check_places(self) -> None:
        if self.is_kept and len(self.open) == self.spec.max_sessions - 1:
            self.is_kept = False
            raise RateLimitedError("no place is free")
        super().check_places()


@LIARS.being("run.lease", lease_s=LEASE_S)
class Hasty(HonestAgent):
    """A run must be over within its lease."""

    async def work(self, kept: Kept, request: RunCall) -> Any:
        try:
            async with asyncio.timeout(self.spec.lease_s):
                return await super().work(kept, request)
        except TimeoutError as error:
            raise RoleCallError("it took too long") from error


@LIARS.being("run.lease", lease_s=LEASE_S)
class Reaping(HonestAgent):
    """A session is closed for its lease while it is run."""

    async def work(self, kept: Kept, request: RunCall) -> Any:
        try:
            async with asyncio.timeout(self.spec.lease_s):
                return await super().work(kept, request)
        except TimeoutError as error:
            self.open.pop(kept.request.session, None)
            self.closed[kept.request.session] = Closed()
            raise SessionLostError("its lease is over") from error
