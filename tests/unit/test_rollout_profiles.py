"""A profile of a rollout: what its caller sees, and what a worker of its engine records."""

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rolecall.errors import ConflictError, InvalidInputError, UnavailableError
from rolecall.v1 import trajectory_pb2
from rolecall.v1.training_pb2 import ProfileRequest, RankTrace, StepProfile
from services.rollout.sampling import SampleRequest
from services.rollout.scripted import ScriptedEngine
from services.rollout.state import HeldWeights
from services.rollout.vllm.pass_recorder import PassRecorder
from services.rollout.vllm.profiles import EngineProfiles
from tests.waiting import until

CPU = torch.device("cpu")


class Recorded(ScriptedEngine):
    """An engine that has made its steps when it is told to, and remembers who stopped waiting for them."""

    def __init__(self) -> None:
        super().__init__()
        self.made = asyncio.Event()
        self.asked: list[tuple[int, str]] = []
        self.left = 0

    async def record(self, num_passes: int, path: str) -> list[RankTrace]:
        self.asked.append((num_passes, path))
        try:
            await self.made.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return [RankTrace(path=f"{path}-rank0.json.gz")]


def asked(profiles: EngineProfiles, num_steps: int = 5) -> "asyncio.Task[list[StepProfile]]":
    async def told() -> list[StepProfile]:
        responses = profiles.record(ProfileRequest(num_steps=num_steps))
        return [response.profile async for response in responses if response.HasField("profile")]

    return asyncio.create_task(told())


async def test_the_caller_hears_that_it_waits_and_then_where_the_traces_are() -> None:
    engine, held = Recorded(), HeldWeights()
    profiles = EngineProfiles(engine, held, Path("run/profiles"), "rollout-3")
    told = profiles.record(ProfileRequest(num_steps=5))
    assert not (await anext(told)).HasField("profile")
    engine.made.set()
    profile = (await anext(told)).profile
    assert engine.asked == [(5, "run/profiles/rollout-3-version-1")]
    assert (profile.step, profile.num_passes) == (-1, 5)
    assert [trace.path for trace in profile.traces] == ["run/profiles/rollout-3-version-1-rank0.json.gz"]
    with pytest.raises(StopAsyncIteration):
        await anext(told)


async def test_one_request_at_a_time_which_ends_with_its_caller_and_with_the_role() -> None:
    engine = Recorded()
    profiles = EngineProfiles(engine, HeldWeights(), Path("profiles"), "rollout-0")
    for wrong in (0, 101):
        with pytest.raises(InvalidInputError, match="1 to 100"):
            await asked(profiles, wrong)
    first = asked(profiles)
    await until(lambda: len(engine.asked) == 1)
    with pytest.raises(ConflictError, match="another profile"):
        await asked(profiles)
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: engine.left == 1)
    second = asked(profiles)
    await until(lambda: len(engine.asked) == 2)
    profiles.end()
    with pytest.raises(UnavailableError, match="this role ends"):
        await second
    with pytest.raises(UnavailableError, match="this role ends"):
        await asked(profiles)
    assert engine.left == 2


async def test_an_engine_without_operators_says_so_once_it_has_moved() -> None:
    engine = ScriptedEngine()
    recording = asyncio.create_task(engine.record(3, "profiles/x"))
    await asyncio.sleep(0.05)
    assert not recording.done()
    await engine.resume()
    sampling = asyncio.create_task(
        engine.sample(SampleRequest("r", [5, 6], trajectory_pb2.SamplingParams(temperature=1.0, max_tokens=8), seed=1))
    )
    (trace,) = await recording
    assert "no operators" in trace.failure
    sampling.cancel()


def passes(recorder: PassRecorder, *tokens: int) -> None:
    """Has the worker compute a pass of each of so many tokens."""
    for number in tokens:
        recorder.execute(SimpleNamespace(total_num_scheduled_tokens=number))


def products(output: SimpleNamespace) -> torch.Tensor:
    """A pass: a product for each token."""
    x = torch.ones(4, 4)
    for _ in range(output.total_num_scheduled_tokens):
        x = x @ x
    return x


async def written(recorder: PassRecorder) -> RankTrace:
    await until(lambda: recorder.trace() is not None)
    trace = recorder.trace()
    assert trace is not None
    return trace


async def test_a_trace_has_the_passes_that_were_asked_for_and_no_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "rollout-0-version4-rank0.json.gz"
    recorder = PassRecorder(products, 2, path, CPU)
    passes(recorder, 0, 3, 0, 2)
    assert recorder.trace() is None  # until the pass after them begins, for sampling is in it
    passes(recorder, 7, 7)
    trace = await written(recorder)
    assert (trace.path, trace.failure) == (str(path), "")
    with gzip.open(path, "rt") as file:
        names = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert names["aten::mm"] == 5
    assert next(each for each in trace.operators if each.name == "aten::mm").num_calls == 5
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_what_was_begun_and_is_not_wanted_any_more_leaves_no_trace(tmp_path: Path) -> None:
    recorder = PassRecorder(products, 2, tmp_path / "a.json.gz", CPU)
    passes(recorder, 1)
    recorder.end()
    passes(recorder, 1, 1, 1)
    assert not list(tmp_path.iterdir())
    other = PassRecorder(products, 1, tmp_path / "b.json.gz", CPU)
    passes(other, 1, 1)
    assert (await written(other)).path


async def test_a_trace_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "profiles").touch()
    recorder = PassRecorder(products, 1, tmp_path / "profiles" / "a.json.gz", CPU)
    passes(recorder, 1, 1)
    assert "profiles" in (await written(recorder)).failure
