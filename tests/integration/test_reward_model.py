"""Reward models as the trainers' engine computes them: packed, and equal to transformers' own, one sequence at a
time.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection
from rolecall.training.engine import ValueOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.packed_model import build_model
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import pack
from rolecall.wire import Array
from tests.tiny_models import write_qwen3, write_reward_model

CPU = torch.device("cpu")


def engine_of(path: Path, *, trains: bool = False) -> FsdpEngine:
    optimizer = OptimizerSection() if trains else None
    return FsdpEngine(EngineOptions(path=path, head="value", dtype="float32", optimizer=optimizer), device=CPU)


def sequences(num: int, seed: int = 0) -> list[Array]:
    """Ragged sequences of which the first three begin alike."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(3, 259, size=int(rng.integers(1, 60))).astype(np.int32) for _ in range(num)]
    shared = rng.integers(3, 259, size=30).astype(np.int32)
    return [np.concatenate([shared, ids]) if index < 3 else ids for index, ids in enumerate(drawn)]


def outputs_of(engine: FsdpEngine, rows: list[Array]) -> ValueOutputs:
    packed = pack(
        [{"token_ids": ids, "response_mask": np.ones(len(ids), np.uint8)} for ids in rows],
        [],
        temperature=1.0,
        device=CPU,
    )
    (outputs,) = engine.forward([packed])
    assert isinstance(outputs, ValueOutputs)
    return outputs


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_reward_model_says_packed_what_transformers_says_of_each_sequence(
    tmp_path: Path, one_rank: None, family: Literal["qwen2", "qwen3", "llama"]
) -> None:
    path, rows = write_reward_model(tmp_path, family=family), sequences(9)
    found = outputs_of(engine_of(path), rows).bootstrap_values_S
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(torch.tensor(ids[None], dtype=torch.int64)).logits.item() for ids in rows]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_of_two_labels_at_every_token_the_difference_is_told(tmp_path: Path, one_rank: None) -> None:
    path, rows = write_reward_model(tmp_path, num_labels=2, every_token=True), sequences(4)
    outputs = outputs_of(engine_of(path), rows)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    start = 0
    for ids, last in zip(rows, outputs.bootstrap_values_S.tolist(), strict=True):
        with torch.no_grad():
            logits_T2 = model(torch.tensor(ids[None], dtype=torch.int64)).logits[0]
        found = [*outputs.values_N[start + 1 : start + len(ids)].tolist(), last]
        np.testing.assert_allclose(found, (logits_T2[:, 1] - logits_T2[:, 0]).numpy(), atol=1e-5)
        start += len(ids)


def test_a_critic_starts_from_the_head_of_a_reward_model(tmp_path: Path, one_rank: None) -> None:
    path, rows = write_reward_model(tmp_path), sequences(3)
    engine = engine_of(path, trains=True)
    frozen = outputs_of(engine_of(path), rows)
    torch.testing.assert_close(outputs_of(engine, rows).values_N, frozen.values_N)
    assert "score.weight" in {name for name, _ in engine.named_weights()}


@pytest.mark.parametrize(("num_labels", "head"), [(3, "value"), (1, "policy")])
def test_a_classifier_that_gives_no_one_number_is_refused(
    tmp_path: Path, num_labels: int, head: Literal["policy", "value"]
) -> None:
    path = write_reward_model(tmp_path, num_labels=num_labels)
    with pytest.raises(ConfigError, match="num_labels is 1 or 2" if head == "value" else "language head"):
        build_model(path, head, torch.float32)


def test_a_causal_model_gets_a_value_head_as_before(tmp_path: Path) -> None:
    assert build_model(write_qwen3(tmp_path), "value", torch.float32).replaced_head == "lm_head"
