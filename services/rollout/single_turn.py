"""Groups of single responses: the sampler of a run without an environment, and the seam of all samplers of groups."""

from contextlib import aclosing
from typing import Protocol

from rolecall.store.prompts import Claim
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.trajectories import group_requests


class GroupSampler(Protocol):
    """Samples the trajectories of claimed groups."""

    async def room(self, num_in_hand: int, max_groups: int) -> int:
        """Groups that may be claimed beside `num_in_hand`, at most `max_groups` more."""

    async def sample(self, claim: Claim) -> tuple[list[SampleRequest], list[Response]]:
        """Returns what each trajectory of the group began with, and the whole of it, the greedy one last. Cancelling it
        leaves nothing open. Errors as Replica.sample; UnavailableError where nobody is to blame.
        """

    async def close(self) -> None:
        """Ends what is open, in seconds."""


class SingleTurns:
    """A GroupSampler of one response to each request."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def room(self, num_in_hand: int, max_groups: int) -> int:
        """Implements GroupSampler.room: the engine's alone."""
        return max_groups

    async def sample(self, claim: Claim) -> tuple[list[SampleRequest], list[Response]]:
        """Implements GroupSampler.sample."""
        group = claim.group
        requests = group_requests(group, claim.token)
        self._replica.require_room(requests[0].prompt_token_ids, f"group {group.gid}")
        responses: list[Response | None] = [None] * len(requests)
        async with aclosing(self._replica.sample_all(requests)) as sampled:
            async for index, response in sampled:  # bounded: by generation_timeout_s of whoever asks
                responses[index] = response
        return requests, [response for response in responses if response is not None]

    async def close(self) -> None:
        """Implements GroupSampler.close: nothing is open."""
