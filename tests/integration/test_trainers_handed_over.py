"""A trainer that changes its back end in the middle of its life goes on as if it had stayed: real processes, behind
their real service, over the same sealed batches.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import open_storage
from rolecall.rpc.channel import open_channel
from rolecall.training.backends import read_model
from rolecall.training.model.lora import is_adapter
from rolecall.v1 import actor_pb2_grpc
from rolecall.v1.training_pb2 import LoadTrainerCheckpointRequest, SaveTrainerCheckpointRequest, TrainRequest
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.callers import party
from tests.twins.processes import joined, ranks_together
from tests.twins.served import Batches, saved, train, values_of, write_settings

NUM_STEPS = 4
ATOL = 2e-4
"""Of weights, as in test_megatron.py."""
Lives = list[tuple[int, int, tuple[str, ...]]]
"""Steps, ranks and overrides of one life after another."""
FSDP: tuple[str, ...] = ()
MEGATRON = ("--actor.backend=megatron", "--actor.parallel.pipeline=2")


@dataclass
class Told:
    """What a trainer said of its steps, and the weights that it ended with."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Stage:
    """What every life is lived over."""

    store: StoreUnderTest
    folder: Path
    config: Path
    batches: Batches
    peer: Peer

    async def lived(self, name: str, lives: Lives) -> Told:
        """Trains NUM_STEPS steps, each life from the checkpoint of the one before it."""
        told, done, ctl = Told(), 0, self.store.ledger.ctl
        for number, (num_steps, num_ranks, overrides) in enumerate(lives):
            async with self._calling(num_ranks, overrides) as trainer:
                if number:
                    load = LoadTrainerCheckpointRequest(
                        ctl=ctl, path=str(self.folder / "checkpoints" / f"{name}-{number}")
                    )
                    assert (await trainer.LoadCheckpoint(load, timeout=100)).step == done
                for step in range(done, done + num_steps):
                    result = await train(trainer, TrainRequest(ctl=ctl, step=step, digest=self._digest(step)))
                    told.metrics.append(values_of(result))
                    if self.store.ledger.position().step == step:  # the first to train it; the others read it again
                        self.batches.commit(result)
                done += num_steps
                path = str(self.folder / "checkpoints" / f"{name}-{number + 1}")
                files = await saved(trainer, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=done))
                stored = [StoredFile(file.name, file.num_bytes, file.checksum) for file in files]
                model = read_model(open_storage(path), stored)
                told.weights = {name: model.tensor(name) for name in model}
        return told

    def _digest(self, step: int) -> str:
        if self.store.ledger.position().step == step:
            self.batches.sealed(step)
        return f"batch-{step}"

    @asynccontextmanager
    async def _calling(self, num_ranks: int, overrides: tuple[str, ...]) -> AsyncIterator[Any]:
        command = ranks_together(self.config, num_ranks, *overrides)
        async with (
            joined(self.peer, self.config, command) as trainer,
            open_channel(trainer.join.address, party()) as channel,
        ):
            yield actor_pb2_grpc.ActorServiceStub(channel)


@pytest.mark.megatron
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trained", [(), ("--actor.lora.rank=4", "--actor.lora.alpha=8")], ids=["model", "adapters"])
async def test_an_actor_goes_from_one_back_end_to_the_other_and_back(
    store: StoreUnderTest, tmp_path: Path, trained: tuple[str, ...]
) -> None:
    """A step on FSDP2, two on a pipeline of Megatron's, one on FSDP2, against four on FSDP2."""
    model = write_qwen3(tmp_path / "policy")
    peer = Peer()
    async with serving(peer) as (_, address):
        config = write_settings(store, model, tmp_path, controller={"address": address})
        stage = Stage(store, tmp_path, config, Batches(store, model), peer)
        fsdp, megatron = (*FSDP, *trained), (*MEGATRON, *trained)
        stayed = await stage.lived("stayed", [(NUM_STEPS, 1, fsdp)])
        went = await stage.lived("went", [(1, 1, fsdp), (2, 2, megatron), (1, 1, fsdp)])
    numbers = [name for name in stayed.metrics[0] if name.startswith(("actor/grad_norm", "actor/loss", "actor/ent"))]
    assert len(numbers) >= 2, sorted(stayed.metrics[0])
    for step, (there, here) in enumerate(zip(stayed.metrics, went.metrics, strict=True)):
        for name in numbers:
            assert here[name] == pytest.approx(there[name], rel=1e-5, abs=1e-6), (step, name)
    assert went.weights.keys() == stayed.weights.keys()
    assert all(is_adapter(name) for name in stayed.weights) == bool(trained)
    for name, weight in stayed.weights.items():
        np.testing.assert_allclose(went.weights[name], weight, atol=ATOL, rtol=0, err_msg=name)
