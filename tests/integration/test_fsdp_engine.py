"""FsdpEngine against plain Hugging Face with AdamW, on one rank in this process and on two ranks in processes of their
own.
"""

import json
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rolecall.errors import CheckpointMismatchError, CheckpointMissingError, ConfigError, DiskFullError
from rolecall.settings import (
    Aggregation,
    AlgorithmSection,
    ClippedLoss,
    CorrectionSection,
    KlSection,
    OptimizerSection,
)
from rolecall.telemetry import Metrics
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.huggingface import write_model
from rolecall.training.model.packed_model import Head
from rolecall.training.objective.objectives import PolicyObjective, SftObjective, ValueObjective, policy_columns
from rolecall.training.packing.pack import Row, local_counts, pack, unpack
from rolecall.training.serving.hooks import nothing
from rolecall.v1.trajectory_pb2 import Coefficients
from tests import forks
from tests.checkpoint_rig import exported, load, save
from tests.file_sizes import files_up_to
from tests.integration import fsdp_ranks
from tests.integration.fsdp_ranks import VOCAB, make_rows, train_step, weights_of
from tests.tiny_models import write_qwen3, write_qwen3_moe

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
SECTION = OptimizerSection(learning_rate=1e-3, weight_decay=0.1, schedule="linear", warmup_steps=1)
MODELS = ["dense", "tied", "moe"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_qwen3(root / "dense", vocab=288),
        "tied": write_qwen3(root / "tied", tied=True, vocab=288),
        "moe": write_qwen3_moe(root / "moe"),
    }


def make_engine(path: Path, *, optimizer: OptimizerSection | None = SECTION, **more: Any) -> FsdpEngine:
    return fsdp_ranks.make_engine(path, optimizer=optimizer, **more)


