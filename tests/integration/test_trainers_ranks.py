"""Trainers as processes: one rank and two ranks of the same actor agree, whether these take rows or share them, and
stop when asked to.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from rolecall.errors import RowMissingError
from rolecall.rpc.channel import open_channel
from rolecall.settings import RpcSection, child_environment
from rolecall.training.account.memory import PHASES
from rolecall.v1 import actor_pb2_grpc
from rolecall.v1.training_pb2 import ComputeColumnRequest, OffloadRequest, SaveTrainerCheckpointRequest, TrainRequest
from rolecall.v1.trajectory_pb2 import RowRef
from tests.checkpoint_rig import exported
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.served import Batches, saved, settings_tree, train, values_of

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
LAYOUTS = [(1, 1), (2, 1), (2, 2)]
"""Ranks, and how many of them share each sequence."""
OF_THE_MACHINE = {
    f"actor/{name}" for name in ("read_s", "tokens_per_s", "tflops", *(f"{phase}_peak_bytes" for phase in PHASES))
}
"""Metrics that may differ."""
GONE = RowRef(id="99/0", token="r.0-1", num_tokens=9)


@asynccontextmanager
async def actor_process(
    config: Path, num_ranks: int, sequence: int, peer: Peer
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """The address of an actor of `num_ranks` ranks and its (outermost) process; ends it with SIGTERM and checks that it
    goes.
    """
    torchrun = [
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    launcher = [*torchrun, "--local-addr=127.0.0.1", "-m"] if num_ranks > 1 else []
    num_joins = len(peer.joins)
    arguments = [
        "services.actor",
        str(config),
        "--actor.num_ranks",
        str(num_ranks),
        "--actor.parallel.sequence",
        str(sequence),
    ]
    environment = child_environment({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *launcher, *arguments, env=environment)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(peer.joins) == num_joins:
                assert process.returncode is None, "the actor ended while it started"
                await asyncio.sleep(0.05)
        yield peer.joins[-1].address, process
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()


def write_config(store: StoreUnderTest, model: Path, folder: Path, controller: str) -> Path:
    """The run's file."""
    tree = settings_tree(
        store,
        model,
        folder,
        algorithm={"groups_per_batch": 4, "num_minibatches": 3},
        controller={"address": controller},
    )
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


async def one_step(address: str, batch: Any, rows: Any, ctl: int, path: Path) -> dict[str, float]:
    """Trains step 0, computes logprobs of `rows` after it and saves; the step's metrics."""
    async with open_channel(address, RpcSection()) as channel:
        actor = actor_pb2_grpc.ActorServiceStub(channel)
        with pytest.raises(RowMissingError):  # one rank's failure is every rank's answer, and they go on together
            await actor.ComputeLogprobs(ComputeColumnRequest(ctl=ctl, rows=[GONE]), timeout=60)
        await actor.Offload(OffloadRequest(ctl=ctl), timeout=60)  # on every rank; the step brings it back
        metrics = values_of(await train(actor, TrainRequest(ctl=ctl, step=0, digest=batch.digest)))
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=ctl, rows=rows), timeout=60)
        await saved(actor, SaveTrainerCheckpointRequest(ctl=ctl, path=str(path), step=1))
    return metrics


@pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one")
@pytest.mark.timeout(300)
async def test_two_ranks_train_what_one_rank_trains_with_rows_of_their_own_or_shared(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    model = write_qwen3(tmp_path / "policy")
    batches = Batches(store, model)
    batch = batches.sealed(0)
    rows = [[row for group in batches.sampled(3) for row in group.rows] for _ in LAYOUTS]
    peer = Peer()
    async with serving(peer) as (_, controller):
        config = write_config(store, model, tmp_path, controller)
        told = []
        for index, (num_ranks, sequence) in enumerate(LAYOUTS):
            async with actor_process(config, num_ranks, sequence, peer) as (address, process):
                told.append(await one_step(address, batch, rows[index], store.ledger.ctl, tmp_path / f"actor-{index}"))
            assert num_ranks > 1 or process.returncode == 0  # torchrun itself never ends well at a signal
    ours = [load_file(exported(tmp_path / f"actor-{index}") / "model.safetensors") for index in range(len(LAYOUTS))]
    for index, layout in enumerate(LAYOUTS):
        for name in told[0].keys() - OF_THE_MACHINE:
            assert told[index][name] == pytest.approx(told[0][name], rel=1e-3, abs=1e-5), f"{name} in {layout}"
        for name, tensor in ours[0].items():
            np.testing.assert_allclose(
                ours[index][name].float(), tensor.float(), atol=2e-4, err_msg=f"{name} in {layout}"
            )
        written = store.rows.read(rows[index], ["old_logprobs", "response_mask"])
        assert all(np.count_nonzero(read["old_logprobs"]) == read["response_mask"].sum() for read in written)
