"""Adapters of a value model, whose head is trained whole beside them: against peft's own model with AdamW, on ranks, in
checkpoints and exports.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForTokenClassification

from rolecall.errors import CheckpointMismatchError, ConfigError
from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.engine import ValueOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model import lora
from rolecall.training.model.box import whole
from rolecall.training.objective.objectives import ValueObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, local_counts, pack
from tests.checkpoint_rig import exported, load, save
from tests.integration.exact_ranks import Job, Rank, combine, living_ranks, write_rows
from tests.integration.fsdp_ranks import assert_same, make_rows
from tests.tiny_models import write_qwen3, write_reward_model

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
LORA = LoraSection(rank=4, alpha=12.0)
OPTIMIZER = OptimizerSection(learning_rate=1e-2, weight_decay=0.1)
COLUMNS = ["loss_mask", "values", "returns"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": write_qwen3(root / "tied", tied=True),
        "untied": write_qwen3(root / "untied"),
        "other": write_qwen3(root / "other", tied=True, seed=1),
        "scored": write_reward_model(root / "scored"),
    }


def make_engine(
    path: Path, *, dtype: str = "float32", section: LoraSection | None = LORA, kind: str = "adamw"
) -> FsdpEngine:
    optimizer = OPTIMIZER.model_copy(update={"kind": kind})
    options = EngineOptions(path=path, head="value", dtype=dtype, optimizer=optimizer, lora=section, total_steps=8)  # type: ignore[arg-type]
    return FsdpEngine(options, device=CPU)


def parameters_of(engine: FsdpEngine, *, trained: bool) -> dict[str, torch.Tensor]:
    """Copies of the parameters that are trained, or of those that are not, by name."""
    engine._shards.release()
    return {
        name: whole(parameter.detach()).clone()
        for name, parameter in engine._model.hf.named_parameters()
        if parameter.requires_grad == trained
    }


def train(engine: FsdpEngine, rows: list[Row], num_steps: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of steps towards the returns."""
    packed = pack(rows, COLUMNS, temperature=1.0, device=CPU)
    objective = ValueObjective(None, local_counts(rows))
    outcomes = []
    for _ in range(num_steps):
        loss = engine.forward_backward([packed], objective).values()["critic/loss"]
        outcomes.append((loss, engine.step().grad_norm))
    return outcomes


def values_of(engine: FsdpEngine, rows: list[Row]) -> torch.Tensor:
    (outputs,) = engine.forward([pack(rows, [], temperature=1.0, device=CPU)])
    assert isinstance(outputs, ValueOutputs)
    return outputs.values_N


def peft_model(path: Path, start: dict[str, torch.Tensor]) -> tuple[PeftModel, dict[str, nn.Parameter]]:
    """peft's own wrapper of a plain classifier of one label, trained whole in its head; what trains, by our names."""
    hf = AutoModelForTokenClassification.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, num_labels=1
    ).eval()
    config = LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        target_modules=list(LORA.target_modules),
        task_type="TOKEN_CLS",
        modules_to_save=["score"],
    )
    model = get_peft_model(hf, config)
    named = {
        name.removeprefix("base_model.model.").replace("score.modules_to_save.default.", "value_head."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert named.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start[name])
    return model, named


def test_adapters_and_head_train_like_pefts_own_model_with_adamw(models: dict[str, Path]) -> None:
    rows = make_rows(10)
    engine = make_engine(models["tied"])
    theirs, named = peft_model(models["tied"], parameters_of(engine, trained=True))
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    num_tokens = sum(int(np.count_nonzero(row["loss_mask"][1:])) for row in rows)
    expected = []
    for _ in range(4):
        total = torch.zeros(())
        for row in rows:
            values = theirs(torch.from_numpy(row["token_ids"].astype(np.int64))[None]).logits[0, :-1, 0]
            errors = (values - torch.from_numpy(row["returns"][1:])) * torch.from_numpy(row["loss_mask"][1:] != 0)
            total = total + 0.5 * errors.square().sum()
        loss = total / num_tokens
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(named.values(), OPTIMIZER.max_grad_norm)
        adamw.step()
        expected.append((float(loss.detach()), float(norm)))
    np.testing.assert_allclose(train(engine, rows, 4), expected, rtol=1e-4)
    # AdamW divides by the root of tiny second moments: last bits of a gradient may move a weight by a few per cent of
    # the rate
    assert_same(parameters_of(engine, trained=True), {name: p.detach() for name, p in named.items()}, atol=2e-4)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "head"), [("tied", "value_head"), ("scored", "score")])
def test_only_adapters_and_the_head_move_and_they_are_float32(
    models: dict[str, Path], model: str, head: str, dtype: str, kind: str
) -> None:
    engine = make_engine(models[model], dtype=dtype, kind=kind)
    before, base = (parameters_of(engine, trained=trained) for trained in (True, False))
    assert all(lora.is_adapter(name) or name.startswith(f"{head}.") for name in before)
    assert f"{head}.weight" in before
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    assert {str(tensor.dtype) for tensor in base.values()} == {f"torch.{dtype}"}
    train(engine, make_rows(6), 2)  # an adapter's first factor has no gradient before the second is something
    after = parameters_of(engine, trained=True)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert_same(parameters_of(engine, trained=False), base, atol=0)