def oracle_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def oracle_outputs(model: PreTrainedModel, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs_T, entropy_T) of one row by itself, 0 outside the response mask."""
    ids = torch.from_numpy(row["token_ids"].astype(np.int64))
    log_p = (model(ids[None], use_cache=False).logits[0].float() / temperature).log_softmax(-1)[:-1]
    mask = torch.from_numpy(row["response_mask"][1:] != 0)
    logprobs, entropy = torch.zeros(len(ids)), torch.zeros(len(ids))
    logprobs[1:] = log_p.gather(1, ids[1:, None])[:, 0] * mask
    entropy[1:] = -(log_p.exp() * log_p).sum(-1) * mask
    return logprobs, entropy


def oracle_training(path: Path, rows: list[Row], num_steps: int) -> tuple[list[float], list[float], PreTrainedModel]:
    """Losses, gradient norms and the model after plain AdamW with the same schedule, whole sequences one by one."""
    model = oracle_model(path)
    matrices, vectors = [p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": SECTION.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=SECTION.learning_rate, betas=SECTION.betas, eps=SECTION.eps)
    scale = [0.5, 1.0, 6 / 7, 5 / 7, 4 / 7]
    num_tokens = sum(int(np.count_nonzero(row["loss_mask"][1:])) for row in rows)
    losses, norms = [], []
    for step in range(num_steps):
        for group in adamw.param_groups:
            group["lr"] = SECTION.learning_rate * scale[step]
        loss = -torch.stack([oracle_outputs(model, row, 0.7)[0].sum() for row in rows]).sum() / num_tokens
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), SECTION.max_grad_norm)))
        adamw.step()
        losses.append(float(loss.detach()))
    return losses, norms, model


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=0, atol=atol, msg=f"{name} differs by more than {atol}"
        )


@pytest.mark.parametrize("kind", MODELS)
def test_packed_logprobs_and_entropy_agree_with_hugging_face_one_sequence_at_a_time(
    models: dict[str, Path], kind: str
) -> None:
    rows = make_rows(9)
    packed = pack(rows, [], temperature=0.7, device=CPU)
    (outputs,) = make_engine(models[kind], optimizer=None).forward([packed], entropy=True)
    assert isinstance(outputs, TokenOutputs)
    model = oracle_model(models[kind])
    ours = zip(unpack(outputs.logprobs_N, packed.lengths), unpack(outputs.entropy_N, packed.lengths), strict=True)
    with torch.no_grad():
        for (logprobs, entropy), row in zip(ours, rows, strict=True):
            expected_logprobs, expected_entropy = oracle_outputs(model, row, 0.7)
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
            np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_come_back_under_the_checkpoints_own_names_bit_for_bit(models: dict[str, Path], kind: str) -> None:
    published = weights_of(make_engine(models[kind]))
    saved = load_file(models[kind] / "model.safetensors")
    assert_same_weights(published, saved, atol=0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_publishing_holds_no_more_than_one_parameter_and_its_pieces_beyond_the_shard(
    models: dict[str, Path], kind: str
) -> None:
    engine = make_engine(models[kind], dtype="bfloat16")
    made: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    for _, tensor in engine.named_weights():
        made.add(tensor)
        del tensor
        most = max(
            most, sum({piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in made}.values())
        )
    largest_parameter = max(
        parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(models[kind]).parameters()
    )
    assert most <= 2 * largest_parameter


@pytest.mark.parametrize("kind", MODELS)
def test_one_rank_trains_like_hugging_face_with_adamw(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    rows = make_rows(10)
    engine = make_engine(models[kind])
    outcomes = [train_step(engine, rows, token_budget=64, seed=step) for step in range(4)]
    losses, norms, model = oracle_training(models[kind], rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)
    model.save_pretrained(tmp_path)
    # AdamW divides by the root of tiny second moments: last bits of a gradient may move a weight by a few per cent of
    # the rate
    assert_same_weights(weights_of(engine), load_file(tmp_path / "model.safetensors"), atol=2e-4)


def run_ranks(world_size: int, model: Path, out: Path, **more: Any) -> list[dict[str, float]]:
    """Trains with fsdp_ranks.py in processes of their own; returns the outcomes of the steps."""
    out.mkdir()
    job = {
        "model": str(model),
        "out": str(out),
        "world_size": world_size,
        "rendezvous": str(out / "rendezvous"),
        "optimizer": SECTION.model_dump(),
        "gradient_checkpointing": False,
        "num_rows": 10,
        "num_steps": 4,
        "save_after": 2,
        "token_budget": 40,
    } | more
    forks.run_ranks(out, world_size, fsdp_ranks.main, job)
    outcomes: list[dict[str, float]] = json.loads((out / "outcomes.json").read_text())
    return outcomes


@pytest.mark.parametrize(
    "kind",
    [
        "tied",
        pytest.param(
            "moe",
            marks=pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one"),
        ),
    ],
)
def test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one(
    models: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    rows = make_rows(10)
    outcomes = run_ranks(2, models[kind], tmp_path / "two", gradient_checkpointing=kind == "tied")
    losses, norms, model = oracle_training(models[kind], rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)
    model.save_pretrained(tmp_path / "oracle")
    two = load_file(tmp_path / "two" / "weights.safetensors")
    assert_same_weights(two, load_file(tmp_path / "oracle" / "model.safetensors"), atol=2e-4)

    engine = make_engine(models[kind])
    load(engine, tmp_path / "two" / "checkpoint")
    assert_same_weights(
        weights_of(engine), load_file(exported(tmp_path / "two" / "checkpoint") / "model.safetensors"), atol=0
    )
    later = [train_step(engine, rows, token_budget=40, seed=step) for step in (2, 3)]
    np.testing.assert_allclose([o["loss"] for o in later], losses[2:], rtol=1e-5)
    assert [o["learning_rate"] for o in later] == [o["learning_rate"] for o in outcomes[2:]]
    assert_same_weights(weights_of(engine), two, atol=2e-4)


def test_a_rank_without_rows_keeps_the_others_company(models: dict[str, Path], tmp_path: Path) -> None:
    rows = make_rows(1)
    outcomes = run_ranks(2, models["dense"], tmp_path / "two", num_rows=1, num_steps=2)
    losses, norms, _ = oracle_training(models["dense"], rows, 2)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)


def test_resuming_on_one_rank_is_bit_equal(models: dict[str, Path], tmp_path: Path) -> None:
    rows = make_rows(10)
    straight = make_engine(models["tied"])
    for step in range(2):
        train_step(straight, rows, token_budget=64, seed=step)
    assert save(straight, tmp_path)
    resumed = make_engine(models["tied"])
    load(resumed, tmp_path)
    for step in (2, 3):
        assert train_step(straight, rows, token_budget=64, seed=step) == train_step(
            resumed, rows, token_budget=64, seed=step
        )
    assert_same_weights(weights_of(straight), weights_of(resumed), atol=0)
    assert resumed.num_updates == 4


def test_an_exported_directory_is_a_plain_hugging_face_model(models: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(models["tied"])
    train_step(engine, make_rows(4), token_budget=64, seed=0)
    save(engine, tmp_path / "checkpoint")
    model = exported(tmp_path / "checkpoint")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "again")
    assert_same_weights(weights_of(engine), load_file(tmp_path / "again" / "model.safetensors"), atol=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_no_file_of_a_checkpoint_is_a_pickle(models: dict[str, Path], tmp_path: Path) -> None:
    save(make_engine(models["dense"]), tmp_path)
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja", ".txt"}


def test_a_full_disk_is_named_and_leaves_the_engine_usable(models: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(models["dense"])
    with files_up_to(100_000), pytest.raises(DiskFullError, match="no space"):
        save(engine, tmp_path / "full")
    assert save(engine, tmp_path / "roomy")


def test_an_export_to_a_full_disk_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    weights = make_engine(models["dense"]).named_weights()
    with files_up_to(100_000), pytest.raises(DiskFullError, match="export"):
        write_model(tmp_path / "out", models["dense"], weights, progressed=nothing)


def test_a_half_written_checkpoint_is_missing_and_another_models_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    save(make_engine(models["dense"]), tmp_path)
    with pytest.raises(CheckpointMismatchError, match="lm_head"):
        load(make_engine(models["tied"]), tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(CheckpointMissingError):
        load(make_engine(models["dense"]), tmp_path)


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


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(models["dense"])
    rows = make_rows(4)
    train_step(engine, rows, token_budget=64, seed=0)
    before = weights_of(engine)
    poisoned = [{**row, "advantages": row["advantages"] * np.float32("nan")} for row in rows]
    algorithm = AlgorithmSection(groups_per_batch=1)
    packed = pack(poisoned, policy_columns(algorithm), temperature=1.0, device=CPU)
    engine.forward_backward([packed], PolicyObjective(algorithm, local_counts(rows), Coefficients(), 1))
    outcome = engine.step()
    assert not outcome.applied
    assert not np.isfinite(outcome.grad_norm)
    assert_same_weights(weights_of(engine), before, atol=0)
    assert (engine.num_updates, engine.num_skipped) == (1, 1)
    assert "skipped" in caplog.text
    assert train_step(engine, rows, token_budget=64, seed=1)["learning_rate"] == pytest.approx(1e-3)


def test_a_critic_regresses_to_its_returns_and_keeps_its_head_on_disk(models: dict[str, Path], tmp_path: Path) -> None:
    section = OptimizerSection(learning_rate=3e-3)
    engine = make_engine(models["tied"], head="value", optimizer=section)
    rows = [
        {
            **row,
            "returns": np.where(row["token_ids"] > 75, 1.0, -1.0).astype(np.float32),
            "values": np.zeros_like(row["values"]),
        }
        for row in make_rows(8)
    ]
    packed = pack(rows, ["loss_mask", "values", "returns"], temperature=1.0, device=CPU)
    objective = ValueObjective(None, local_counts(rows))
    losses = []
    for _ in range(30):
        losses.append(engine.forward_backward([packed], objective).values()["critic/loss"])
        engine.step()
    assert losses[-1] < 0.2 * losses[0]
    save(engine, tmp_path / "checkpoint")
    again = make_engine(exported(tmp_path / "checkpoint"), head="value", optimizer=None)
    (first,), (second,) = engine.forward([packed]), again.forward([packed])
    assert isinstance(first, ValueOutputs)
    assert isinstance(second, ValueOutputs)
    torch.testing.assert_close(first.values_N, second.values_N)
    torch.testing.assert_close(first.bootstrap_values_S, second.bootstrap_values_S)
    assert {"value_head.weight", "value_head.bias"} <= weights_of(engine).keys()
    assert "lm_head.weight" not in weights_of(engine)


def test_values_stand_one_token_before_and_the_bootstrap_after_the_last(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], head="value", optimizer=None)
    (row,) = make_rows(1, seed=3)
    full = {**row, "response_mask": np.ones_like(row["response_mask"])}
    shorter = {name: column[:-1] for name, column in full.items()}
    whole, cut = engine.forward(
        [pack([full], [], temperature=1.0, device=CPU), pack([shorter], [], temperature=1.0, device=CPU)]
    )
    assert isinstance(whole, ValueOutputs)
    assert isinstance(cut, ValueOutputs)
    assert float(whole.values_N[0]) == 0.0
    torch.testing.assert_close(whole.values_N[-1], cut.bootstrap_values_S[0])


def test_bfloat16_computes_and_publishes_halves_but_keeps_float32_masters(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = make_rows(8)
    engine = make_engine(models["dense"], dtype="bfloat16")
    losses = [train_step(engine, rows, token_budget=64, seed=step)["loss"] for step in range(4)]
    expected, _, _ = oracle_training(models["dense"], rows, 4)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.bfloat16}
    save(engine, tmp_path)
    kept = load_file(tmp_path / "rank-00000.safetensors")
    assert {tensor.dtype for name, tensor in kept.items() if not name.startswith("rng/")} == {torch.float32}


def test_gradient_checkpointing_changes_no_number(models: dict[str, Path]) -> None:
    rows = make_rows(6)
    plain, checkpointed = (make_engine(models["dense"], gradient_checkpointing=flag) for flag in (False, True))
    for step in range(2):
        assert train_step(plain, rows, token_budget=64, seed=step) == pytest.approx(
            train_step(checkpointed, rows, token_budget=64, seed=step), rel=1e-6
        )


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_every_layer_is_progress_in_both_directions(models: dict[str, Path], again: bool) -> None:
    """One microbatch may take longer than a worker may stand still."""
    heard: list[int] = []
    engine = make_engine(models["dense"], gradient_checkpointing=again, progressed=lambda: heard.append(1))
    rows = make_rows(2)
    heard.clear()
    engine.forward_backward(
        [pack(rows, [], temperature=0.7, device=CPU)], lambda _, outputs: (logprobs_of(outputs).sum(), Metrics())
    )
    num_layers = 2
    assert len(heard) == 2 * num_layers + 2, "each layer twice, the head, and the end of the backward pass"


def logprobs_of(outputs: TokenOutputs | ValueOutputs) -> torch.Tensor:
    assert isinstance(outputs, TokenOutputs)
    return outputs.logprobs_N


def test_a_frozen_engine_holds_no_gradients_and_refuses_to_step(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], optimizer=None)
    with pytest.raises(ConfigError, match="frozen"):
        engine.step()
    engine.offload()
    engine.onload()
    assert engine.num_parameters == sum(tensor.numel() for tensor in weights_of(engine).values())


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path, models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_engine(tmp_path)
    (tmp_path / "config.json").write_text((models["dense"] / "config.json").read_text())
    with pytest.raises(ConfigError, match="safetensors"):
        make_engine(tmp_path)


def test_sft_learns_its_rows(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], optimizer=OptimizerSection(learning_rate=5e-3))
    rows = make_rows(4)
    packed = pack(rows, ["loss_mask"], temperature=1.0, device=CPU)
    counts = local_counts(rows)
    losses = []
    for _ in range(25):
        losses.append(engine.forward_backward([packed], SftObjective(counts)).values()["sft/loss"])
        engine.step()
    assert losses[-1] < 0.3 * losses[0]
