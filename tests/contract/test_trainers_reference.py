"""What ReferenceService promises, over a real connection, a real store and a tiny real model."""

import asyncio
from pathlib import Path

import numpy as np

from rolecall.settings import RunSettings
from rolecall.v1.reference_pb2 import GetReferenceInfoRequest
from rolecall.v1.training_pb2 import ComputeColumnRequest
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.trainer_rig import Batches, served_reference, settings_tree, true_logprobs


async def test_its_column_agrees_with_transformers_and_is_written_once(store: StoreUnderTest, tmp_path: Path) -> None:
    model = write_qwen3(tmp_path / "policy", seed=4)
    batches = Batches(store, model)
    rows = [row for group in batches.sampled(4) for row in group.rows]
    algorithm = {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1}}
    references = {"ref": {"token_budget": 64, "num_threads": 1}}
    settings = RunSettings.model_validate(settings_tree(store, model, tmp_path, algorithm=algorithm, references=references))
    request = ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows)
    async with served_reference(settings, "ref", store) as reference:
        info = await reference.GetInfo(GetReferenceInfoRequest(), timeout=5)
        first, second = await asyncio.gather(reference.ComputeLogprobs(request, timeout=30), reference.ComputeLogprobs(request, timeout=30))
        third = await reference.ComputeLogprobs(request, timeout=30)
    assert info.instance == "ref"
    assert first.num_tokens == second.num_tokens == sum(row.num_tokens for row in rows)
    assert third.num_already_written == len(rows)
    for read in store.rows.read(rows, ["token_ids", "response_mask", "ref/logprobs"]):
        expected = true_logprobs(model, read["token_ids"], batches.temperature) * read["response_mask"]
        np.testing.assert_allclose(read["ref/logprobs"], expected, atol=1e-4)
