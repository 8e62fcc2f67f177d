"""Models with soft caps, Gemma 4 with all that its layers share, against plain Hugging Face with AdamW, one sequence at
a time, on rows longer than their windows.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM

from rolecall.data.model.trainable import check_trainable
from rolecall.errors import ConfigError
from rolecall.training.engine import TokenOutputs
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts, pack, unpack
from tests.checkpoint_rig import exported, load
from tests.integration.fsdp_oracle import (
    CPU,
    assert_same_weights,
    make_engine,
    oracle_model,
    oracle_outputs,
    oracle_training,
)
from tests.integration.fsdp_ranks import make_rows, train_step, weights_of
from tests.integration.test_fsdp_engine import run_ranks
from tests.tiny_gemma import write_gemma2, write_gemma4, write_gemma4_with_images

pytestmark = pytest.mark.usefixtures("one_rank")

WRITERS: dict[str, Callable[[Path], Path]] = {
    "gemma4": write_gemma4,
    "mixture": partial(write_gemma4, mixture=True),
    "gemma2": write_gemma2,
}


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the models."""
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


def test_logprobs_and_entropy_are_those_of_hugging_face(model: Path) -> None:
    rows = make_rows(9)
    packed = pack(rows, [], temperature=0.7, device=CPU)
    (outputs,) = make_engine(model, optimizer=None).forward([packed], entropy=True)
    assert isinstance(outputs, TokenOutputs)
    theirs = oracle_model(model)
    ours = zip(unpack(outputs.logprobs_N, packed.lengths), unpack(outputs.entropy_N, packed.lengths), strict=True)
    with torch.no_grad():
        for (logprobs, entropy), row in zip(ours, rows, strict=True):
            expected_logprobs, expected_entropy = oracle_outputs(theirs, row, 0.7)
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
            np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


def test_one_rank_trains_as_hugging_face_does_and_gives_back_its_own_files(model: Path, tmp_path: Path) -> None:
    rows = make_rows(10)
    engine = make_engine(model)
    assert_same_weights(weights_of(engine), load_file(model / "model.safetensors"), atol=0)
    outcomes = [train_step(engine, rows, token_budget=64, seed=step) for step in range(4)]
    losses, norms, theirs = oracle_training(model, rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)
    theirs.save_pretrained(tmp_path)
    assert_same_weights(weights_of(engine), load_file(tmp_path / "model.safetensors"), atol=2e-4)


def test_a_language_model_is_saved_alone_by_the_line_that_the_refusal_gives(tmp_path: Path) -> None:
    whole = write_gemma4_with_images(tmp_path / "whole")
    with pytest.raises(ConfigError) as refused:
        check_trainable(whole)
    line = re.search(
        r"Gemma4ForCausalLM\.from_pretrained\(\.\.\., key_mapping=\{r(\".*\"): (\".*\")\}\)", refused.value.message
    )
    assert line is not None
    mapping = {line[1].strip('"'): line[2].strip('"')}
    alone = Gemma4ForCausalLM.from_pretrained(whole, key_mapping=mapping)
    alone.save_pretrained(tmp_path / "alone", save_original_format=False)
    weights, published = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "whole"))
    assert_same_weights(
        weights, {name.replace(".language_model", ""): x for name, x in published.items() if "language" in name}, atol=0
    )
    assert_same_weights(weights_of(make_engine(tmp_path / "alone")), weights, atol=0)


def test_a_beginning_that_rows_share_is_computed_once_and_trains_as_in_each(model: Path) -> None:
    rows = make_rows(6)
    beginning = rows[0]["token_ids"][:14]
    for row in rows[1:4]:
        length = min(len(row["token_ids"]), len(beginning))
        row["token_ids"][:length] = beginning[:length]
    packed = pack(rows, ["loss_mask"], temperature=0.7, device=CPU)
    assert packed.prefixes is not None
    engine = make_engine(model)
    loss = engine.forward_backward([packed], SftObjective(local_counts(rows))).values()["sft/loss"]
    losses, norms, _ = oracle_training(model, rows, 1)
    np.testing.assert_allclose([loss, engine.step().grad_norm], [losses[0], norms[0]], rtol=1e-5)


@pytest.mark.thorough("test_one_rank_trains_as_hugging_face_does_and_gives_back_its_own_files")
def test_ranks_that_share_matrices_and_the_vocabulary_cap_their_parts(tmp_path: Path) -> None:
    rows, model = make_rows(10), write_gemma2(tmp_path / "model")
    outcomes = run_ranks(2, model, tmp_path / "two", parallel={"tensor": 2}, save_after=0)
    losses, norms, _ = oracle_training(model, rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)


@pytest.mark.thorough("test_one_rank_trains_as_hugging_face_does_and_gives_back_its_own_files")
@pytest.mark.parametrize("parallel", [{}, {"sequence": 2}], ids=["shards", "sequences"])
def test_two_ranks_that_recompute_layers_train_so_and_their_checkpoint_goes_on_at_one(
    model: Path, parallel: dict[str, int], tmp_path: Path
) -> None:
    rows = make_rows(10)
    outcomes = run_ranks(2, model, tmp_path / "two", gradient_checkpointing=True, parallel=parallel)
    losses, norms, _ = oracle_training(model, rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)
    engine = make_engine(model)
    load(engine, tmp_path / "two" / "checkpoint")
    saved = load_file(exported(tmp_path / "two" / "checkpoint") / "model.safetensors")
    assert_same_weights(weights_of(engine), saved, atol=0)
    later = [train_step(engine, rows, token_budget=40, seed=step) for step in (2, 3)]
    np.testing.assert_allclose([o["loss"] for o in later], losses[2:], rtol=1e-5)
