"""Layouts of four ranks (replicas, sequence and tensor parallel, sharding) train what one rank trains, each going on
from the other's checkpoint.

That loss and gradients agree for every objective and shape of batch is test_training_exact.py's.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.checkpoint_rig import load
from tests.forks import run_ranks
from tests.integration import parallel_ranks
from tests.integration.parallel_ranks import ADAPTERS, LAYOUTS, STEPS_PER_LAYOUT, WORLD_SIZE, make_engine, train
from tests.tiny_models import write_qwen3

pytestmark = [
    pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("one_rank"),
]

NUM_GROUPS = 3
"""Of parameters that FSDP reduces together: two layers and the rest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the four ranks left."""
    path = tmp_path_factory.mktemp("parallel")
    write_qwen3(path / "model", tied=True, vocab=150, hidden=32)
    run_ranks(path, WORLD_SIZE, parallel_ranks.main, path)
    return path


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """What rank 0 noted."""
    noted: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return noted


def test_every_layout_goes_on_where_another_left_off_as_one_rank_does(folder: Path, seen: dict[str, Any]) -> None:
    alone = make_engine(folder / "model", {})
    norms = []
    for index in range(len(LAYOUTS)):
        norms += train(alone, index * STEPS_PER_LAYOUT, STEPS_PER_LAYOUT)
        ours = load_file(folder / f"weights-{index}.safetensors")
        for name, tensor in alone.named_weights():
            # AdamW divides by the root of tiny second moments: last bits of a gradient may move a weight by a few per
            # cent of the rate
            np.testing.assert_allclose(ours[name], tensor, atol=2e-4, rtol=0, err_msg=f"{name} in {LAYOUTS[index]}")
    np.testing.assert_allclose(seen["norms"], norms, rtol=1e-4)


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_a_checkpoint_of_any_layout_is_loaded_by_one_rank(folder: Path, index: int) -> None:
    alone = make_engine(folder / "model", {})
    load(alone, folder / f"checkpoint-{index}")
    ours = load_file(folder / f"weights-{index}.safetensors")
    for name, tensor in alone.named_weights():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert alone.num_updates == (index + 1) * STEPS_PER_LAYOUT


def test_adapters_are_trained_by_ranks_that_share_sequences_as_by_one(folder: Path, seen: dict[str, Any]) -> None:
    alone = make_engine(folder / "model", {}, lora=ADAPTERS)
    np.testing.assert_allclose(seen["adapter_norms"], train(alone, 0, 2), rtol=1e-5)


def test_gradients_are_summed_over_replicas_once_and_scattered_as_asked(seen: dict[str, Any]) -> None:
    sharded, unsharded = seen["reductions"]
    assert sharded == {"reduce_scatter": 3 * NUM_GROUPS, "allreduce": NUM_GROUPS}
    assert unsharded == {"reduce_scatter": NUM_GROUPS, "allreduce": NUM_GROUPS}


def test_ranks_of_a_slot_count_once(seen: dict[str, Any]) -> None:
    assert seen["slots"] == [0.0, 2.0, 1.0]


def test_layouts_that_the_model_or_the_ranks_do_not_fit_are_refused_in_words(seen: dict[str, Any]) -> None:
    tensor, sequence, fits = seen["refused"]
    assert "parallel.tensor 4 does not divide the model's num_key_value_heads 2" in tensor
    assert "4 ranks cannot be laid out" in sequence
    assert fits == ""
