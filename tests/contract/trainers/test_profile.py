"""What a trainer promises of a profile: traces of the steps that were asked for and of no other, the bits of a step
that nobody looked at, and an answer whatever becomes of the disk or of the caller.
"""

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import ConflictError, FencedError, InvalidInputError, UnavailableError
from rolecall.settings import RunSettings
from rolecall.training.step.recorder import MAX_MICROBATCHES
from rolecall.v1.training_pb2 import ProfileRequest, StepProfile, TrainRequest
from tests.file_sizes import files_up_to
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import Batches, MakeRun, Rig, served_actor, served_critic, train
from tests.waiting import until

TIMEOUT_S = 60.0
SMALL_BYTES = 20_000
"""Less than a trace before it is compressed, and more than a line of any log."""


def asked(stub: Any, ctl: int, num_steps: int = 1) -> "asyncio.Task[list[StepProfile]]":
    """The profiles of the next steps, once they are there."""

    async def told() -> list[StepProfile]:
        request = ProfileRequest(ctl=ctl, num_steps=num_steps)
        responses = stub.Profile(request, timeout=TIMEOUT_S)
        return [response.profile async for response in responses if response.HasField("profile")]

    return asyncio.create_task(told())


async def step(stub: Any, batches: Batches, ctl: int, number: int) -> None:
    """Trains and commits one step."""
    digest = batches.sealed(number).digest
    batches.commit(await train(stub, TrainRequest(ctl=ctl, step=number, digest=digest)))


def names_in(path: str) -> "Counter[str]":
    """How often each event of a Chrome trace is in it, by name."""
    with gzip.open(path, "rt") as file:
        return Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")


async def waits(rig: Rig) -> None:
    """Returns when a profile waits for the next step."""
    await until(lambda: rig.calls.chain.profiles.begin() is not None)  # type: ignore[attr-defined]


async def weights_after_two(settings: RunSettings, store: StoreUnderTest, batches: list[Any], *, profiled: bool) -> Any:
    """The bits of the weights after the sealed `batches`."""
    async with served_actor(settings, store) as (rig, stub):
        ctl = store.ledger.ctl
        told = asked(stub, ctl, 2) if profiled else None
        if profiled:
            await waits(rig)
        for batch in batches:
            await train(stub, TrainRequest(ctl=ctl, step=batch.step, digest=batch.digest))
        assert told is None or [profile.step for profile in await told] == [0, 1]
        return {
            name: tensor.detach().clone().numpy().tobytes()
            for name, tensor in rig.engine.context.engine.named_weights()
        }


async def test_a_step_that_was_asked_for_leaves_a_trace_of_its_operators_and_others_leave_none(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, tmp_path: Path
) -> None:
    settings, ctl = make_run(), store.ledger.ctl
    async with served_actor(settings, store) as (rig, stub):
        await step(stub, batches, ctl, 0)
        told = asked(stub, ctl)
        await waits(rig)
        await step(stub, batches, ctl, 1)
        await step(stub, batches, ctl, 2)
        (profile,) = await told
    (trace,) = profile.traces
    assert (profile.step, profile.num_passes) == (1, MAX_MICROBATCHES)
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["actor-step1-rank0.json.gz"]
    assert trace.path == str(tmp_path / "profiles" / "actor-step1-rank0.json.gz")
    assert trace.num_bytes == Path(trace.path).stat().st_size
    names = names_in(trace.path)
    assert {"aten::mm", "aten::embedding"} <= names.keys()
    assert (names["forward"], names["backward"], names["optimizer"]) == (MAX_MICROBATCHES, MAX_MICROBATCHES, 1)
    times = [operator.self_s for operator in trace.operators]
    assert times == sorted(times, reverse=True)
    assert 0 < sum(times) <= trace.total_s
    assert len(times) == 10
    assert {operator.name for operator in trace.operators} <= names.keys()


