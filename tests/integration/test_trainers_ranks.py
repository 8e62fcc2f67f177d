"""Trainers as processes: one rank and two ranks of the same actor agree, whether these take rows or share them, and
stop when asked to.
"""

import asyncio
import gzip
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.torch import load_file

from rolecall.errors import CheckpointMismatchError, OutOfOrderError, RowMissingError
from rolecall.launcher.plan import ranks_command
from rolecall.rpc.channel import open_channel
from rolecall.training.account.memory import Phase
from rolecall.training.serving.applied import TORN
from rolecall.v1 import actor_pb2_grpc
from rolecall.v1.training_pb2 import (
    ComputeColumnRequest,
    GetTrainerInfoRequest,
    LoadTrainerCheckpointRequest,
    OffloadRequest,
    ProfileRequest,
    SaveTrainerCheckpointRequest,
    TrainRequest,
)
from rolecall.v1.trajectory_pb2 import RowRef
from tests.checkpoint_rig import exported
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.callers import party
from tests.twins.processes import START_TIMEOUT_S, Command, joined, ranks_alone, ranks_together, started
from tests.twins.served import Batches, saved, train, values_of, write_settings

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 30.0
LAYOUTS = [(1, 1), (2, 1), (2, 2)]
"""Ranks, and how many of them share each sequence."""
OF_THE_MACHINE = {
    f"actor/{name}"
    for name in (
        "read_s",
        "gathered_bytes",
        "tokens_per_s",
        "tflops",
        *(f"{phase}_peak_bytes" for phase in get_args(Phase)),
    )
}
"""Metrics that may differ."""
GONE = RowRef(id="99/0", token="r.0-1", num_tokens=9)


async def one_step(address: str, batch: Any, rows: Any, ctl: int, path: Path) -> dict[str, float]:
    """Trains step 0, computes logprobs of `rows` after it and saves; the step's metrics."""
    async with open_channel(address, party()) as channel:
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
        algorithm = {"groups_per_batch": 4, "num_minibatches": 3}
        config = write_settings(store, model, tmp_path, algorithm=algorithm, controller={"address": controller})
        told = []
        for index, (num_ranks, sequence) in enumerate(LAYOUTS):
            commands = ranks_together(config, num_ranks, "--actor.parallel.sequence", str(sequence))
            async with joined(peer, config, commands) as actor:
                path = tmp_path / "checkpoints" / f"actor-{index}"
                told.append(await one_step(actor.join.address, batch, rows[index], store.ledger.ctl, path))
                (process,) = actor.processes
                process.send_signal(signal.SIGTERM)
                await actor.ended(STOP_TIMEOUT_S)
                assert process.returncode not in (0, None)  # stopped, and the run was not over
                assert peer.beats[-1].leaving
    ours = [
        load_file(exported(tmp_path / "checkpoints" / f"actor-{index}") / "model.safetensors")
        for index in range(len(LAYOUTS))
    ]
    for index, layout in enumerate(LAYOUTS):
        for name in told[0].keys() - OF_THE_MACHINE:
            assert told[index][name] == pytest.approx(told[0][name], rel=1e-3, abs=1e-5), f"{name} in {layout}"
        for name, tensor in ours[0].items():
            np.testing.assert_allclose(
                ours[index][name].float(), tensor.float(), atol=2e-4, err_msg=f"{name} in {layout}"
            )
        written = store.rows.read(rows[index], ["old_logprobs", "response_mask"])
        assert all(np.count_nonzero(read["old_logprobs"]) == read["response_mask"].sum() for read in written)


@pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one")
@pytest.mark.timeout(300)
async def test_a_checkpoint_that_one_rank_cannot_read_is_loaded_on_none(store: StoreUnderTest, tmp_path: Path) -> None:
    """Each rank reads its own file; the other one's is damaged."""
    batches = Batches(store, write_qwen3(tmp_path / "policy"))
    ctl, peer, path = store.ledger.ctl, Peer(), tmp_path / "checkpoints" / "actor"
    async with serving(peer) as (_, controller):
        config = write_settings(store, tmp_path / "policy", tmp_path, controller={"address": controller})
        async with joined(peer, config, ranks_together(config, 2)) as trainer:
            async with open_channel(trainer.join.address, party()) as channel:
                actor = actor_pb2_grpc.ActorServiceStub(channel)
                await train(actor, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest))
                await saved(actor, SaveTrainerCheckpointRequest(ctl=ctl, path=str(path), step=1))
                damaged = path / "rank-00001.safetensors"
                whole = damaged.read_bytes()
                damaged.write_bytes(whole[:8] + b"no header" + whole[17:])
                request = LoadTrainerCheckpointRequest(ctl=ctl, path=str(path))
                with pytest.raises(CheckpointMismatchError, match=damaged.name):
                    await actor.LoadCheckpoint(request, timeout=60)
                assert (await actor.GetInfo(GetTrainerInfoRequest(), timeout=60)).step == TORN
                with pytest.raises(OutOfOrderError):
                    await train(actor, TrainRequest(ctl=ctl, step=0, digest="batch-0"))
                damaged.write_bytes(whole)
                assert (await actor.LoadCheckpoint(request, timeout=60)).step == 1


