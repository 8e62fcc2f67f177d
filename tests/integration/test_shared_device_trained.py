"""A run of a real model whose rollouts, trainer and reference take shifts: the FSDP actor and a reference in processes
of their own, whose state is moved to the host and back, and plain transformers in vLLM's place, whose weights are gone
while they sleep.

vLLM gives no memory up on CPUs. What arrives after a sleep came over the real channel, or it would not be a number.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rolecall.launcher.plan import write_config
from rolecall.settings import RunSettings
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.weights.transferred import Transferred
from tests.chaos.scorer import score
from tests.fixtures_store import MakeStore, StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.channel_engine import PolicyEngine
from tests.twins.processes import Command, TrainerProcesses, ranks_together, started
from tests.twins.run import Life, TwinRun, balance, twin_run

NUM_STEPS = 3
WITHIN_S = 200.0
BUCKET_S, SLOW_S = 6.0, 3.5
"""Deadline of a bucket, and what a slow rollout takes for each: for two of them it takes longer than that."""
OVER_MEMORY = "over shared memory to ranks"
SAME = ("reward/mean", "actor/grad_norm", "actor/policy_loss", "actor/reference_kl", "actor/mismatch_max")


class SleepingPolicy(PolicyEngine):
    """Plain transformers whose parameters have no memory while they sleep, and no values when they wake."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._info = replace(self._info, sleep_levels=(2,))
        for parameter in self._model.parameters():
            parameter.data = parameter.data.clone()  # of its file's memory, which cannot be given back
        self._storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in self._model.parameters()}
        self._sizes = {pointer: storage.nbytes() for pointer, storage in self._storages.items()}
        self.num_bytes: list[int] = []
        """Bytes of its weights after each sleep."""

    async def sleep(self, level: int) -> None:
        await super().sleep(level)
        for storage in self._storages.values():
            storage.resize_(0)
        self._known.clear()
        self.num_bytes.append(sum(storage.nbytes() for storage in self._storages.values()))

    async def wake_up(self) -> None:
        for pointer, storage in self._storages.items():
            storage.resize_(self._sizes[pointer])
            torch.empty(0).set_(storage).fill_(torch.nan)


class HoldingPolicy(SleepingPolicy):
    """A policy whose second weights wait, sent and not taken, until `may_take` is set."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.is_sent_to, self.may_take = asyncio.Event(), asyncio.Event()

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        if policy_version > 1:
            self.is_sent_to.set()
            await self.may_take.wait()  # bounded: by the test's own time
        return await super().receive(epoch, policy_version, bucket_timeout_s)


class SlowPolicy(SleepingPolicy):
    """A policy that takes most of a bucket's deadline for each bucket."""

    def _load(self, timeout_s: float) -> Transferred:
        assert self._channel is not None
        manifest = agreed_manifest(self._channel.rendezvous, timeout_s)
        reception = Reception(self._channel, manifest, timeout_s, self._base)
        for named in reception:
            time.sleep(SLOW_S)
            self._model.load_state_dict(dict(named), strict=False)
        return reception.result()


def sections_of(model: Path, *, in_shifts: bool, num_ranks: int) -> dict[str, Any]:
    """A run of a reference and an actor of `num_ranks` ranks."""
    return {
        "run": {"num_steps": NUM_STEPS, "checkpoint_every_steps": 2},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {
            "address": f"127.0.0.1:{free_port()}",
            "num_ranks": num_ranks,
            "num_threads": 1,
            "optimizer": {"learning_rate": 1e-3},
        },
        "sampling": {"num_responses": 2, "max_tokens": 8},
        "algorithm": {
            "groups_per_batch": 4,
            "num_minibatches": 2,
            "kl": {"reference": "ref", "kl_coef": 0.1, "placement": "loss"},
        },
        "references": {"ref": {"address": f"127.0.0.1:{free_port()}", "offload": in_shifts or None}},
        "rollout": {"sleep_mode": in_shifts, "max_groups": 4},
        # the machine may be busy with other tests
        "controller": {"lease_s": 30.0, "start_timeout_s": 300.0, "stall_timeout_s": 100.0},
    }


