"""The sleep of a vLLM engine, in which its device memory is others': what it gave back, and how it is taken again.

Weights are woken first, and keys and values only when the engine goes on: vLLM lets its scheduler run as soon as all is
awake, which may not be before there are weights. Knows no vLLM beyond the calls of SleepingEngine.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from rolecall.errors import DeviceFullError


class SleepingEngine(Protocol):
    """The calls of `AsyncLLM` that make up a sleep."""

    async def sleep(self, level: int, mode: Literal["keep"]) -> None:
        """Pauses and frees the device's memory, once awake as a whole; what ran goes on when it runs again."""

    async def wake_up(self, tags: list[str]) -> bool:
        """Takes back the memory of "weights" or "kv_cache"; lets the scheduler go on once it has both."""

    async def collective_rpc(self, method: str) -> list[Any]:
        """Calls `method` on every worker and returns their answers."""


class Sleeper:
    """Whether one engine sleeps, and how much it gave back. Used by one call at a time."""

    def __init__(self, llm: SleepingEngine, alive: Callable[[Awaitable[Any]], Awaitable[Any]]) -> None:
        """`alive` awaits a call, and says so when the engine is dead."""
        self._llm = llm
        self._alive = alive
        self._given_back: list[int] = []
        """Bytes of each worker's device; empty while the engine is awake as a whole."""
        self._has_weights = True
        self._free_awake: list[int] = []
        """Bytes that nobody had of each device as a Sleep began, until it is seen to its end: its caller may leave, and
        a repetition finds the engine asleep.
        """

    async def sleep(self, level: int) -> None:
        """Frees the device as EngineWeights.sleep says. An engine that has its weights alone is woken as a whole first:
        vLLM cannot put the rest to sleep by itself.
        """
        if self._has_weights:
            await self.wake_whole()
            self._free_awake = self._free_awake or await self._free_bytes()
            await self._alive(self._llm.sleep(level, "keep"))
            free = await self._free_bytes()
            self._given_back = [now - then for now, then in zip(free, self._free_awake, strict=True)]
            self._free_awake = []
            self._has_weights = False

    async def wake_up(self) -> None:
        """Takes the weights' memory back when there is room for all, as EngineWeights.wake_up says. DeviceFullError."""
        if self._has_weights:
            return
        free = await self._free_bytes()
        missing = max(taken - has for taken, has in zip(self._given_back, free, strict=True))
        if missing > 0:
            raise DeviceFullError(
                f"a GPU lacks {missing:,} of the {max(self._given_back):,} bytes that this rollout gave back when it "
                "went to sleep: other roles took them; lower rollout.gpu_memory_utilization or rollout.kv_cache_bytes "
                "(`rolecall check` says what each role takes)"
            )
        self._has_weights = True  # before it is so: a caller that leaves meanwhile does not stop vLLM
        await self._alive(self._llm.wake_up(["weights"]))

    async def wake_whole(self) -> bool:
        """Takes keys and values back, too, which are empty. Returns whether it did: the scheduler goes on then."""
        if not self._given_back:
            return False
        await self._alive(self._llm.collective_rpc("clear_positions"))
        await self._alive(self._llm.wake_up(["kv_cache"]))
        self._given_back = []
        return True

    async def _free_bytes(self) -> list[int]:
        """Bytes that nobody has, of each worker's device."""
        free: list[int] = await self._alive(self._llm.collective_rpc("free_bytes"))
        return free
