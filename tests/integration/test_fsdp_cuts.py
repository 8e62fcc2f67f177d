"""A step of FsdpEngine is the same however its rows are cut into microbatches, packed, ordered and shared."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall.settings import (
    Aggregation,
    AlgorithmSection,
    ClippedLoss,
    CorrectionSection,
    KlSection,
    OptimizerSection,
)
from rolecall.training.engine import Microbatch
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.packed_model import Head
from rolecall.training.objective.objectives import PolicyObjective, ValueObjective, policy_columns
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.v1.trajectory_pb2 import Coefficients
from tests.checkpoint_rig import load, save
from tests.integration.fsdp_oracle import CPU, assert_same_weights, make_engine
from tests.integration.fsdp_ranks import VOCAB, make_rows, weights_of

pytestmark = pytest.mark.usefixtures("one_rank")

MODELS = ["dense", "tied", "moe"]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_step_does_not_depend_on_microbatches_packing_or_order(
    split_engine: FsdpEngine, aggregation: Aggregation, data: st.DataObject
) -> None:
    rows = make_rows(8)
    algorithm = AlgorithmSection(
        groups_per_batch=1,
        policy_loss=ClippedLoss(dual_clip=3.0),
        aggregation=aggregation,
        kl=KlSection(reference="ref", kl_coef=0.1),
        correction=CorrectionSection(),
    )
    rows = [{**row, "ref/logprobs": row["rollout_logprobs"] * 0.9} for row in rows]
    objective = PolicyObjective(algorithm, local_counts(rows), Coefficients(kl_coef=0.1, entropy_coef=0.01), 1)

    def step(parts: list[list[int]]) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
        load(split_engine, split_engine_start(split_engine))
        packed = [
            pack([rows[i] for i in part], policy_columns(algorithm), temperature=1.0, device=CPU) for part in parts
        ]
        metrics = split_engine.forward_backward(packed, objective, entropy=True)
        return split_engine.step().grad_norm, metrics.values(), weights_of(split_engine)

    order = list(data.draw(st.permutations(range(8))))
    cuts = sorted(data.draw(st.sets(st.integers(1, 7))) | {0, 8})
    whole = step([list(range(8))])
    split = step([order[a:b] for a, b in pairwise(cuts)])
    assert split[0] == pytest.approx(whole[0], rel=1e-5)
    assert split[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-5)
    assert_same_weights(split[2], whole[2], atol=1e-5)


def make_groups(num_prompts: int, num_responses: int) -> list[Row]:
    """Rows whose prompts of 9 tokens are alike in groups, and some of whose responses begin alike too."""
    rng = np.random.default_rng(7)
    rows: list[Row] = []
    for _ in range(num_prompts):
        prompt = rng.integers(0, VOCAB, 9, dtype=np.int32)
        for index in range(num_responses):
            ids = np.concatenate([prompt, [index % 2, 3], rng.integers(0, VOCAB, rng.integers(1, 9))]).astype(np.int32)
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            names = ("advantages", "values", "returns", "rollout_logprobs", "old_logprobs")
            rows.append(
                {
                    "token_ids": ids,
                    "response_mask": mask,
                    "loss_mask": mask,
                    **{n: rng.normal(size=len(ids)).astype(np.float32) * 0.3 for n in names},
                }
            )
    return rows


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("head", ["policy", "value"])
def test_what_sequences_have_in_common_is_computed_once_and_changes_no_number(
    models: dict[str, Path], kind: str, head: Head
) -> None:
    rows = make_groups(3, 4)
    algorithm = AlgorithmSection(groups_per_batch=1)
    counts = local_counts(rows)
    objective = (
        PolicyObjective(algorithm, counts, Coefficients(entropy_coef=0.01), 1)
        if head == "policy"
        else ValueObjective(0.2, counts)
    )
    columns = [*policy_columns(algorithm), "values", "returns"]
    section = OptimizerSection(learning_rate=1.0, eps=1.0, max_grad_norm=1e9)
    together = [pack(rows, columns, temperature=0.7, device=CPU)]
    alone = [pack([row], columns, temperature=0.7, device=CPU) for row in rows]
    assert together[0].prefixes is not None
    assert together[0].prefixes.num_saved >= 3 * 3 * 9
    assert all(microbatch.prefixes is None for microbatch in alone)

    def step(
        microbatches: list[Microbatch],
    ) -> tuple[list[torch.Tensor], dict[str, float], float, dict[str, torch.Tensor], float]:
        engine = make_engine(models[kind], head=head, optimizer=section)
        outputs = zip(*(vars(each).values() for each in engine.forward(microbatches, entropy=True)), strict=True)
        flops, metrics = engine.flops_done, engine.forward_backward(microbatches, objective, entropy=True)
        return (
            [torch.cat(parts) for parts in outputs if parts[0] is not None],
            metrics.values(),
            engine.step().grad_norm,
            weights_of(engine),
            flops,
        )

    shared, own = step(together), step(alone)
    torch.testing.assert_close(shared[0], own[0], rtol=0, atol=1e-5)
    assert shared[1] == pytest.approx(own[1], rel=1e-4, abs=1e-5)
    assert shared[2] == pytest.approx(own[2], rel=1e-5)
    assert_same_weights(shared[3], own[3], atol=1e-5)
    assert shared[4] < own[4]


START: dict[int, Path] = {}


def split_engine_start(engine: FsdpEngine) -> Path:
    return START[id(engine)]


@pytest.fixture(scope="module")
def split_engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FsdpEngine:
    """Its first step moves a weight by g / (|g| + 1): weights after one step show gradients."""
    section = OptimizerSection(learning_rate=1.0, eps=1.0, max_grad_norm=1e9)
    engine = make_engine(models["dense"], optimizer=section)
    START[id(engine)] = tmp_path_factory.mktemp("start")
    save(engine, START[id(engine)])
    return engine
