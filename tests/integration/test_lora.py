"""Adapters trained by the engine, against peft's own model on plain Hugging Face with AdamW; what is published, merged
and written.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rolecall.checkpoint.storage import open_storage
from rolecall.data.model.adapters import ADAPTER, num_adapter_parameters, with_modules
from rolecall.errors import CheckpointMismatchError, ConfigError
from rolecall.settings import ALL_LINEAR, Dtype, LoraSection, OptimizerSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.export.export import export
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model import lora
from rolecall.training.model.box import local_part
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, pack, unpack
from tests import checkpoint_rig
from tests.integration.fsdp_oracle import oracle_outputs
from tests.integration.fsdp_ranks import assert_same, make_rows, train_step, weights_of
from tests.tiny_models import write_deepseek_v2, write_gpt_oss, write_qwen3, write_qwen3_moe

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
LORA = LoraSection(rank=4, alpha=12.0)
OPTIMIZER = OptimizerSection(learning_rate=1e-2, weight_decay=0.1)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = LoraSection(rank=4, alpha=12.0, target_modules=ATTENTION, experts=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": write_qwen3(root / "tied", tied=True),
        "moe": write_qwen3_moe(root / "moe"),
        "latent": write_deepseek_v2(root / "latent"),
        "gpt_oss": write_gpt_oss(root / "gpt_oss"),
    }


def make_engine(
    path: Path, *, dtype: Dtype = "float32", section: LoraSection = LORA, merges: bool = False
) -> FsdpEngine:
    options = EngineOptions(
        path=path, head="policy", dtype=dtype, optimizer=OPTIMIZER, lora=section, merges_adapters=merges, total_steps=8
    )
    return FsdpEngine(options, device=CPU)


def peft_model(path: Path, section: LoraSection, start: dict[str, torch.Tensor]) -> PeftModel:
    """peft's own wrapper of the plain model, its adapters set to `start`."""
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=list(section.target_modules),
        target_parameters=["experts.gate_up_proj", "experts.down_proj"] if section.experts else None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(hf, config)
    named = {
        name.replace(".default.weight", ".weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert named.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start[name])
    return model


def train_peft(model: PeftModel, rows: list[Row], num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the adapters after AdamW."""
    parameters = {
        name.replace(".default.weight", ".weight"): p for name, p in model.named_parameters() if p.requires_grad
    }
    adamw = torch.optim.AdamW(
        parameters.values(),
        lr=OPTIMIZER.learning_rate,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    num_tokens = sum(int(np.count_nonzero(row["loss_mask"][1:])) for row in rows)
    losses = []
    for _ in range(num_steps):
        loss = -torch.stack([oracle_outputs(model, row, 0.7)[0].sum() for row in rows]).sum() / num_tokens
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.max_grad_norm)
        adamw.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in parameters.items()}


def test_training_begins_with_an_adapter_that_peft_wrote(models: dict[str, Path], tmp_path: Path) -> None:
    rows = make_rows(10)
    drawn = {name: torch.randn_like(value) * 0.1 for name, value in weights_of(make_engine(models["tied"])).items()}
    theirs = peft_model(models["tied"], LORA, drawn)
    theirs.save_pretrained(tmp_path)
    start = LORA.model_copy(update={"start": tmp_path})
    engine = make_engine(models["tied"], section=start)
    assert_same(weights_of(engine), drawn, atol=0.0)
    frozen = FsdpEngine(EngineOptions(path=models["tied"], head="policy", dtype="float32", optimizer=None), device=CPU)
    assert np.array_equal(logprobs_of(engine, rows, base=True), logprobs_of(frozen, rows))
    losses, expected = train_peft(theirs, rows, 4)
    outcomes = [train_step(engine, rows, token_budget=64, seed=step) for step in range(4)]
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    assert_same(weights_of(engine), expected, atol=2e-4)


def test_an_adapter_of_other_layers_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    theirs = peft_model(models["tied"], LORA, weights_of(make_engine(models["tied"])))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / ADAPTER)
    save_file({name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}, tmp_path / ADAPTER)
    with pytest.raises(ConfigError, match=r"actor\.lora\.start .*layers\.1\..* is missing"):
        make_engine(models["tied"], section=LORA.model_copy(update={"start": tmp_path}))


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("tied", LORA),
        ("moe", LORA.model_copy(update={"target_modules": ATTENTION})),
        ("moe", EXPERTS),
        ("gpt_oss", EXPERTS),
    ],
)
def test_adapters_train_like_pefts_own_model_with_adamw(
    models: dict[str, Path], kind: str, section: LoraSection
) -> None:
    rows = make_rows(10)
    engine = make_engine(models[kind], section=section)
    losses, expected = train_peft(peft_model(models[kind], section, weights_of(engine)), rows, 4)
    outcomes = [train_step(engine, rows, token_budget=64, seed=step) for step in range(4)]
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    # AdamW divides by the root of tiny second moments: last bits of a gradient may move a weight by a few per cent of
    # the rate
    assert_same(weights_of(engine), expected, atol=2e-4)


def logprobs_of(engine: FsdpEngine, rows: list[Row], *, base: bool = False) -> np.ndarray:
    packed = pack(rows, [], temperature=0.7, device=CPU)
    (outputs,) = engine.forward([packed], base=base)
    assert isinstance(outputs, TokenOutputs)
    return np.concatenate(unpack(outputs.logprobs_N, packed.lengths))


@pytest.mark.parametrize(("kind", "section"), [("tied", LORA), ("moe", EXPERTS)])
def test_the_base_is_the_untouched_model_to_the_bit_before_and_after_training(
    models: dict[str, Path], kind: str, section: LoraSection
) -> None:
    rows = make_rows(6)
    engine = make_engine(models[kind], section=section)
    frozen = FsdpEngine(EngineOptions(path=models[kind], head="policy", dtype="float32", optimizer=None), device=CPU)
    expected = logprobs_of(frozen, rows)
    assert np.array_equal(logprobs_of(engine, rows), expected)  # B starts at zero
    train_step(engine, rows, token_budget=64, seed=0)
    assert np.array_equal(logprobs_of(engine, rows, base=True), expected)
    assert np.abs(logprobs_of(engine, rows) - expected).max() > 1e-2


@pytest.mark.parametrize(("kind", "section"), [("tied", LORA), ("moe", EXPERTS)])
def test_a_base_in_bfloat16_has_adapters_whose_master_weights_are_float32(
    models: dict[str, Path], kind: str, section: LoraSection
) -> None:
    rows = make_rows(6)
    engine = make_engine(models[kind], dtype="bfloat16", section=section)
    before = logprobs_of(engine, rows)
    train_step(engine, rows, token_budget=64, seed=0)
    parameters = dict(engine._model.hf.named_parameters())
    assert {p.dtype for name, p in parameters.items() if lora.is_adapter(name)} == {torch.float32}
    assert {p.dtype for name, p in parameters.items() if not lora.is_adapter(name)} == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.bfloat16}
    assert np.abs(logprobs_of(engine, rows) - before).max() > 1e-2


def test_a_target_that_the_model_does_not_have_is_named_with_those_it_has(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"target_modules: no \['query'\] .* 'q_proj'"):
        make_engine(models["tied"], section=LoraSection(target_modules=("query", "v_proj")))
    with pytest.raises(ConfigError, match=r"no \['down_proj', 'gate_proj', 'up_proj'\] .* 'v_proj'"):
        make_engine(models["moe"])


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("tied", LoraSection().target_modules),
        ("moe", ATTENTION),
        # of its MLPs those that are no expert's
        ("latent", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", *LoraSection().target_modules[3:])),
    ],
)
def test_all_linear_is_at_every_matrix_that_trains_and_at_no_router(
    models: dict[str, Path], kind: str, modules: tuple[str, ...]
) -> None:
    section = with_modules(LORA.model_copy(update={"target_modules": ALL_LINEAR}), models[kind])
    engine = make_engine(models[kind], section=section)
    adapted = {name.partition(".lora_")[0] for name in weights_of(engine)}
    assert {name.rpartition(".")[2] for name in adapted} == set(modules)
    assert not any(".experts" in name for name in adapted)


@pytest.mark.parametrize("kind", ["moe", "latent", "gpt_oss"])
def test_adapters_of_experts_are_as_many_as_files_tell(models: dict[str, Path], kind: str) -> None:
    section = EXPERTS.model_copy(update={"target_modules": ("o_proj",)})
    trained = [p for p in make_engine(models[kind], section=section)._model.parameters() if p.requires_grad]
    assert num_adapter_parameters(models[kind], section) == sum(parameter.numel() for parameter in trained)


def test_experts_of_a_dense_model_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^actor\.lora\.experts: Qwen3ForCausalLM has no stacked experts"):
        make_engine(models["tied"], section=EXPERTS)
    with pytest.raises(ConfigError, match=r"^actor\.lora\.experts: the model .* has no experts; leave it out"):
        num_adapter_parameters(models["tied"], EXPERTS)


def test_an_adapter_without_experts_begins_none_with_them(models: dict[str, Path], tmp_path: Path) -> None:
    section = EXPERTS.model_copy(update={"experts": False})
    checkpoint_rig.save(make_engine(models["moe"], section=section), tmp_path / "saved")
    start = checkpoint_rig.exported(tmp_path / "saved") / "adapter"
    with pytest.raises(ConfigError, match=r"has experts False, actor\.lora\.experts is True; write the adapter's"):
        make_engine(models["moe"], section=EXPERTS.model_copy(update={"start": start}))


def test_muon_takes_the_adapters_of_matrices_and_adamw_those_of_experts(models: dict[str, Path]) -> None:
    muon = OptimizerSection(kind="muon", learning_rate=1e-2)
    options = EngineOptions(path=models["moe"], head="policy", dtype="float32", optimizer=muon, lora=EXPERTS)
    engine = FsdpEngine(options, device=CPU)
    optimizer = engine._optimizer
    assert optimizer is not None
    names = [
        {optimizer._names[parameter] for group in part.param_groups for parameter in group["params"]}
        for part in optimizer._parts
    ]
    assert all(".self_attn." in name for name in names[0])
    assert all(".experts." in name for name in names[1])
    assert names[0]
    assert names[1]


def test_an_adapter_that_would_not_be_found_by_its_matrix_s_name_is_refused(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path)
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("1.mlp.up_proj", "1.feed.up_proj"): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"target_modules: .*'model\.layers\.1\.mlp\.up_proj\.weight'.*\(1 of 14"):
        make_engine(path)


@pytest.mark.parametrize(("kind", "section"), [("tied", LORA), ("moe", EXPERTS), ("gpt_oss", EXPERTS)])
def test_a_checkpoint_holds_adapters_alone_goes_on_bit_for_bit_and_exports_merged_and_apart(
    models: dict[str, Path], kind: str, section: LoraSection, tmp_path: Path
) -> None:
    rows = make_rows(6)
    engine = make_engine(models[kind], section=section)
    for step in range(2):
        train_step(engine, rows, token_budget=64, seed=step)
    checkpoint_rig.save(engine, tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "rank-00000.safetensors", framework="pt") as file:
        keys: list[str] = file.keys()
    assert {lora.peft_name(key.partition("/")[2]) for key in keys if not key.startswith("rng/")} == {
        name for name, _ in engine.named_weights()
    }
    resumed = make_engine(models[kind], section=section)
    checkpoint_rig.load(resumed, tmp_path / "saved")
    model = checkpoint_rig.exported(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()
    hf = AutoModelForCausalLM.from_pretrained(models[kind], attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for theirs in (plain, PeftModel.from_pretrained(hf, model / "adapter")):
            expected = np.concatenate([oracle_outputs(theirs, row, 0.7)[0].numpy() for row in rows])
            np.testing.assert_allclose(logprobs_of(resumed, rows), expected, atol=2e-5)
    for step in (2, 3):
        assert train_step(engine, rows, token_budget=64, seed=step) == train_step(
            resumed, rows, token_budget=64, seed=step
        )
    assert_same(weights_of(resumed), weights_of(engine), atol=0)
    begun = make_engine(models[kind], section=section.model_copy(update={"start": model / "adapter"}))
    checkpoint_rig.load(resumed, tmp_path / "saved")
    assert_same(weights_of(begun), weights_of(resumed), atol=0)
    checkpoint_rig.load(begun, tmp_path / "saved")  # of adapters that began otherwise


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "experts"), [("tied", False), ("moe", False), ("moe", True), ("latent", True), ("gpt_oss", True)]
)
def test_what_is_published_merged_is_bit_for_bit_what_an_export_of_the_same_step_holds(
    models: dict[str, Path], kind: str, experts: bool, dtype: Dtype, tmp_path: Path
) -> None:
    modules = ("q_a_proj", "o_proj") if kind == "latent" else ATTENTION
    section = LORA.model_copy(update={"target_modules": modules, "experts": experts})
    engine = make_engine(models[kind], dtype=dtype, section=section, merges=True)
    base = load_file(models[kind] / "model.safetensors")
    named = [name for name, _ in engine.named_weights()]
    train_step(engine, make_rows(6), token_budget=64, seed=0)
    checkpoint_rig.save(engine, tmp_path / "saved")
    expected = load_file(checkpoint_rig.exported(tmp_path / "saved") / "model.safetensors")
    published = weights_of(engine)
    assert list(published) == named
    assert_same(published, expected, atol=0)
    changed = {name for name in base if not torch.equal(published[name], base[name].to(published[name].dtype))}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in changed} == set(modules) | (
        set() if not experts else {"gate_up_proj", "down_proj"} if kind == "gpt_oss" else set(LORA.target_modules[4:])
    )


@pytest.mark.parametrize("experts", [False, True])
def test_peft_loads_adapters_of_a_mixture_s_own_mlps(models: dict[str, Path], experts: bool, tmp_path: Path) -> None:
    rows = make_rows(6)
    section = with_modules(LORA.model_copy(update={"target_modules": ALL_LINEAR, "experts": experts}), models["latent"])
    engine = make_engine(models["latent"], section=section)
    train_step(engine, rows, token_budget=64, seed=0)
    checkpoint_rig.save(engine, tmp_path / "saved")
    adapter = checkpoint_rig.exported(tmp_path / "saved") / "adapter"
    hf = AutoModelForCausalLM.from_pretrained(models["latent"], attn_implementation="eager", dtype=torch.float32).eval()
    theirs = PeftModel.from_pretrained(hf, adapter)
    with torch.no_grad():
        expected = np.concatenate([oracle_outputs(theirs, row, 0.7)[0].numpy() for row in rows])
    np.testing.assert_allclose(logprobs_of(engine, rows), expected, atol=2e-5)
    begun = make_engine(models["latent"], section=section.model_copy(update={"start": adapter}))
    assert_same(weights_of(begun), weights_of(engine), atol=0)


@pytest.mark.parametrize("kind", ["moe", "gpt_oss"])
def test_what_is_published_of_experts_is_in_bfloat16_what_a_pass_computes_with(
    models: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    rows = make_rows(6)
    engine = make_engine(models[kind], dtype="bfloat16", section=EXPERTS, merges=True)
    for step in range(3):
        train_step(engine, rows, token_budget=64, seed=step)
    with torch.no_grad():  # the other modules add products of their own, which rounds otherwise
        for name, parameter in engine._model.hf.named_parameters():
            if name.endswith(".lora_B.default.weight") and not lora.is_of_experts(name):
                local_part(parameter).zero_()
    shutil.copytree(models[kind], tmp_path / "published")
    save_file(weights_of(engine), tmp_path / "published" / "model.safetensors", {"format": "pt"})
    frozen = EngineOptions(path=tmp_path / "published", head="policy", dtype="bfloat16", optimizer=None)
    assert np.array_equal(logprobs_of(engine, rows), logprobs_of(FsdpEngine(frozen, device=CPU), rows))


def test_adapters_of_experts_beside_a_base_with_other_experts_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint_rig.save(make_engine(models["moe"], section=EXPERTS), tmp_path / "saved")
    shutil.copytree(models["moe"], tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    changed = {name: tensor + 1 if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match="use the same configuration"):
        checkpoint_rig.load(make_engine(tmp_path / "other", section=EXPERTS), tmp_path / "saved")


def test_adapters_beside_another_base_or_of_another_scale_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint_rig.save(make_engine(models["tied"]), tmp_path / "saved")
    other = write_qwen3(tmp_path / "other", tied=True, seed=1)
    for engine in (make_engine(other), make_engine(models["tied"], section=LORA.model_copy(update={"alpha": 6.0}))):
        with pytest.raises(CheckpointMismatchError, match="use the same configuration"):
            checkpoint_rig.load(engine, tmp_path / "saved")
    storage = open_storage(str(tmp_path / "saved"))
    with pytest.raises(CheckpointMismatchError, match="were trained beside"):
        export(storage, [], tmp_path / "model", base=other)
