"""The sleep of a vLLM engine: in what order its memory comes and goes. The engine is a fake that does what vLLM says of
itself, and fails where it would.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from rolecall.errors import DeviceFullError
from services.rollout.vllm.sleeper import Sleeper

TOTAL, WEIGHTS, CACHE = 100, 10, 60


class FakeEngine:
    """Weights and cache on a device of 100 bytes, of which others hold some."""

    def __init__(self) -> None:
        self.awake = {"weights": WEIGHTS, "kv_cache": CACHE}
        self.others = 0
        self.runs_scheduler = False
        self.padding_is_clear = True

    async def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep"
        if not self.awake:
            return  # "already sleeping"
        assert len(self.awake) == 2, "vLLM unmaps what is unmapped"
        self.awake, self.runs_scheduler, self.padding_is_clear = {}, False, False

    async def wake_up(self, tags: list[str]) -> bool:
        self.awake |= {tag: {"weights": WEIGHTS, "kv_cache": CACHE}[tag] for tag in tags}
        assert sum(self.awake.values()) + self.others <= TOTAL, "out of memory"
        self.runs_scheduler = len(self.awake) == 2
        assert self.padding_is_clear or not self.runs_scheduler
        return self.runs_scheduler

    async def collective_rpc(self, method: str) -> list[Any]:
        if method == "clear_positions":
            assert "weights" in self.awake, "they lie beside the weights"
            self.padding_is_clear = True
            return [None]
        assert method == "free_bytes"
        return [TOTAL - self.others - sum(self.awake.values())]


async def alive(call: Awaitable[Any]) -> Any:
    return await call


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def test_weights_come_first_and_the_scheduler_with_the_rest(engine: FakeEngine) -> None:
    sleeper = Sleeper(engine, alive)
    assert not await sleeper.wake_whole(), "it is"
    assert not engine.runs_scheduler
    await sleeper.sleep(2)
    assert engine.awake == {}
    engine.others = 25
    await sleeper.wake_up()
    assert engine.awake == {"weights": WEIGHTS}
    assert not engine.runs_scheduler
    assert await sleeper.wake_whole()
    assert engine.runs_scheduler


async def test_without_room_for_all_of_it_nothing_is_taken(engine: FakeEngine) -> None:
    sleeper = Sleeper(engine, alive)
    await sleeper.sleep(2)
    engine.others = 45
    with pytest.raises(DeviceFullError, match=r"lacks 15 of the 70 bytes.*rollout\.gpu_memory_utilization"):
        await sleeper.wake_up()
    assert engine.awake == {}
    engine.others = 30
    await sleeper.wake_up()
    assert engine.awake == {"weights": WEIGHTS}


async def test_every_call_may_be_repeated_and_an_engine_half_awake_sleeps_again(engine: FakeEngine) -> None:
    sleeper = Sleeper(engine, alive)
    for _ in range(2):
        await sleeper.sleep(1)
    for _ in range(2):
        await sleeper.wake_up()
    await sleeper.sleep(1)
    assert engine.awake == {}
    await sleeper.wake_up()
    for _ in range(2):
        await sleeper.wake_whole()
    assert engine.runs_scheduler
    await sleeper.sleep(1)
    assert engine.awake == {}


async def test_a_sleep_whose_caller_left_is_repeated_without_forgetting_what_was_given_back(engine: FakeEngine) -> None:
    sleeper, asleep = Sleeper(engine, alive), asyncio.Event()
    falls_asleep = engine.sleep

    async def slowly(level: int, mode: str) -> None:
        await falls_asleep(level, mode)
        asleep.set()
        await asyncio.Event().wait()

    engine.sleep = slowly  # type: ignore[method-assign]
    leaving = asyncio.create_task(sleeper.sleep(1))
    await asleep.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    engine.sleep = falls_asleep  # type: ignore[method-assign]
    await sleeper.sleep(1)
    engine.others = 45
    with pytest.raises(DeviceFullError, match=r"lacks 15 of the 70 bytes"):
        await sleeper.wake_up()
