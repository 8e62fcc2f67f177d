"""Model directories of text and images as they are published, where transformers would write others."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rolecall.data.model.files import read_model
from rolecall.training.engine import TokenOutputs
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts
from tests.checkpoint_rig import exported, save
from tests.integration.fsdp_oracle import assert_same_weights
from tests.integration.fsdp_ranks import make_engine, weights_of
from tests.integration.vision_ranks import SECTION
from tests.tiny_models import VisionFamily, transpose_experts, write_vision
from tests.vision_rig import make_row, make_rows, oracle_logprobs, oracle_model, packed, write_published

pytestmark = pytest.mark.usefixtures("one_rank")


def write_other(family: VisionFamily, path: Path) -> Path:
    """A directory that has the tensors of the one in `path` in other shapes, or under other names, or more of them."""
    other = path.parent / "other"
    if family != "qwen3_vl_moe":
        return write_published(path, other)
    shutil.copytree(path, other)
    transpose_experts(other)
    return other


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_directory_is_trained_and_exported_alike_however_it_is_written(tmp_path: Path, family: VisionFamily) -> None:
    path, rows = write_vision(tmp_path / "model", family), make_rows()
    other = write_other(family, path)
    assert read_model(other).num_parameters == read_model(path).num_parameters
    norms, weights = [], []
    for each in (path, other):
        engine = make_engine(each, optimizer=SECTION)
        engine.forward_backward([packed(each, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
        norms.append(engine.step().grad_norm)
        weights.append(weights_of(engine))
    assert norms[0] == norms[1]
    assert_same_weights(weights[1], weights[0], atol=0)
    assert {name: each.shape for name, each in weights[1].items()} == {
        name: each.shape for name, each in load_file(path / "model.safetensors").items()
    }
    save(engine, tmp_path / "checkpoint")
    whole = exported(tmp_path / "checkpoint")
    assert_same_weights(load_file(whole / "model.safetensors"), weights[0], atol=0)
    (outputs,) = engine.forward([packed(other, [rows[3]])])
    assert isinstance(outputs, TokenOutputs)
    with torch.no_grad():
        expected = oracle_logprobs(oracle_model(whole), whole, rows[3])
    np.testing.assert_allclose(outputs.logprobs_N, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_in_a_run_of_text_a_published_model_is_its_language_model_and_its_tower_stays(
    tmp_path: Path, family: VisionFamily
) -> None:
    path = write_published(write_vision(tmp_path / "model", family), tmp_path / "published")
    rows = [make_row([], [61, 62, 63]), make_row([], [64, 65])]
    engine = make_engine(path, optimizer=SECTION, freeze_vision_tower=True, shows_images=False)
    (outputs,) = engine.forward([packed(path, rows)])
    assert isinstance(outputs, TokenOutputs)
    alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([oracle_logprobs(alone, path, row) for row in rows])
    np.testing.assert_allclose(outputs.logprobs_N, expected, atol=1e-5)
    engine.forward_backward([packed(path, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
    engine.step()
    save(engine, tmp_path / "checkpoint")
    before, after = (load_file(each / "model.safetensors") for each in (path, exported(tmp_path / "checkpoint")))
    tower = {name for name in before if "visual" in name}
    assert tower
    for name in tower:
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
