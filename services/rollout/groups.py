"""The samplers of groups: the seam between those of single responses and of episodes, and the one of a run, in which
each group goes where its prompt says.

Who plays a prompt was decided when its data was read (rolecall/data/dataset.py): it names its environment, or none.
Bounds: one look at a time for the places of each server.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from rolecall.errors import ConfigError
from rolecall.store.prompts import Claim
from rolecall.v1 import trajectory_pb2
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.trajectories import group_requests

LOOK_S = 0.1
"""Longest wait of a turn of the pull loop for an environment to say what it is: others are claimed for meanwhile."""


class GroupSampler(Protocol):
    """Plays claimed groups in one environment."""

    @property
    def server(self) -> object:
        """The server that has the places: the same for all samplers whose environments it plays."""

    async def room(self, num_in_hand: int, max_groups: int) -> int:
        """Groups of the environment that may be claimed beside `num_in_hand` of its server, at most `max_groups`."""

    async def sample(self, claim: Claim) -> tuple[list[SampleRequest], list[Response]]:
        """Returns what each trajectory of the group began with, and the whole of it, the greedy one last. Cancelling it
        leaves nothing open. Errors as Replica.sample; UnavailableError where nobody is to blame.
        """

    async def respond(
        self, name: str, prompt: trajectory_pb2.Prompt, requests: Sequence[SampleRequest]
    ) -> tuple[list[SampleRequest], list[Response]]:
        """The same for requests outside the ledger, which `name` tells from others."""

    async def close(self) -> None:
        """Ends what is open, in seconds."""


@dataclass(frozen=True)
class Room:
    """The groups that may be claimed."""

    num_groups: int
    places: Mapping[str, int]
    """Most of them that are played in an environment, by its name; of those on one server together, by all names, with
    commas.
    """


class MixedGroups:
    """The sampler of a run's groups: those whose prompt names an environment are played in it, the others are answered
    once. Used from one event loop.
    """

    def __init__(
        self,
        replica: Replica,
        played: Mapping[str, GroupSampler] = {},
        close_shared: Callable[[], Awaitable[None]] | None = None,
        *,
        answers_once: bool = True,
    ) -> None:
        """`played`: who plays in each environment, by its name. `close_shared`: closes what they share, before them.
        `answers_once`: whether there may be prompts that are played in none.
        """
        self._replica = replica
        self._played = played
        self._kind = {
            name: ",".join(other for other in played if played[other].server is sampler.server)
            for name, sampler in played.items()
        }
        self._kinds = dict.fromkeys([*self._kind.values(), *([""] if answers_once else [])])
        self._close_shared = close_shared
        self._looking: dict[str, asyncio.Task[int]] = {}

    async def room(self, in_hand: Sequence[Claim], max_groups: int) -> Room:
        """The groups that may be claimed beside those `in_hand`, at most `max_groups`. Where that is none and the
        engine has nothing to do, one of each kind that has none in hand, unless a suspect is: groups of an environment
        that hangs hold what they have until their deadline. One environment that does not answer has no places, and
        keeps no other waiting. ConfigError as of the environments' samplers.
        """
        names = (claim.group.prompt.environment for claim in in_hand)
        counts = Counter(self._kind.get(name, name) for name in names)
        may_exceed = not self._replica.is_busy and not any(claim.max_in_hand for claim in in_hand)
        most = {kind: max_groups or int(may_exceed and not counts[kind]) for kind in self._kinds}
        rooms = await asyncio.gather(*(self._places(kind, counts[kind], most[kind]) for kind in most))
        places = dict(zip(most, rooms, strict=True))
        return Room(max_groups or sum(places.values()), places)

    async def _places(self, kind: str, num_in_hand: int, max_groups: int) -> int:
        if not kind:
            return max_groups
        if kind not in self._looking:
            self._looking[kind] = asyncio.create_task(self._look(kind, num_in_hand, max_groups))
        done, _ = await asyncio.wait({self._looking[kind]}, timeout=LOOK_S)
        return min(self._looking.pop(kind).result(), max_groups) if done else 0  # it may be of an earlier turn

    async def _look(self, kind: str, num_in_hand: int, max_groups: int) -> int:
        return min([await self._played[name].room(num_in_hand, max_groups) for name in kind.split(",")])

    async def sample(self, claim: Claim) -> tuple[list[SampleRequest], list[Response]]:
        """Returns what each trajectory of the group began with, and the whole of it, the greedy one last. Cancelling it
        leaves nothing open. Errors as GroupSampler.sample; ConfigError for an environment that there is not.
        """
        group = claim.group
        if (player := self._player(group.prompt)) is not None:
            return await player.sample(claim)
        requests = group_requests(group, claim.token)
        self._replica.require_room(requests[0].prompt_token_ids, f"group {group.gid}")
        responses: list[Response | None] = [None] * len(requests)
        async with aclosing(self._replica.sample_all(requests)) as sampled:
            async for index, response in sampled:  # bounded: by generation_timeout_s of whoever asks
                responses[index] = response
        return requests, [response for response in responses if response is not None]

    async def respond(
        self, name: str, prompt: trajectory_pb2.Prompt, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[tuple[int, SampleRequest, Response], None]:
        """(index, what it began with, response) of each request outside the ledger as it ends; episodes end together.
        `name` tells them from others. Errors as `sample`.
        """
        if (player := self._player(prompt)) is not None:
            played = await player.respond(name, prompt, requests)
            for index, (began, response) in enumerate(zip(*played, strict=True)):
                yield index, began, response
            return
        async with aclosing(self._replica.sample_all(requests)) as sampled:
            async for index, response in sampled:  # bounded: by generation_timeout_s of Generate
                yield index, requests[index], response

    def _player(self, prompt: trajectory_pb2.Prompt) -> GroupSampler | None:
        """The sampler of the environment that the prompt names; None: it names none."""
        if not prompt.environment:
            return None
        if prompt.environment not in self._played:
            raise ConfigError(
                f"prompt {prompt.uid!r} is played in environments.{prompt.environment}, and this rollout's file has "
                f"{sorted(self._played) or 'none'}; give it the environments of the run"
            )
        return self._played[prompt.environment]

    async def close(self) -> None:
        """Ends what is open, in seconds."""
        for looking in self._looking.values():
            looking.cancel()
        if self._close_shared is not None:
            await self._close_shared()  # bounded: by SHUTDOWN_S of the endpoint
        await asyncio.gather(*(player.close() for player in self._played.values()))
