"""What ReferenceService promises, over a real connection, a real store and a tiny real model."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.v1.reference_pb2 import GetReferenceInfoRequest
from rolecall.v1.training_pb2 import ComputeColumnRequest
from services.reference.ranks import columns_by_prefix
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.served import Batches, served_reference, settings_tree, true_distribution, true_logprobs


async def test_its_column_agrees_with_transformers_and_is_written_once(store: StoreUnderTest, tmp_path: Path) -> None:
    model = write_qwen3(tmp_path / "policy", seed=4)
    batches = Batches(store, model)
    rows = [row for group in batches.sampled(4) for row in group.rows]
    algorithm = {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1}}
    references = {"ref": {"token_budget": 64}}
    settings = RunSettings.model_validate(
        settings_tree(store, model, tmp_path, algorithm=algorithm, references=references)
    )
    request = ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows)
    async with served_reference(settings, "ref", store) as reference:
        info = await reference.GetInfo(GetReferenceInfoRequest(), timeout=30)
        first, second = await asyncio.gather(
            reference.ComputeLogprobs(request, timeout=30), reference.ComputeLogprobs(request, timeout=30)
        )
        third = await reference.ComputeLogprobs(request, timeout=30)
    assert info.instance == "ref"
    assert first.num_tokens == second.num_tokens == sum(row.num_tokens for row in rows)
    assert third.num_already_written == len(rows)
    for read in store.rows.read(rows, ["token_ids", "response_mask", "ref/logprobs"]):
        expected = true_logprobs(model, read["token_ids"], batches.temperature) * read["response_mask"]
        np.testing.assert_allclose(read["ref/logprobs"], expected, atol=1e-4)


async def test_a_teacher_writes_its_ranking_under_the_common_prefix(store: StoreUnderTest, tmp_path: Path) -> None:
    model = write_qwen3(tmp_path / "policy", seed=4)
    batches = Batches(store, model)
    rows = [row for group in batches.sampled(4) for row in group.rows]
    distillation = {"teacher": "wise", "placement": "loss", "top_k": 5}
    algorithm = {"groups_per_batch": 4, "distillation": distillation}
    references = {"wise": {"token_budget": 64}}
    settings = RunSettings.model_validate(
        settings_tree(store, model, tmp_path, algorithm=algorithm, references=references)
    )
    request = ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows, prefix="teacher")
    async with served_reference(settings, "wise", store) as reference:
        await reference.ComputeLogprobs(request, timeout=30)
        again = await reference.ComputeLogprobs(request, timeout=30)
        with pytest.raises(InvalidInputError, match="prefix 'other'"):
            await reference.ComputeLogprobs(
                ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows, prefix="other"), timeout=30
            )
    assert again.num_already_written == len(rows)
    for read in store.rows.read(
        rows, ["token_ids", "response_mask", "teacher/logprobs", "teacher/topk_ids", "teacher/topk_logprobs"]
    ):
        log_p = true_distribution(model, read["token_ids"], batches.temperature)
        mask = read["response_mask"] != 0
        ids, ranked = read["teacher/topk_ids"], read["teacher/topk_logprobs"]
        assert ids.shape == ranked.shape == (mask.size, 5)
        assert ids.dtype == np.int32
        assert not ids[~mask].any()
        assert not ranked[~mask].any()
        expected = np.sort(log_p, 1)[:, ::-1][:, :5]
        np.testing.assert_allclose(ranked[mask], expected[mask], atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(log_p, ids.astype(np.int64), 1)[mask], ranked[mask], atol=1e-4)
        np.testing.assert_allclose(
            read["teacher/logprobs"], true_logprobs(model, read["token_ids"], batches.temperature) * mask, atol=1e-4
        )


def test_a_ranking_is_of_the_ids_that_the_policy_knows_and_one_of_all_of_them_is_refused(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    model = write_qwen3(tmp_path / "policy", seed=4)

    def of(top_k: int) -> Wanted | None:
        distillation = {"teacher": "wise", "placement": "loss", "top_k": top_k}
        algorithm = {"groups_per_batch": 4, "distillation": distillation}
        tree = settings_tree(store, model, tmp_path, algorithm=algorithm, references={"wise": {}})
        return columns_by_prefix(RunSettings.model_validate(tree), "wise")["teacher"].wanted

    assert of(5) == Wanted(top_k=5, num_ids=288)
    with pytest.raises(ConfigError, match=r"top_k 288 is not less than the 288 ids"):
        of(288)