async def test_a_profiled_step_computes_the_same_bits(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    sealed = [batches.sealed(0)]
    settings = make_run()
    async with served_actor(settings, store) as (_, stub):
        batches.commit(await train(stub, TrainRequest(ctl=store.ledger.ctl, step=0, digest=sealed[0].digest)))
    sealed.append(batches.sealed(1))
    plain = await weights_after_two(settings, store, sealed, profiled=False)
    assert await weights_after_two(settings, store, sealed, profiled=True) == plain


async def test_the_critic_is_profiled_as_the_actor_is(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, tmp_path: Path
) -> None:
    settings = make_run(critic={"token_budget": 64}, algorithm={"groups_per_batch": 4, "advantage": {"kind": "gae"}})
    async with served_critic(settings, store) as (rig, stub):
        told = asked(stub, store.ledger.ctl)
        await waits(rig)
        await step(stub, batches, store.ledger.ctl, 0)
        (profile,) = await told
    assert profile.traces[0].path == str(tmp_path / "profiles" / "critic-step0-rank0.json.gz")
    assert names_in(profile.traces[0].path)["aten::mm"]


@pytest.mark.parametrize("hindrance", ["full disk", "file in the way"])
async def test_a_trace_that_cannot_be_written_says_why_and_ends_no_step(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, tmp_path: Path, hindrance: str
) -> None:
    ctl = store.ledger.ctl
    async with served_actor(make_run(), store) as (rig, stub):
        told = asked(stub, ctl, 2)
        await waits(rig)
        digest = batches.sealed(0).digest
        if hindrance == "full disk":
            with files_up_to(SMALL_BYTES):
                batches.commit(await train(stub, TrainRequest(ctl=ctl, step=0, digest=digest)))
            assert not list((tmp_path / "profiles").iterdir())  # neither half a trace nor what it is made of
        else:
            (tmp_path / "profiles").touch()
            batches.commit(await train(stub, TrainRequest(ctl=ctl, step=0, digest=digest)))
            (tmp_path / "profiles").unlink()
        await step(stub, batches, ctl, 1)
        first, second = await told
    assert "profiles" in first.traces[0].failure
    assert not first.traces[0].path
    assert names_in(second.traces[0].path)["aten::mm"]


async def test_one_request_at_a_time_which_ends_with_its_caller(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, tmp_path: Path
) -> None:
    ctl = store.ledger.ctl
    async with served_actor(make_run(), store) as (rig, stub):
        for num_steps in (0, -1, 11):
            with pytest.raises(InvalidInputError, match="1 to 10"):
                await asked(stub, ctl, num_steps)
        with pytest.raises(FencedError):
            await asked(stub, ctl - 1)
        leaving = asked(stub, ctl, 10)
        await waits(rig)
        with pytest.raises(ConflictError, match="another profile"):
            await asked(stub, ctl)
        leaving.cancel()
        await until(lambda: rig.calls.chain.profiles.begin() is None)  # type: ignore[attr-defined]
        await step(stub, batches, ctl, 0)
        assert not (tmp_path / "profiles").exists()
        shown = stub.Profile(ProfileRequest(ctl=ctl, num_steps=1), timeout=TIMEOUT_S)
        assert not (await anext(aiter(shown))).HasField("profile")  # it waits, and says so
        shown.cancel()
        await until(lambda: rig.calls.chain.profiles.begin() is None)  # type: ignore[attr-defined]
        waiting = asked(stub, ctl)
        await waits(rig)
        await rig.calls.drain()
        with pytest.raises(UnavailableError, match="this role ends"):
            await waiting


async def test_a_step_that_failed_is_recorded_when_it_is_applied(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    ctl = store.ledger.ctl
    async with served_actor(make_run(), store) as (rig, stub):
        told = asked(stub, ctl)
        await waits(rig)
        with pytest.raises(Exception, match="sealed"):
            await train(stub, TrainRequest(ctl=ctl, step=0, digest="not sealed"))
        await step(stub, batches, ctl, 0)
        assert [profile.step for profile in await told] == [0]
