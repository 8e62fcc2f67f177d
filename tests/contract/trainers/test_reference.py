"""What ReferenceService promises, over a real connection, a real store and a tiny real model."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rolecall.errors import ConfigError, ConflictError, FencedError, InvalidInputError
from rolecall.settings import RunSettings
from rolecall.shifts import ShiftLocks
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.v1 import reference_pb2_grpc
from rolecall.v1.reference_pb2 import GetReferenceInfoRequest
from rolecall.v1.training_pb2 import STATE_PART_UNSPECIFIED, ComputeColumnRequest, OffloadRequest
from services.reference.ranks import columns_by_prefix
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_phi3, write_qwen3
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.served import (
    Batches,
    served_reference,
    served_reference_rig,
    settings_tree,
    true_distribution,
    true_logprobs,
)


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


@pytest.mark.parametrize("original_tokens", [63, 64])
async def test_it_takes_the_factors_of_long_rope_that_the_runs_sampler_takes_whatever_it_is_asked_of(
    store: StoreUnderTest, tmp_path: Path, original_tokens: int
) -> None:
    """The run's longest sequence has 64 tokens, and no row has 20."""
    model = write_phi3(tmp_path / "policy", original_tokens=original_tokens, vocab=288)
    write_tokenizer(model)
    rows = [row for group in Batches(store, model).sampled(2) for row in group.rows]
    algorithm = {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1}}
    references = {"ref": {"token_budget": 64}}
    settings = RunSettings.model_validate(
        settings_tree(store, model, tmp_path, algorithm=algorithm, references=references)
    )
    async with served_reference(settings, "ref", store) as reference:
        await reference.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows), timeout=30)
    oracle = tmp_path / "oracle"  # transformers takes the short factors of every row
    shutil.copytree(model, oracle)
    config = json.loads((oracle / "config.json").read_text())
    if original_tokens < settings.longest_trajectory:
        config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (oracle / "config.json").write_text(json.dumps(config))
    for read in store.rows.read(rows, ["token_ids", "response_mask", "ref/logprobs"]):
        expected = true_logprobs(oracle, read["token_ids"], 0.8) * read["response_mask"]
        np.testing.assert_allclose(read["ref/logprobs"], expected, atol=1e-4)


async def test_on_devices_of_others_it_holds_memory_in_its_shift_from_a_column_to_offload(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    model = write_qwen3(tmp_path / "policy", seed=4)
    batches = Batches(store, model)
    groups = [group.rows for group in batches.sampled(2)]
    algorithm = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    references = {"ref": {"token_budget": 64, "offload": True}}
    tree = settings_tree(
        store, model, tmp_path, algorithm=algorithm, references=references, rollout={"sleep_mode": True}
    )
    settings, ctl = RunSettings.model_validate(tree), store.ledger.ctl
    locks = ShiftLocks(settings.run.dir)
    async with served_reference_rig(settings, "ref", store) as rig:
        reference, state = reference_pb2_grpc.ReferenceServiceStub(rig.channel), rig.engine.context.state
        loaded = state.num_bytes_away()
        assert loaded > 0
        assert locks.give_to("trainers")
        with pytest.raises(ConflictError, match="not the references' now"):
            await reference.ComputeLogprobs(ComputeColumnRequest(ctl=ctl, rows=groups[0]), timeout=30)
        for rows in groups:  # it comes back as it was
            assert locks.give_to("references")
            await reference.ComputeLogprobs(ComputeColumnRequest(ctl=ctl, rows=rows), timeout=30)
            assert state.num_bytes_away() == 0
            assert not locks.give_to("trainers")
            for _ in range(2):
                await reference.Offload(OffloadRequest(ctl=ctl), timeout=30)
            assert state.num_bytes_away() == loaded
            assert locks.give_to("trainers")
        with pytest.raises(InvalidInputError, match="no parts of a role's state"):
            await reference.Offload(OffloadRequest(ctl=ctl, parts=[STATE_PART_UNSPECIFIED]), timeout=30)
        with pytest.raises(FencedError):
            await reference.Offload(OffloadRequest(ctl=ctl - 1), timeout=30)
    locks.close()
    for read in store.rows.read(
        [row for rows in groups for row in rows], ["token_ids", "response_mask", "ref/logprobs"]
    ):
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