def test_two_ranks_train_what_one_does_and_either_goes_on_from_the_other_s_checkpoint(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = make_rows(10)
    (tmp_path / "out").mkdir()
    write_rows(tmp_path / "rows.npz", rows, [1.0] * len(rows))
    job = Job(
        model=str(models["tied"]),
        rows=str(tmp_path / "rows.npz"),
        out=str(tmp_path / "out"),
        objective="value",
        token_budget=64,
        lora=LORA.as_kept(),
        optimizer=OPTIMIZER.model_dump(),
        num_steps=3,
        save=str(tmp_path / "many"),
    )
    one = combine([Rank().answer(replace(job, save=str(tmp_path / "one")))])
    going_on = replace(job, start=str(tmp_path / "one"), num_steps=1, seed=7, save=None)
    rounded = replace(job, dtype="bfloat16", save=None)
    with living_ranks(2, tmp_path / "ranks") as ranks:
        many, then = ranks.ask(job), ranks.ask(going_on)
        in_half = ranks.ask(rounded)
        joined = ranks.ask(replace(job, parallel={"sequence": 2}, options={"gradient_checkpointing": True}, save=None))
    assert many.losses == pytest.approx(one.losses, rel=1e-4)
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert then.grad_norms == pytest.approx(combine([Rank().answer(going_on)]).grad_norms, rel=1e-4)
    assert joined.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert in_half.grad_norms == pytest.approx(combine([Rank().answer(rounded)]).grad_norms, rel=2e-2)
    ours, theirs = make_engine(models["tied"]), make_engine(models["tied"])
    load(ours, tmp_path / "many")
    load(theirs, tmp_path / "one")
    assert ours.num_updates == 3
    assert_same(parameters_of(ours, trained=True), parameters_of(theirs, trained=True), atol=2e-4)


def test_a_checkpoint_holds_adapters_and_head_alone_and_goes_on_bit_for_bit(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = make_rows(6)
    engine = make_engine(models["tied"])
    train(engine, rows, 2)
    save(engine, tmp_path / "saved")
    resumed = make_engine(models["tied"])
    load(resumed, tmp_path / "saved")
    assert train(engine, rows, 2) == train(resumed, rows, 2)
    assert_same(parameters_of(resumed, trained=True), parameters_of(engine, trained=True), atol=0)
    changed = LORA.model_copy(update={"alpha": 6.0})
    for path, section in ((models["other"], LORA), (models["tied"], changed), (models["tied"], None)):
        other = make_engine(path, section=section)
        with pytest.raises(CheckpointMismatchError, match="use the same configuration"):
            load(other, tmp_path / "saved")


@pytest.mark.parametrize(("model", "head"), [("untied", "value_head"), ("scored", "score")])
def test_an_export_is_a_value_model_that_says_the_same_without_adapters(
    models: dict[str, Path], tmp_path: Path, model: str, head: str
) -> None:
    rows = make_rows(6)
    engine = make_engine(models[model])
    train(engine, rows, 3)
    save(engine, tmp_path / "saved")
    path = exported(tmp_path / "saved")
    assert not (path / "adapter").exists()
    merged = make_engine(path, section=None)
    weights = dict(merged.named_weights())
    assert weights.keys() == dict(make_engine(models[model], section=None).named_weights()).keys()
    torch.testing.assert_close(values_of(merged, rows), values_of(engine, rows), atol=2e-5, rtol=0)
    head_of = {name: tensor for name, tensor in parameters_of(engine, trained=True).items() if name.startswith(head)}
    assert_same({name: weights[name] for name in head_of}, head_of, atol=0)


def test_training_begins_with_an_adapter_that_an_actor_left(models: dict[str, Path], tmp_path: Path) -> None:
    """Where the policy begins: an adapter without a head, which is made new."""
    options = EngineOptions(path=models["tied"], head="policy", dtype="float32", optimizer=OPTIMIZER, lora=LORA)
    actor = FsdpEngine(options, device=CPU)
    with torch.no_grad():
        for _, parameter in actor._model.hf.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    save(actor, tmp_path / "saved")
    start = exported(tmp_path / "saved") / "adapter"
    begun, new = (
        parameters_of(make_engine(models["tied"], section=LORA.model_copy(update={"start": each})), trained=True)
        for each in (start, None)
    )
    adapters = parameters_of(actor, trained=True)
    assert_same({name: begun[name] for name in adapters}, adapters, atol=0)
    heads = begun.keys() - adapters.keys()
    assert_same({name: begun[name] for name in heads}, {name: new[name] for name in heads}, atol=0)
    with pytest.raises(ConfigError, match=r"critic\.lora\.start .* has rank 4, critic\.lora\.rank is 8"):
        make_engine(models["tied"], section=LORA.model_copy(update={"rank": 8, "start": start}))


def test_a_target_that_the_model_does_not_have_is_named_by_the_critics_section(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^critic\.lora\.target_modules: no \['value_head'\] .* 'q_proj'"):
        make_engine(models["tied"], section=LoraSection(target_modules=("value_head", "v_proj")))
