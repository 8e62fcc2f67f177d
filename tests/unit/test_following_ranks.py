"""Ranks that follow rank 0."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from rolecall.rpc.role_process import ServiceArgs
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.training.serving.serve import follow
from tests.conftest import MakeSettings


class Rank:
    """A role on a rank, which remembers who built it."""

    def __init__(self, hooks: ProcessHooks) -> None:
        self.built_by = threading.get_ident()

    def follow(self) -> bool:
        """Follower.follow."""
        assert threading.get_ident() == self.built_by
        return True


async def test_a_rank_obeys_in_the_thread_that_made_its_gpu_the_current_one(make_settings: MakeSettings) -> None:
    """Whatever other threads are idle: which of them takes the next piece of work is nobody's choice."""
    args = ServiceArgs(make_settings(), "actor", "00000001")
    idle = ThreadPoolExecutor(8)
    asyncio.get_running_loop().set_default_executor(idle)
    met = threading.Barrier(8)
    await asyncio.gather(*(asyncio.to_thread(met.wait, 60) for _ in range(8)))
    for _ in range(50):
        await follow(args, Rank, None)
