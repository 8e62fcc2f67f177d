"""Whole runs of a mixture of experts whose sampler routes a little otherwise than its trainer: real controller, store,
weight channel and actor, whose updates replay the sampler's routing or not.

Plain transformers sample, for vLLM says on GPUs only where it sends tokens.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.launcher.plan import write_config
from rolecall.settings import RunSettings
from tests.chaos.scorer import score
from tests.fixtures_store import MakeStore, StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3_moe
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.channel_engine import MixtureEngine
from tests.twins.processes import ranks_together, started
from tests.twins.run import twin_run

logger = logging.getLogger(__name__)

NUM_STEPS = 4
RUN_S = 400.0
SCALE = 0.05
"""Of the noise on the sampler's routers."""
MEASURED = tuple(f"actor/{name}" for name in ("mismatch_kl", "mismatch_all_p999", "rerouted_layers", "grad_norm"))


@pytest.mark.thorough("test_replaying_the_samplers_routing_brings_the_trainer_nearer_to_it")
@pytest.mark.timeout(900)
async def test_a_run_that_replays_its_samplers_routing_stays_nearer_to_it_in_every_step(
    make_store: MakeStore,
    store: StoreUnderTest,
    tmp_path: Path,
    make_settings: Callable[..., RunSettings],
) -> None:
    model = write_qwen3_moe(tmp_path / "moe", vocab=288)
    write_tokenizer(model)

    async def run_of(replay: str) -> list[dict[str, float]]:
        actor = {"address": f"127.0.0.1:{free_port()}", "num_threads": 1, "optimizer": {"learning_rate": 1e-3}}
        sections: dict[str, Any] = {
            "run": {"num_steps": NUM_STEPS},
            "model": {"path": str(model), "dtype": "float32"},
            "actor": {**actor, "router_replay": replay},
            "sampling": {"num_responses": 4, "max_tokens": 12},
            "algorithm": {"groups_per_batch": 8, "num_minibatches": 2},
            # the machine may be busy with other tests
            "controller": {"lease_s": 30.0, "start_timeout_s": 300.0, "stall_timeout_s": 100.0},
        }
        folder, of_its_own = tmp_path / replay, make_store(store.url, f"{store.run}-{replay}")
        async with twin_run(of_its_own, folder, make_settings, score=score, **sections) as run:
            config = write_config(run.settings)
            engine = MixtureEngine(model, folder / "arrived", SCALE)
            environment = {"ROLECALL_STORE_URL": store.url}
            commands = [each._replace(environment=environment) for each in ranks_together(config, 1)]
            try:
                async with started(config, commands), run.rollout("rollout-0", engine=engine):
                    async with run.controller() as (_, running, _):
                        await asyncio.wait_for(running, RUN_S)
            finally:
                await engine.close()
        return run.metrics()

    off, r3 = await run_of("off"), await run_of("r3")
    assert len(off) == len(r3) == NUM_STEPS
    for without, replayed in zip(off, r3, strict=True):
        logger.info({name: (without.get(name), replayed[name]) for name in MEASURED})
        assert min(without["actor/grad_norm"], replayed["actor/grad_norm"]) > 0
        assert replayed["actor/mismatch_kl"] < 0.5 * without["actor/mismatch_kl"]
        assert replayed["actor/mismatch_all_max"] < without["actor/mismatch_all_max"]
        assert 0 < replayed["actor/rerouted_layers"] < 1
        assert "actor/rerouted_layers" not in without
