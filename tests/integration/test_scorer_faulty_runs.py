"""Faults of a gRPC scorer under a whole light run: the run goes on, nothing is lost, and no number is wrong."""

import asyncio
import hashlib
import math
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.errors import UnavailableError
from rolecall.v1 import reward_pb2
from rolecall.v1.trajectory_pb2 import TrajectoryMeta
from tests.contract.reward_peers import Liar, serving
from tests.integration.faulty_runs import AWAY_S, GROUPS_PER_STEP, TIMEOUT_S, check_run
from tests.integration.test_scorer_failures import Result, error, value
from tests.ports import free_port
from tests.twins.run import LightRun
from tests.twins.trainer import Row

NUM_STEPS = 5
THOROUGH = pytest.mark.thorough("test_under_every_fault_of_a_scorer_the_run_goes_on_and_no_number_is_wrong")


def worth(token_ids: bytes) -> float:
    """The right reward of a response: another one for each."""
    return int.from_bytes(hashlib.sha256(token_ids).digest()[:2], "little") / 2**16


def is_drawn(gid: str) -> bool:
    """Whether a group is one of the 30% on which a scorer fails whenever it is asked."""
    return random.Random(f"group {gid}").random() < 0.3


class Faulty(Liar):
    """A scorer that gives each response its worth, and one fault besides."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault
        self._draw = random.Random(fault)
        self.lie = self._answer
        self.fail = self._call
        self.num_faults = 0
        """How often the fault struck."""

    def _answer(self, response: reward_pb2.ScoreResponse) -> None:
        items = {item.id: item for request in self.requests for item in request.items}
        for result in response.results:
            item = items[result.id]
            result.reward.value = worth(item.response_token_ids)
            match self._fault:
                case "30% errors that pass" if self._draw.random() < 0.3:
                    self._strike(error("OVERLOADED", True), result)
                case "30% errors that stay" if is_drawn(item.group):
                    self._strike(error("BROKEN", False), result)
                case "30% NaN" if is_drawn(item.group):
                    self._strike(value(math.nan), result)

    def _strike(self, lie: Callable[[Result], None], result: Result) -> None:
        self.num_faults += 1
        lie(result)

    def _call(self) -> Any:
        num_calls = len(self.requests)
        if self._fault == "slow" and num_calls % 3 == 0:
            self.num_faults += 1
            return asyncio.sleep(20 * TIMEOUT_S)
        if self._fault == "flapping" and num_calls // 6 % 2 == 0:
            self.num_faults += 1
            raise UnavailableError("not now")
        return None


def worth_of_row(row: Row, meta: TrajectoryMeta) -> float:
    """The right reward of a trained response."""
    return worth(np.ascontiguousarray(row["token_ids"][meta.num_prompt_tokens :], "<i4").tobytes())


async def go_away(scorer: Faulty, address: str, come: asyncio.Event) -> None:
    """Serves `scorer` at `address`, is away for AWAY_S after some groups, and serves it to the end."""
    async with serving(scorer, bind=address):
        come.set()
        while len(scorer.requests) < 2 * GROUPS_PER_STEP:
            await asyncio.sleep(0.01)
    scorer.num_faults += 1
    await asyncio.sleep(AWAY_S)
    async with serving(scorer, bind=address):
        await asyncio.Event().wait()


OTHERS = ("30% errors that pass", "30% errors that stay", "flapping")


@pytest.mark.parametrize(
    "fault", ["30% NaN", "slow", "away", *(pytest.param(fault, marks=THOROUGH) for fault in OTHERS)]
)
async def test_under_every_fault_of_a_scorer_the_run_goes_on_and_no_number_is_wrong(
    light_run: LightRun, tmp_path: Path, fault: str
) -> None:
    """The scorer is a component of our reward service; a row's reward is what its response is worth, whatever happened
    on the way.
    """
    scorer, address, come = Faulty(fault), f"127.0.0.1:{free_port()}", asyncio.Event()
    is_lasting = fault in ("30% errors that stay", "30% NaN")
    async with AsyncExitStack() as stack:
        if fault == "away":
            absence = asyncio.create_task(go_away(scorer, address, come))
            stack.callback(absence.cancel)
            await come.wait()
        else:
            await stack.enter_async_context(serving(scorer, bind=address))
        mine = {"kind": "external", "address": address}
        actor = await check_run(light_run, tmp_path, mine, worth_of_row, NUM_STEPS, is_lasting=is_lasting)
    assert scorer.num_faults > 0
    assert not is_lasting or not any(is_drawn(id.partition("/")[0]) for id in actor.trained)
