"""A trainer's saves, one at a time: what waits for what, who attaches, and what is made again."""

import asyncio
from concurrent.futures import Future

import pytest

from rolecall.checkpoint.manifest import StoredFile
from rolecall.errors import DiskFullError, SaveHangsError
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
    chain, trainer = SaveChain(3600.0), Trainer()
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
    chain, trainer = SaveChain(3600.0), Trainer()
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
    chain, trainer = SaveChain(3600.0), Trainer()
    failing = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 1)
    trainer.begun[0].set_exception(DiskFullError("no room"))
    with pytest.raises(DiskFullError):
        await asyncio.wait_for(failing, DEADLINE_S)
    again = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 2)
    trainer.begun[1].set_result((FILE,))
    assert await asyncio.wait_for(again, DEADLINE_S) == [FILE.name]


async def test_a_save_that_hangs_has_others_refused_and_never_two_written_at_a_time() -> None:
    chain, trainer = SaveChain(0.2), Trainer()
    hanging = asyncio.create_task(save(chain, trainer, 1))
    await begun(trainer, 1)
    for step in (2, 2, 3):  # the first waits until that hangs, as for one that is slow
        with pytest.raises(SaveHangsError, match=r"the checkpoint of step 1 is still being written to folder"):
            await asyncio.wait_for(save(chain, trainer, step), DEADLINE_S)
    assert len(trainer.begun) == 1
    trainer.begun[0].set_result((FILE,))
    assert await asyncio.wait_for(hanging, DEADLINE_S) == [FILE.name]
    after = asyncio.create_task(save(chain, trainer, 4))
    await begun(trainer, 2)
    trainer.begun[1].set_result((FILE,))
    assert await asyncio.wait_for(after, DEADLINE_S) == [FILE.name]


async def test_the_time_of_a_save_begins_with_its_turn() -> None:
    chain, trainer = SaveChain(1.0), Trainer()
    saves = [asyncio.create_task(save(chain, trainer, step)) for step in (1, 2, 3)]
    for number in range(3):
        await begun(trainer, number + 1)
        await asyncio.sleep(0.5)
        trainer.begun[number].set_result((FILE,))
    assert await asyncio.wait_for(asyncio.gather(*saves), DEADLINE_S) == [[FILE.name]] * 3
