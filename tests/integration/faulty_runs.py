"""A whole light run beside a scorer that fails: the run goes on, nothing is lost, and no number is wrong.

The store, the controller, gRPC and the reward service are real, with its breakers and retries; an actor compares every
reward with what the response is worth.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rolecall.v1.trajectory_pb2 import TrajectoryMeta
from tests.contract.reward_peers import reward_service
from tests.twins.run import LightRun, balance, check_trained_once
from tests.twins.trainer import CheckingActor, Row

TIMEOUT_S = 0.5
"""Deadline of a call of the scorer."""
AWAY_S = 4.0
"""Longer than the breaker's first pauses."""
FAULTY_RUN_S = 240.0
"""Deadline of a run with faults, which takes some seconds on a quiet machine."""
GROUPS_PER_STEP = 4
NUM_RESPONSES = 2


async def check_run(
    light_run: LightRun,
    folder: Path,
    scorer: dict[str, Any],
    worth: Callable[[Row, TrajectoryMeta], float],
    num_steps: int,
    *,
    is_lasting: bool,
) -> CheckingActor:
    """Runs `num_steps` steps whose rewards are those of `scorer`, a component's section, and checks that each row's is
    what `worth` says. What a lasting fault hits is dropped and counted, and nothing else is. Returns the actor.
    """
    part = {"scorer": scorer, "timeout_s": TIMEOUT_S, "max_attempts": 2}
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(reward_service(folder, mine=part))
        reward = {"address": address, "max_failed_groups": 500}
        run = await stack.enter_async_context(light_run(reward=reward, run={"num_steps": num_steps}))
        actor = CheckingActor(run.store.rows, worth)
        run.actor.restart(actor)
        life = await stack.enter_async_context(run.controller())
        await stack.enter_async_context(run.rollout("rollout-0"))
        await asyncio.wait_for(life.running, FAULTY_RUN_S)
    num_groups = num_steps * GROUPS_PER_STEP
    _, trained, dropped, live = balance(run)
    assert (trained, live) == (num_groups, 0)
    check_trained_once(actor, num_groups * NUM_RESPONSES)
    assert actor.wrong == []
    assert dict(run.ledger.counts().dropped) == ({"scorer_error": dropped} if is_lasting else {})
    return actor
