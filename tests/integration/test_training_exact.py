"""Loss and gradients do not depend on how a mini-batch was cut, and are those of plain Hugging Face with AdamW.

Every layout is held to one rank that computes all rows in one microbatch, in their order; that one to whole sequences,
one by one, through transformers' own eager attention and losses written out here. All in float32. "Relative" is to the
largest element of the same tensor, or to a tenth of the largest of all where that is more.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolecall.settings import Aggregation, OptimizerSection
from rolecall.training.packing.pack import Row, local_counts
from tests.integration.exact_bench import (
    AGGREGATIONS,
    LAYOUTS,
    MODELS,
    NOTHING_TRAINED,
    OBJECTIVES,
    ONE_ROW,
    TOLERANCE,
    VOCAB,
    Bench,
    Drawn,
    Layout,
    Shape,
    assert_same,
    assert_same_answer,
    make_rows,
    shapes,
)
from tests.integration.exact_ranks import LENGTH, Objective, Ranks, living_ranks
from tests.tiny_models import write_glm4_moe, write_gpt_oss, write_granite, write_qwen3, write_qwen3_5, write_qwen3_moe

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    """Groups of two and four, started together."""
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        yield {size: stack.enter_context(living_ranks(size, folder / str(size))) for size in (2, 4)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("models")
    models = {
        "dense": write_qwen3(root / "dense", hidden=32, heads=4, kv_heads=2, vocab=VOCAB),
        "tied": write_qwen3(root / "tied", hidden=32, heads=4, kv_heads=4, tied=True, vocab=VOCAB),
        "moe": write_qwen3_moe(root / "moe"),
        "sinks": write_gpt_oss(root / "sinks", vocab=VOCAB, head_dim=16),
        "recurrent": write_qwen3_5(root / "recurrent"),
        "balanced": write_glm4_moe(root / "balanced"),
        "scaled": write_granite(root / "scaled", vocab=VOCAB),
    }
    return Bench(models, tmp_path_factory.mktemp("bench"))


STEADY: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
"""The same examples every time: now and then two experts are so nearly tied that a last bit decides between them."""


@settings(max_examples=20, **STEADY)
@given(
    kind=st.sampled_from([*MODELS, "sinks"]),
    drawn=shapes(),
    objective=st.sampled_from(OBJECTIVES),
    token_budget=st.integers(8, 80),
    seed=st.integers(0, 99),
)
def test_gradients_do_not_depend_on_microbatches_packing_or_order(
    bench: Bench, kind: str, drawn: Drawn, objective: tuple[Objective, Aggregation], token_budget: int, seed: int
) -> None:
    job = bench.job(kind, *make_rows(bench, kind, drawn), objective=objective[0], aggregation=objective[1])
    whole, expected = bench.alone(job)
    cut, gradients = bench.alone(replace(job, token_budget=token_budget, seed=seed))
    assert_same_answer(cut, whole)
    assert_same(gradients, expected)


@pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=6, **STEADY)
@given(
    kind=st.sampled_from(MODELS),
    drawn=shapes(),
    objective=st.sampled_from(OBJECTIVES),
    token_budget=st.integers(8, 80),
    seed=st.integers(0, 99),
)
@example(kind="dense", drawn=ONE_ROW, objective=OBJECTIVES[0], token_budget=8, seed=0)
@example(kind="tied", drawn=NOTHING_TRAINED, objective=OBJECTIVES[1], token_budget=80, seed=0)
def test_gradients_do_not_depend_on_the_layout_over_ranks(
    bench: Bench,
    ranks: dict[int, Ranks],
    layout: Layout,
    kind: str,
    drawn: Drawn,
    objective: tuple[Objective, Aggregation],
    token_budget: int,
    seed: int,
) -> None:
    job = bench.job(kind, *make_rows(bench, kind, drawn), objective=objective[0], aggregation=objective[1])
    whole, expected = bench.alone(job)
    spread, gradients = bench.spread(
        ranks[layout.world_size], replace(job, parallel=layout.parallel, token_budget=token_budget, seed=seed)
    )
    assert_same_answer(spread, whole)
    assert_same(gradients, expected)


LOSSES: list[dict[str, Any]] = [
    {"kind": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.1},
    {"kind": "cispo"},
    {"kind": "gmpo"},
    {"kind": "sapo"},
    {"kind": "clip_cov", "fraction": 0.2, "cov_low": 0.1, "clip_eps_low": 0.7},
    {"kind": "kl_cov", "fraction": 0.1},
    {"kind": "dppo_tv", "max_divergence": 1e-3},
    {"kind": "dppo_kl", "max_divergence": 1e-4},
    {"kind": "dro", "beta": 0.5},
    {"kind": "reinforce"},
]
"""Every other policy loss; bounds that the tiny model's probabilities cross."""


@pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one")
@pytest.mark.parametrize("policy_loss", LOSSES, ids=lambda section: section["kind"])
def test_every_policy_loss_has_one_ranks_gradients_on_many_and_under_other_cuts(
    bench: Bench, ranks: dict[int, Ranks], policy_loss: dict[str, Any]
) -> None:
    job = bench.job(
        "dense", *make_rows(bench, "dense", (SHAPE, 11)), policy_loss=policy_loss, aggregation="seq_mean_token_mean"
    )
    whole, expected = bench.alone(job)
    if policy_loss["kind"] in ("clip_cov", "kl_cov"):
        assert 0 < whole.metrics["actor/selected_fraction"] <= policy_loss["fraction"]
    cut, gradients = bench.alone(replace(job, token_budget=30, seed=3))
    assert_same_answer(cut, whole)
    assert_same(gradients, expected)
    for layout in (Layout(2, {}), Layout(2, {"sequence": 2}), Layout(4, {})):
        spread, gradients = bench.spread(
            ranks[layout.world_size], replace(job, parallel=layout.parallel, token_budget=25, seed=5)
        )
        assert_same_answer(spread, whole)
        assert_same(gradients, expected)


@pytest.mark.thorough("test_the_mean_of_normalised_weights_and_their_loss_do_not_depend_on_how_the_step_is_cut")
@pytest.mark.parametrize("kind", ["token", "sequence", "icepop"])
def test_normalised_weights_have_one_ranks_gradients_on_many_and_under_other_cuts(
    bench: Bench, ranks: dict[int, Ranks], kind: str
) -> None:
    correction = {
        "weight": {"kind": kind, "normalize": True},
        "reject": [{"kind": "ratio", "over": "token", "low": 0.3, "high": 3.0}],
    }
    job = bench.job("dense", *make_rows(bench, "dense", (SHAPE, 11)), correction=correction)
    whole, expected = bench.alone(job)
    _, plain = bench.alone(replace(job, correction={**correction, "weight": {"kind": kind}}))
    assert any(not torch.allclose(expected[name], plain[name], rtol=1e-2) for name in plain), "it does nothing"
    cut, gradients = bench.alone(replace(job, token_budget=30, seed=3))
    assert_same_answer(cut, whole)
    assert_same(gradients, expected)
    for layout in (Layout(2, {}), Layout(2, {"sequence": 2}), Layout(4, {"tensor": 2})):
        spread, gradients = bench.spread(
            ranks[layout.world_size], replace(job, parallel=layout.parallel, token_budget=25, seed=5)
        )
        assert_same_answer(spread, whole)
        assert_same(gradients, expected)


NUM_TAUGHT = 4
"""Ids that the teacher of these tests ranks."""
FORWARD_TOPK = {"teacher": "wise", "placement": "loss", "top_k": NUM_TAUGHT, "coef": 0.5}


def taught(rows: list[Row], seed: int) -> list[Row]:
    """`rows` with a teacher's ids, the sampled one sometimes among them, and their logprobs."""
    rng, taught_rows = np.random.default_rng(seed), []
    for row in rows:
        ids = np.array([rng.permutation(VOCAB)[:NUM_TAUGHT] for _ in row["token_ids"]], np.int32).reshape(
            -1, NUM_TAUGHT
        )
        ids[::3, 0] = np.where((ids[::3] == row["token_ids"][::3, None]).any(1), ids[::3, 0], row["token_ids"][::3])
        logprobs = np.log(rng.dirichlet(np.ones(NUM_TAUGHT + 1), len(ids))[:, :NUM_TAUGHT] + 1e-3).astype(np.float32)
        taught_rows.append({**row, "teacher/topk_ids": ids, "teacher/topk_logprobs": logprobs - np.float32(0.01)})
    return list(taught_rows)


