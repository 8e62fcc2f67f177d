"""An honest EnvironmentService that runs episodes by an agent of its own: it keeps every rule of RunEpisode, in methods
small enough that a liar replaces one of them.
"""

import asyncio
from typing import Any, TypeAlias

import httpx

from rolecall.errors import RoleCallError, SessionLostError, TurnConflictError
from rolecall.v1 import environment_pb2
from tests.contract.environment_honest import Answer, Honest, Kept, State, StepCall

NUM_CALLS = 3
"""Calls of the policy in an episode."""
RunCall: TypeAlias = environment_pb2.RunEpisodeRequest
Ran: TypeAlias = environment_pb2.RunEpisodeResponse


class SpentError(Exception):
    """A budget of the run is spent."""


class HonestAgent(Honest):
    """One that talks with the policy for NUM_CALLS calls, is rewarded by how many it made, and fails at "fail"."""

    def __init__(self, lease_s: float = 600.0, work_s: float = 0.0) -> None:
        super().__init__(lease_s, work_s)
        self.spec.runs_episodes = True
        self.spec.turn_rewards = False
        self.spec.close_timeout_s = 3.0

    async def Step(self, request: StepCall, context: Any) -> Answer:
        self.kept(request.session)
        raise TurnConflictError("its agent takes the turns; call RunEpisode")

    async def RunEpisode(self, request: RunCall, context: Any) -> Any:
        kept = self.kept(request.session)
        if kept.answering is None or not self.is_same(kept, request):
            if kept.answering is not None:
                raise TurnConflictError("it is run already")
            kept.text = request.api_key
            kept.answering = asyncio.ensure_future(self.work(kept, request))
            kept.answering.add_done_callback(lambda done: done.cancelled() or done.exception())  # callers may have left
        return await self.calling(kept, kept.answering)

    def kept(self, name: str) -> Kept:
        if name not in self.open:
            raise SessionLostError("there is no such session")
        return self.open[name]

    def is_same(self, kept: Kept, request: RunCall) -> bool:
        return request.api_key == kept.text

    async def work(self, kept: Kept, request: RunCall) -> Any:
        """The agent, with an answer of its own to all that it is refused."""
        ran = Ran(state=State.EPISODE_STATE_TERMINATED)
        try:
            await self.talk(kept, request)
        except SpentError:
            ran.state = State.EPISODE_STATE_TRUNCATED
        ran.reward.CopyFrom(self.reward(kept))
        return ran

    async def talk(self, kept: Kept, request: RunCall) -> None:
        said = [{"role": "user", "content": "hello"}]
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
            for _ in range(NUM_CALLS):
                said.append({"role": "assistant", "content": await self.ask(client, request, said)})
                kept.said.append(said[-1]["content"])
                if kept.said[-1] == "fail":
                    raise RoleCallError("the tool is gone")
                said.append({"role": "user", "content": "go on"})

    async def ask(self, client: httpx.AsyncClient, request: RunCall, said: list[dict[str, str]]) -> str:
        """What the policy says."""
        body = {"model": request.model, "messages": said}
        key = {"Authorization": f"Bearer {request.api_key}"}
        try:
            answer = await client.post(f"{request.base_url}/chat/completions", json=body, headers=key)
        except httpx.HTTPError as error:
            raise RoleCallError("the endpoint is gone") from error
        if answer.status_code == 403:
            raise SpentError
        if answer.status_code != 200:
            raise RoleCallError(f"the endpoint answered {answer.status_code}")
        return str(answer.json()["choices"][0]["message"]["content"])
