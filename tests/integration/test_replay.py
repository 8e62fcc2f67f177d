"""Actor and critic killed at exact instants, restored and fed the sealed batches again: the inputs are the same to the
bit, and so are the final weights.

Real trainers in processes of their own, on one rank and one thread; the real controller; a rollout whose tokens depend
on (prompt, seed, weights) alone.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.launcher.plan import write_config
from rolecall.store.embedded import EmbeddedStore
from tests.conftest import MakeSettings
from tests.fixtures_store import MakeStore, StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.twins.channel_engine import ChannelEngine
from tests.twins.gateway import Gateway, Instant
from tests.twins.run import twin_run

NUM_STEPS = 5
RUN_S = 140.0
ACTOR_KILLS = [
    Instant("Train", "under way", 2),
    Instant("Train", "answered", 4),
    Instant("PublishWeights", "sent", 5),
    Instant("PublishWeights", "under way", 7),
    Instant("SaveCheckpoint", "under way", 1),
    Instant("SaveCheckpoint", "answered", 3),
]
CRITIC_KILLS = [
    Instant("Train", "answered", 2),
    Instant("ComputeValues", "answered", 4),
    Instant("Train", "under way", 5),
    Instant("SaveCheckpoint", "sent", 2),
]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves."""

    files: Mapping[str, bytes]
    """Every safetensors file of the last checkpoint: weights, and moments of the optimizer."""
    inputs: Mapping[str, Mapping[int, Sequence[str]]]
    """Role -> step -> digest of what it was trained on, each time."""
    num_starts: Mapping[str, int]


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def tensors(checkpoints: Path, step: int) -> dict[str, bytes]:
    committed = RunCheckpoints(open_storage(str(checkpoints)), 2).read(step)
    return {
        file.name: bytes(committed.storage.read(file.name))
        for file in committed.files
        if file.name.endswith(".safetensors")
    }


async def trained(
    folder: Path,
    store: StoreUnderTest,
    make_settings: MakeSettings,
    kills: Mapping[str, Sequence[Instant]],
    algorithm: dict[str, Any],
) -> Outcome:
    """A run of NUM_STEPS under `kills`, by role."""
    folder.mkdir()
    write_qwen3(folder / "model", hidden=32)
    config = folder / "run" / "config.yaml"
    gateways = {role: Gateway(role, free_address(), store, config, list(instants)) for role, instants in kills.items()}
    sections: dict[str, Any] = {
        role: {"address": await gateway.start(), "bind": gateway.address} for role, gateway in gateways.items()
    }
    sections["actor"] |= {"num_threads": 1, "optimizer": {"learning_rate": 1e-3}}
    if "critic" in sections:
        sections["critic"] |= {"optimizer": {"learning_rate": 1e-3}}
    run_section = {"num_steps": NUM_STEPS, "checkpoint_every_steps": 2}
    # the machine may be busy with other tests
    sections["controller"] = {"lease_s": 30.0, "start_timeout_s": 200.0, "stall_timeout_s": 200.0}
    model = {"path": str(folder / "model"), "dtype": "float32"}
    async with twin_run(
        store, folder, make_settings, run=run_section, model=model, algorithm=algorithm, **sections
    ) as run:
        write_config(run.settings)
        for gateway in gateways.values():
            gateway.start_trainer()
        engine = ChannelEngine(folder / "model")
        try:
            async with run.rollout("rollout-0", engine=engine), run.controller() as (_, running, _):
                await asyncio.wait_for(running, RUN_S)
        finally:
            await engine.close()
            for gateway in gateways.values():
                await gateway.close()
    for gateway in gateways.values():
        assert not gateway.kills, f"never came to {gateway.kills}"
        assert all(len(digests) == 1 for digests in gateway.batches.values()), (
            "a step was trained from another batch than the sealed one"
        )
    last, earlier = (tensors(run.settings.run.dir / "checkpoints", step) for step in (NUM_STEPS, NUM_STEPS - 1))
    assert all(last[name] != data for name, data in earlier.items()), "one step must be seen in every file"
    return Outcome(
        files=last,
        inputs={role: gateway.inputs for role, gateway in gateways.items()},
        num_starts={role: len(kills[role]) + 1 for role in gateways},
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("algorithm", "kills"),
    [
        pytest.param(
            {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 4},
            {"actor": ACTOR_KILLS},
            id="grpo",
            marks=pytest.mark.thorough("test_killed_trainers_end_with_the_weights_of_trainers_that_were_never_killed"),
        ),
        pytest.param(
            {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 4, "advantage": {"kind": "gae"}},
            {"actor": [Instant("Train", "answered", 3)], "critic": CRITIC_KILLS},
            id="ppo",
        ),
    ],
)
async def test_killed_trainers_end_with_the_weights_of_trainers_that_were_never_killed(
    store_server: EmbeddedStore,
    make_store: MakeStore,
    tmp_path: Path,
    make_settings: MakeSettings,
    algorithm: dict[str, Any],
    kills: Mapping[str, Sequence[Instant]],
) -> None:
    outcomes = []
    for name, planned in (("never", {role: [] for role in kills}), ("killed", kills)):
        store = make_store(store_server.url, f"{name}-{uuid.uuid4().hex[:8]}")
        store.ledger.unlock()
        outcomes.append(await trained(tmp_path / name, store, make_settings, planned, algorithm))
    never, killed = outcomes
    for role in kills:
        assert {step: len(digests) for step, digests in never.inputs[role].items()} == dict.fromkeys(
            range(NUM_STEPS), 1
        )
        assert sum(map(len, killed.inputs[role].values())) > NUM_STEPS, "nothing was replayed"
        assert {step: set(digests) for step, digests in killed.inputs[role].items()} == {
            step: set(digests) for step, digests in never.inputs[role].items()
        }
    assert killed.files.keys() == never.files.keys()
    assert [name for name, data in killed.files.items() if data != never.files[name]] == []
