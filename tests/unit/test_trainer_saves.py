"""A trainer's saves, one at a time: what waits for what, who attaches, and what is made again."""

import asyncio
from concurrent.futures import Future

import pytest

from rolecall.checkpoint.manifest import StoredFile
from rolecall.errors import DiskFullError
from rolecall.training.serving.save_chain import SaveChain, Written
from tests.waiting import until

DEADLINE_S = 30.0
FILE = StoredFile("rank-00000.safetensors", 7, "ab")


class Trainer:
    """Begins saves, and writes when it is told to."""

    def __init__(self) -> None:
        self.begun: list[Written] = []

    async def begin(self) -> Written:
        """SaveChain's `begin`."""
        self.begun.append(Future())
        return self.begun[-1]


async def save(chain: SaveChain, trainer: Trainer, step: int) -> list[str]:
    """What the caller is told, in order."""
    told = [event async for event in chain.save("folder", step, trainer.begin)]
    return [file.name for event in told for file in event.saved.files]


async def begun(trainer: Trainer, num: int) -> None:
    await until(lambda: len(trainer.begun) >= num, DEADLINE_S)


async def settled() -> None:
    """Whatever can run without the trainer has run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_next_save_begins_when_the_last_is_written() -> None:
    chain, trainer = SaveChain(), Trainer()
    first = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 1)
    second = asyncio.create_task(save(chain, trainer, 2))
    await settled()
    assert len(trainer.begun) == 1, "two at a time would hold two copies of everything"
    trainer.begun[0].set_result((FILE,))
    await begun(trainer, 2)
    trainer.begun[1].set_result((FILE,))
    assert [await asyncio.wait_for(each, DEADLINE_S) for each in (first, second)] == [[FILE.name], [FILE.name]]


async def test_a_caller_who_comes_back_attaches_and_later_gets_the_answer_again() -> None:
    chain, trainer = SaveChain(), Trainer()
    leaving = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 1)
    leaving.cancel()
    again = asyncio.create_task(save(chain, trainer, 1))
    await settled()
    trainer.begun[0].set_result((FILE,))
    assert await asyncio.wait_for(again, DEADLINE_S) == [FILE.name]
    assert await asyncio.wait_for(save(chain, trainer, 1), DEADLINE_S) == [FILE.name]
    assert len(trainer.begun) == 1


async def test_a_save_that_failed_is_made_again_when_it_is_asked_for_again() -> None:
    chain, trainer = SaveChain(), Trainer()
    failing = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 1)
    trainer.begun[0].set_exception(DiskFullError("no room"))
    with pytest.raises(DiskFullError):
        await asyncio.wait_for(failing, DEADLINE_S)
    again = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 2)
    trainer.begun[1].set_result((FILE,))
    assert await asyncio.wait_for(again, DEADLINE_S) == [FILE.name]
