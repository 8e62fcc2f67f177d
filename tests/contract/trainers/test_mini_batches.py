"""Which rows an update is made of: whole prompts, or rows drawn freely where the loss compares their tokens."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from services.actor.steps import PolicySteps
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import Batches, MakeRun, Rig, served_actor

NUM_RESPONSES = 2


async def prompts_of_updates(rig: Rig, batches: Batches) -> list[Counter[int]]:
    """How many rows of each group are in each mini-batch of the next batch, by what its microbatches hold."""
    batch = batches.sealed(0)
    tokens = [row["token_ids"].tolist() for row in batches.store.rows.read(list(batch.rows), ["token_ids"])]
    group = {tuple(ids): index // NUM_RESPONSES for index, ids in enumerate(tokens)}
    steps, ranks = PolicySteps(rig.settings), rig.engine
    share: Any = await asyncio.to_thread(steps._read, ranks.context, batch, ranks.applied)
    return [
        Counter(
            group[tuple(ids.tolist())]
            for each in minibatch.microbatches
            for ids in each.token_ids_N.split(list(each.lengths))
        )
        for minibatch in share.minibatches
    ]


@pytest.mark.parametrize("kind", ["ppo", "clip_cov"])
async def test_an_update_takes_whole_prompts_unless_its_loss_compares_tokens(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, kind: str
) -> None:
    loss: dict[str, Any] = {"kind": kind}
    if kind == "clip_cov":
        loss |= {"fraction": 0.2, "cov_low": 0.0, "cov_high": 100.0}
    run = make_run(algorithm={"groups_per_batch": 4, "num_minibatches": 2, "policy_loss": loss})
    async with served_actor(run, store) as (rig, _):
        updates = await prompts_of_updates(rig, batches)
    assert [update.total() for update in updates] == [4, 4]
    whole = all(count == NUM_RESPONSES for update in updates for count in update.values())
    assert whole is (kind == "ppo")