@asynccontextmanager
async def under_way(
    run: TwinRun, engines: Sequence[SleepingPolicy], environment: dict[str, str]
) -> AsyncIterator[tuple[TrainerProcesses, Life]]:
    """The run with a rollout for each of `engines`: its actor, and its controller."""
    config, num_ranks = write_config(run.settings), run.settings.actor.num_ranks
    actor = [each._replace(environment=environment) for each in ranks_together(config, num_ranks)]
    reference = [Command([str(config), "--name", "ref"], "reference", environment)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.close)
        trainer = await stack.enter_async_context(started(config, actor))
        await stack.enter_async_context(started(config, reference, "reference"))
        life = await stack.enter_async_context(run.controller())
        for number, engine in enumerate(engines):
            await stack.enter_async_context(run.rollout(f"rollout-{number}", engine=engine))
        yield trainer, life


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_model_trained_in_shifts_becomes_what_it_becomes_without(
    make_store: MakeStore,
    store: StoreUnderTest,
    tmp_path: Path,
    make_settings: Callable[..., RunSettings],
    num_ranks: int,
) -> None:
    """With two ranks of the actor there are two rollouts, each of which gets its weights from a rank of its own."""
    model = write_qwen3(tmp_path / "model", vocab=288)
    write_tokenizer(model)

    async def run_of(name: str, *, in_shifts: bool) -> list[dict[str, float]]:
        sections = sections_of(model, in_shifts=in_shifts, num_ranks=num_ranks)
        of_its_own = make_store(store.url, f"{store.run}-{name}")
        async with twin_run(of_its_own, tmp_path / name, make_settings, score=score, **sections) as run:
            engines = [SleepingPolicy(model) for _ in range(num_ranks)]
            async with under_way(run, engines, {"ROLECALL_STORE_URL": store.url}) as (trainer, life):
                await life.ends()
                roots = [text for log in trainer.logs for text in log.read_text().splitlines() if OVER_MEMORY in text]
            for engine in engines:
                assert engine.num_bytes == [0] * len(engine.num_bytes)
                assert (len(engine.num_bytes) >= NUM_STEPS) == in_shifts
            served = {text.rpartition(" ranks ")[2] for text in roots}
            assert served >= ({"[1]", "[2]"} if in_shifts and num_ranks == 2 else {str([*range(1, 1 + num_ranks)])})
            assert run.newest().step == NUM_STEPS
        return run.metrics()

    apart, shared = await run_of("apart", in_shifts=False), await run_of("shared", in_shifts=True)
    assert [step["step"] for step in shared] == [step["step"] for step in apart] == [1, 2, 3]
    for alone, together in zip(apart, shared, strict=True):
        assert together["actor/grad_norm"] > 0
        # The reference computes groups as they land, or a batch: its rows are packed, and rounded, in another way.
        alike = {name: pytest.approx(alone[name], rel=1e-4, abs=1e-5) for name in SAME}
        assert {name: together[name] for name in SAME} == alike


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_rank_that_is_killed_while_all_of_them_send_costs_its_run_time_alone(
    store: StoreUnderTest, tmp_path: Path, make_settings: Callable[..., RunSettings], lost: int
) -> None:
    model = write_qwen3(tmp_path / "model", vocab=288)
    write_tokenizer(model)
    sections = sections_of(model, in_shifts=True, num_ranks=2)
    environment = {"ROLECALL_STORE_URL": store.url}
    async with twin_run(store, tmp_path / "run", make_settings, score=score, **sections) as run:
        engines = [HoldingPolicy(model) for _ in range(2)]
        async with under_way(run, engines, environment) as (trainer, life):
            for engine in engines:
                await asyncio.wait_for(engine.is_sent_to.wait(), WITHIN_S)
            (torchrun,) = trainer.processes
            ranks = psutil.Process(torchrun.pid).children()
            (rank,) = (each for each in ranks if each.environ().get("RANK") == str(lost))
            rank.kill()
            await trainer.ended(WITHIN_S)
            for engine in engines:
                engine.may_take.set()
            config = run.settings.run.dir / "config.yaml"
            again = [each._replace(environment=environment) for each in ranks_together(config, 2)]
            async with started(config, again) as successor:
                await life.ends()
                assert OVER_MEMORY in successor.said()
        assert run.newest().step == NUM_STEPS
        assert balance(run)[1] == NUM_STEPS * run.settings.algorithm.groups_per_batch


@pytest.mark.timeout(600)
async def test_a_rollout_that_is_slow_to_take_what_another_rank_sends_is_waited_for(
    store: StoreUnderTest, tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    """Rank 0 has sent all by then, and its own rollout has it: the publish is over when all ranks have."""
    model = write_qwen3(tmp_path / "model", vocab=288)
    write_tokenizer(model)
    sections = sections_of(model, in_shifts=True, num_ranks=2)
    sections["run"] = {"num_steps": 1}
    sections["weights"] = {"bucket_bytes": 2**16, "bucket_timeout_s": BUCKET_S}
    async with twin_run(store, tmp_path / "run", make_settings, score=score, **sections) as run:
        engines = [SlowPolicy(model), SleepingPolicy(model)]
        async with under_way(run, engines, {"ROLECALL_STORE_URL": store.url}) as (trainer, life):
            await life.ends()
            said = trainer.said()
        assert run.newest().step == 1
    # one epoch, which every publish went over
    assert said.count(OVER_MEMORY) == 2, said