def oracle_taught_loss(model: PreTrainedModel, rows: list[Row], temperatures: list[float]) -> torch.Tensor:
    """The whole objective, with the teacher's part outcome by outcome."""
    num_tokens, total = local_counts(rows).num_tokens, oracle_loss(model, rows, temperatures, "token_mean")
    for row, temperature in zip(rows, temperatures, strict=True):
        ids = torch.from_numpy(row["token_ids"].astype(np.int64))
        log_p = (model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        for t in range(1, len(ids)):
            if row["loss_mask"][t]:
                rest, teacher_rest = torch.ones(()), 1.0
                for id, log_t in zip(
                    row["teacher/topk_ids"][t].tolist(), row["teacher/topk_logprobs"][t].tolist(), strict=True
                ):
                    total = total + 0.5 / num_tokens * np.exp(log_t) * (log_t - log_p[t - 1, id])
                    rest, teacher_rest = rest - log_p[t - 1, id].exp(), teacher_rest - np.exp(log_t)
                total = total + 0.5 / num_tokens * max(teacher_rest, 1e-6) * (
                    np.log(max(teacher_rest, 1e-6)) - rest.log()
                )
    return total


@pytest.mark.thorough("test_a_teacher_writes_its_ranking_under_the_common_prefix")
@pytest.mark.parametrize("kind", ["dense", "tied", "scaled"])
def test_a_teachers_ranking_is_written_and_learnt_alike_on_every_layout_and_as_by_hugging_face(
    bench: Bench, ranks: dict[int, Ranks], kind: str
) -> None:
    rows, temperatures = make_rows(bench, kind, (SHAPE, 13))
    job = bench.job(kind, taught(rows, 13), temperatures, distillation=FORWARD_TOPK, top_k=3)
    whole, expected = bench.alone(job)
    model = bench.oracle(kind)
    loss = oracle_taught_loss(model, taught(rows, 13), temperatures)
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert whole.losses == pytest.approx([float(loss.detach())], rel=TOLERANCE)
    assert_same(
        expected, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    )
    for layout in [None, *LAYOUTS]:
        elsewhere = replace(job, token_budget=25, seed=5, parallel=layout.parallel if layout else {})
        answer, gradients = bench.spread(ranks[layout.world_size], elsewhere) if layout else bench.alone(elsewhere)
        assert_same_answer(answer, whole)
        assert_same(gradients, expected)


SHAPE: list[Shape] = [
    (9, 3, True, False),
    (24, 8, True, False),
    (20, 8, True, True),
    (2, 1, True, False),
    (17, 0, True, False),
    (5, 5, True, False),
    (13, 4, False, False),
    (1, 0, True, False),
]
"""Rows of many kinds: long, short, of one prompt, all prompt, not trained on, a single token."""


def oracle_loss(
    model: PreTrainedModel, rows: list[Row], temperatures: list[float], aggregation: Aggregation
) -> torch.Tensor:
    """The policy's whole objective, sequence by sequence, token by token, by its definition."""
    counts = local_counts(rows)
    total = torch.zeros(())
    for row, temperature in zip(rows, temperatures, strict=True):
        ids = torch.from_numpy(row["token_ids"].astype(np.int64))
        log_p = (model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        trained = [t for t in range(1, len(ids)) if row["loss_mask"][t]]
        for t in trained:
            weight = {
                "token_mean": 1 / counts.num_tokens,
                "seq_mean_token_mean": 1 / (len(trained) * counts.num_sequences),
                "seq_mean_token_sum": 1 / counts.num_sequences,
                "seq_mean_token_sum_norm": 1 / (LENGTH * counts.num_sequences),
                "token_sum": 1.0,
            }[aggregation]
            logprob, entropy = log_p[t - 1, ids[t]], -(log_p[t - 1].exp() * log_p[t - 1]).sum()
            old, advantage, reference = (float(row[name][t]) for name in ("old_logprobs", "advantages", "ref/logprobs"))
            ratio = (logprob - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            gain = gain.clamp(min=3.0 * advantage) if advantage < 0 else gain
            correction = min(np.exp(old - row["rollout_logprobs"][t]), 2.0)
            kl = (reference - logprob).exp() - (reference - logprob) - 1
            total = total + weight * (-correction * gain - 0.01 * entropy + 0.1 * kl)
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", [*MODELS, "recurrent", "sinks", "balanced", "scaled"])
def test_gradients_are_those_of_hugging_face_one_sequence_at_a_time(
    bench: Bench, kind: str, aggregation: Aggregation
) -> None:
    rows, temperatures = make_rows(bench, kind, (SHAPE, 5))
    answer, gradients = bench.alone(bench.job(kind, rows, temperatures, aggregation=aggregation, token_budget=40))
    model = bench.oracle(kind)
    loss = oracle_loss(model, rows, temperatures, aggregation)
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert answer.losses == pytest.approx([float(loss.detach())], rel=TOLERANCE)
    assert_same(
        gradients, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    )


ADAMW = OptimizerSection(
    learning_rate=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, schedule="linear", warmup_steps=1
)
"""A floor of the denominator beside which a gradient's last bits are small: with less, AdamW makes steps of full size
out of rounding.
"""
RATES = [0.5, 1.0, 6 / 7, 5 / 7]


def oracle_training(
    bench: Bench, kind: str, rows: list[Row], temperatures: list[float]
) -> tuple[list[float], list[float], PreTrainedModel]:
    """Losses, gradient norms and the model after torch's own AdamW, clipping and the schedule by hand."""
    model = AutoModelForCausalLM.from_pretrained(
        bench.models[kind], attn_implementation="eager", dtype=torch.float32
    ).eval()
    # gpt-oss stacks its experts' biases: two dimensions, and no matrix
    named = [(parameter, parameter.ndim < 2 or name.endswith("bias")) for name, parameter in model.named_parameters()]
    matrices, vectors = [p for p, is_vector in named if not is_vector], [p for p, is_vector in named if is_vector]
    groups = [{"params": matrices, "weight_decay": ADAMW.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=ADAMW.learning_rate, betas=ADAMW.betas, eps=ADAMW.eps)
    losses, norms = [], []
    for rate in RATES:
        for group in adamw.param_groups:
            group["lr"] = rate * ADAMW.learning_rate
        loss = oracle_loss(model, rows, temperatures, "token_mean")
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.max_grad_norm)))
        adamw.step()
        losses.append(float(loss.detach()))
    return losses, norms, model


LAYOUTS_OF = {kind: LAYOUTS[index :: len(MODELS)] for index, kind in enumerate(MODELS)} | {
    "recurrent": [Layout(2, {}), Layout(4, {"replicate": 2})],
    "sinks": [Layout(2, {"sequence": 2}), Layout(4, {"sequence": 4}), Layout(4, {"replicate": 2})],
    "balanced": [Layout(2, {"tensor": 2}), Layout(4, {"sequence": 2})],
}
"""Ranks of a recurrent model have whole sequences and matrices, and of one with sinks, for which transformers has no
plan, whole matrices; each of the others takes a third of the layouts.
"""


@pytest.mark.thorough("test_one_rank_trains_like_hugging_face_with_adamw")
@pytest.mark.parametrize("kind", LAYOUTS_OF)
def test_several_steps_are_those_of_hugging_face_with_adamw_on_one_rank_and_on_many(
    bench: Bench, ranks: dict[int, Ranks], kind: str, tmp_path: Path
) -> None:
    rows, temperatures = make_rows(bench, kind, (SHAPE, 7))
    saving = {
        "gradient_checkpointing": kind in ("tied", "recurrent", "sinks"),
        "activation_offload": kind in ("moe", "sinks"),
    }
    job = bench.job(
        kind, rows, temperatures, token_budget=40, optimizer=ADAMW.model_dump(), num_steps=len(RATES), options=saving
    )
    losses, norms, model = oracle_training(bench, kind, rows, temperatures)
    model.save_pretrained(tmp_path)
    before, after = load_file(bench.models[kind] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    # A state adds up what four steps differ by: there are processors on which Hugging Face's third norm is 4e-4 off its
    # own in float64, and ours 2e-4.
    tolerance = 1e-3 if kind == "recurrent" else TOLERANCE
    for layout in [None, *LAYOUTS_OF[kind]]:
        answer, weights = (
            bench.alone(job)
            if layout is None
            else bench.spread(ranks[layout.world_size], replace(job, parallel=layout.parallel))
        )
        assert answer.losses == pytest.approx(losses, rel=tolerance, abs=2e-6), layout  # terms near 1 that cancel
        assert answer.grad_norms == pytest.approx(norms, rel=tolerance), layout
        assert_same(
            {name: weights[name] - before[name] for name in weights},
            {name: after[name] - before[name] for name in after},
            10 * tolerance,
        )


@pytest.mark.thorough("test_adapters_train_like_pefts_own_model_with_adamw")
@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_adapters_train_alike_on_every_layout(bench: Bench, ranks: dict[int, Ranks], kind: str) -> None:
    rows, temperatures = make_rows(bench, kind, (SHAPE, 7))
    lora = {"rank": 4, "target_modules": ["q_proj", "v_proj", "o_proj"], "experts": kind == "moe"}
    checkpointed = {"gradient_checkpointing": True}
    job = bench.job(
        kind,
        rows,
        temperatures,
        token_budget=40,
        lora=lora,
        optimizer=ADAMW.model_dump(),
        num_steps=len(RATES),
        options=checkpointed,
    )
    expected, trained = bench.alone(job)
    layouts = [layout for layout in LAYOUTS if "tensor" not in layout.parallel]
    for layout in layouts:
        answer, weights = bench.spread(ranks[layout.world_size], replace(job, parallel=layout.parallel))
        assert answer.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=2e-6), layout
        assert answer.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE), layout
        assert_same(weights, trained, 1e-4)