@pytest.mark.thorough("test_a_step_that_was_asked_for_leaves_a_trace_of_its_operators_and_others_leave_none")
@pytest.mark.timeout(300)
async def test_every_rank_leaves_a_trace_of_a_step_that_is_profiled(store: StoreUnderTest, tmp_path: Path) -> None:
    model = write_qwen3(tmp_path / "policy")
    batch = Batches(store, model).sealed(0)
    ctl, peer = store.ledger.ctl, Peer()
    async with serving(peer) as (_, controller):
        config = write_settings(store, model, tmp_path, controller={"address": controller})
        async with joined(peer, config, ranks_together(config, 2)) as trainer:
            async with open_channel(trainer.join.address, party()) as channel:
                actor = actor_pb2_grpc.ActorServiceStub(channel)
                profiles = aiter(actor.Profile(ProfileRequest(ctl=ctl, num_steps=1), timeout=120))
                assert not (await anext(profiles)).HasField("profile")  # it waits for the next step
                await train(actor, TrainRequest(ctl=ctl, step=0, digest=batch.digest))
                (profile,) = [told.profile async for told in profiles if told.HasField("profile")]
            (process,) = trainer.processes
            process.send_signal(signal.SIGTERM)
            await trainer.ended(STOP_TIMEOUT_S)
    assert [Path(trace.path).name for trace in profile.traces] == [
        f"actor-step0-rank{rank}.json.gz" for rank in range(2)
    ]
    for trace in profile.traces:
        with gzip.open(trace.path, "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "forward", "backward", "optimizer"} <= names
        assert any(name.startswith("FSDP::") or "gloo:" in name for name in names)  # and of what the ranks do together


async def test_a_rank_of_another_release_ends_and_the_others_with_it(store: StoreUnderTest, tmp_path: Path) -> None:
    config = write_settings(store, write_qwen3(tmp_path / "policy"), tmp_path)
    ours, theirs = ranks_alone(config, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(
        "import rolecall.contract\nrolecall.contract.contract_version = lambda: '9.9.9+0123456789ab'\n"
    )
    path = os.pathsep.join([str(tmp_path / "other"), str(ROOT)])
    other = Command(["services.actor", *theirs.words], environment={**theirs.environment, "PYTHONPATH": path})
    async with started(config, [ours, other]) as actor:
        for process in actor.processes:
            assert await asyncio.wait_for(process.wait(), START_TIMEOUT_S) != 0
        assert "rank 1 was built with contracts 9.9.9+0123456789ab, rank 0 with" in actor.said(1)
        assert "rank 1 of actor is gone" in actor.said(0)


def test_ranks_of_one_machine_meet_on_loopback_listen_nowhere_else_and_leave_no_files(tmp_path: Path) -> None:
    script = tmp_path / "listening.py"
    script.write_text(
        "import os, psutil\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='env://')\n"
        "if dist.get_rank() == 0:\n"
        "    for process in [psutil.Process(os.getppid()), *psutil.Process(os.getppid()).children()]:\n"
        "        for each in process.net_connections():\n"
        "            if each.status == psutil.CONN_LISTEN:\n"
        "                print('listens', each.laddr.ip, flush=True)\n"
        "dist.barrier()\n"
    )
    files = tmp_path / "files"
    files.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(files)}
    command = ranks_command(2, ["listening"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    heard = [line.removeprefix("listens ") for line in done.stdout.splitlines() if line.startswith("listens")]
    assert set(heard) == {"127.0.0.1"}
    assert done.stderr == ""
    assert not list(files.iterdir())
