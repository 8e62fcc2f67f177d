"""Distillation through a whole light run: each prompt's own teacher is asked, and what it says is trained on; trainers'
columns come before the seal.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.errors import ConfigError
from rolecall.v1 import reference_pb2, reference_pb2_grpc, training_pb2
from rolecall.v1.trajectory_pb2 import RowRef
from rolecall.wire import Array
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import LightRun, served
from tests.waiting import until


class LightTeacher(reference_pb2_grpc.ReferenceServiceServicer):
    """A teacher that finds every token as likely as e^logprob, and remembers whom it taught."""

    def __init__(self, store: StoreUnderTest, instance: str, logprob: float) -> None:
        self.store = store
        self.instance = instance
        self.logprob = logprob
        self.taught: dict[str, RowRef] = {}
        self.prefixes: set[str] = set()

    async def ComputeLogprobs(
        self, request: training_pb2.ComputeColumnRequest, context: Any
    ) -> training_pb2.ComputeColumnResponse:
        refs = list(request.rows)
        self.taught |= {ref.id: ref for ref in refs}
        self.prefixes.add(request.prefix)
        rows = await asyncio.to_thread(self.store.rows.read, refs, ["response_mask"])
        columns: list[dict[str, Array]] = [
            {f"{request.prefix}/logprobs": row["response_mask"].astype(np.float32) * np.float32(self.logprob)}
            for row in rows
        ]
        return training_pb2.ComputeColumnResponse(
            num_already_written=await asyncio.to_thread(self.store.rows.put, refs, columns)
        )

    async def Offload(self, request: training_pb2.OffloadRequest, context: Any) -> training_pb2.OffloadResponse:
        return training_pb2.OffloadResponse()

    async def GetInfo(
        self, request: reference_pb2.GetReferenceInfoRequest, context: Any
    ) -> reference_pb2.GetReferenceInfoResponse:
        return reference_pb2.GetReferenceInfoResponse(instance=self.instance, world_size=1)


async def section_of(stack: AsyncExitStack, teacher: LightTeacher) -> dict[str, str]:
    """The section of a reference that is elsewhere: here."""
    add = reference_pb2_grpc.add_ReferenceServiceServicer_to_server
    return {"address": await served(stack, add, teacher, "rolecall.v1.ReferenceService")}


async def test_two_teachers_each_teach_the_prompts_of_their_subject(
    light_run: LightRun, store: StoreUnderTest, tmp_path: Path
) -> None:
    subjects = ["math" if i % 3 else "code" for i in range(30)]
    lines = (
        json.dumps({"uid": str(i), "prompt": f"number {i}", "ground_truth": "x", "subject": subject}) + "\n"
        for i, subject in enumerate(subjects)
    )
    (tmp_path / "taught.jsonl").write_text("".join(lines))
    reckoner, coder = LightTeacher(store, "reckoner", -0.5), LightTeacher(store, "coder", -2.0)
    distillation = {"field": "subject", "teachers": {"math": "reckoner", "code": "coder"}, "coef": 0.5}
    async with AsyncExitStack() as stack:
        sections: dict[str, Any] = {
            "data": {"train": str(tmp_path / "taught.jsonl")},
            "algorithm": {"groups_per_batch": 4, "distillation": distillation},
            "references": {"reckoner": await section_of(stack, reckoner), "coder": await section_of(stack, coder)},
            "sampling": {"num_responses": 1},
            "run": {"checkpoint_every_steps": 1000, "num_steps": 3},
        }
        run = await stack.enter_async_context(light_run(**sections))
        life = await stack.enter_async_context(run.controller())
        await stack.enter_async_context(run.rollout("rollout-0"))
        await until(lambda: len(run.actor.trainer.trained) >= 8)
        trained = run.actor.trainer.trained[:8]
        refs = [(reckoner.taught | coder.taught)[id] for id in trained]
        metas = store.rows.read_meta(refs)
        rows = store.rows.read(refs, ["loss_mask", "advantages", "old_logprobs", "teacher/logprobs"])
        await life.ends()
    assert {meta.prompt.metadata["subject"] for meta in metas} == {"math", "code"}
    assert not reckoner.taught.keys() & coder.taught.keys()
    assert reckoner.prefixes == coder.prefixes == {"teacher"}
    for id, meta, row in zip(trained, metas, rows, strict=True):
        teacher = reckoner if meta.prompt.metadata["subject"] == "math" else coder
        assert id in teacher.taught
        expected = np.where(row["loss_mask"] != 0, -0.5 * (row["old_logprobs"] - teacher.logprob), 0)
        np.testing.assert_allclose(row["advantages"], expected, atol=1e-6)
    assert run.actor.trainer.columns_asked == [(step, 4) for step in range(3)]
    assert all("distillation/reverse_kl" in line for line in run.metrics())


async def test_teachers_whose_addresses_were_exchanged_teach_nothing(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    kl = {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1}}
    async with AsyncExitStack() as stack:
        other = LightTeacher(store, "other", -0.5)
        run = await stack.enter_async_context(
            light_run(algorithm=kl, references={"ref": await section_of(stack, other)})
        )
        life = await stack.enter_async_context(run.controller())
        with pytest.raises(ConfigError, match=r"references\.ref\.address: the reference 'other' answers there; corr"):
            await life.ends()
    assert not other.taught


async def test_the_actor_is_asked_before_the_seal_for_what_an_estimator_reads_of_it(light_run: LightRun) -> None:
    algorithm = {"groups_per_batch": 4, "advantage": {"kind": "optimal_token_baseline"}}
    async with light_run(algorithm=algorithm) as run:
        await run.to_the_end("rollout-0")
    assert run.actor.trainer.columns_asked == [(step, 8) for step in range(3)]
    assert len(run.actor.trainer.trained) == 24
