"""Models of text and images in the FSDP engine, against plain transformers that computes one sequence at a time."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText

from rolecall.settings import ParallelSection
from rolecall.training.engine import TokenOutputs, ValueOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.attention.packed import plan_attention
from rolecall.training.model.packed_model import build_model
from rolecall.training.objective.objectives import SftObjective, ValueObjective
from rolecall.training.packing.pack import Row, local_counts, unpack
from tests import forks
from tests.checkpoint_rig import exported, load, save
from tests.integration.fsdp_oracle import assert_same_weights
from tests.integration.fsdp_ranks import make_engine, weights_of
from tests.integration.vision_ranks import SECTION, train_on_rank
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import (
    OTHER_WIDE,
    SHOWS,
    WIDE,
    adapters,
    make_episodes,
    make_row,
    make_rows,
    oracle_gradients,
    oracle_logprobs,
    oracle_model,
    packed,
    rounding,
)

pytestmark = pytest.mark.usefixtures("one_rank")

FAMILIES: tuple[VisionFamily, ...] = get_args(VisionFamily)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_vision(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize(("rows", "num_images"), [(make_rows(), 4), (make_episodes(), 4)], ids=["prompts", "episodes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_agree_with_transformers_one_sequence_at_a_time(
    paths: dict[str, Path], family: str, rows: list[Row], num_images: int
) -> None:
    path = paths[family]
    engine = make_engine(path, optimizer=SECTION)
    microbatch = packed(path, rows, ("loss_mask",))
    assert microbatch.prefixes is not None
    assert microbatch.shown is not None
    assert len(microbatch.shown.grids_I3) == num_images  # each image once, however many rows show it
    (outputs,) = engine.forward([microbatch])
    assert isinstance(outputs, TokenOutputs)
    model = oracle_model(path)
    with torch.no_grad():
        for ours, row in zip(unpack(outputs.logprobs_N, microbatch.lengths), rows, strict=True):
            np.testing.assert_allclose(ours, oracle_logprobs(model, path, row), atol=1e-5)
    engine.forward_backward([microbatch], SftObjective(local_counts(rows)))
    expected = oracle_gradients(path, rows)
    found = {name: parameter.grad for name, parameter in engine._model.hf.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient is not None
        bound = rounding(name) * np.abs(expected[name]).max() + 1e-8
        np.testing.assert_allclose(gradient, expected[name], atol=bound)
    assert engine.flops_done > engine.flops.forward.total(microbatch.lengths, microbatch.num_scored)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_logprobs_are_as_near_to_float32_as_those_of_transformers(
    paths: dict[str, Path], family: str
) -> None:
    rows, path = make_rows(), paths[family]
    (outputs,) = make_engine(path, dtype="bfloat16").forward([packed(path, rows)])
    assert isinstance(outputs, TokenOutputs)
    with torch.no_grad():
        exact, rounded = (
            torch.cat([oracle_logprobs(oracle_model(path, dtype), path, row) for row in rows])
            for dtype in (torch.float32, torch.bfloat16)
        )
    ours, theirs = ((logprobs_N - exact).abs() for logprobs_N in (outputs.logprobs_N, rounded))
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_however_microbatches_are_cut_and_activations_are_kept(
    paths: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.training.model.activation_offload.LEAST_BYTES", 1)  # so that these small ones move
    rows, path = make_rows(), paths[family]

    def gradients(plan: list[list[int]], **options: Any) -> dict[str, torch.Tensor | None]:
        engine = make_engine(path, optimizer=SECTION, **options)
        microbatches = [packed(path, [rows[index] for index in indices], ("loss_mask",)) for indices in plan]
        engine.forward_backward(microbatches, SftObjective(local_counts(rows)))
        return {name: parameter.grad for name, parameter in engine._model.hf.named_parameters()}

    expected = gradients([list(range(7))])
    found = gradients([[0, 1], [4], [], [2, 3], [5, 6]], gradient_checkpointing=True, activation_offload=True)
    for name, gradient in found.items():
        wanted = expected[name]
        assert gradient is not None
        assert wanted is not None
        bound = rounding(name) * float(wanted.abs().max()) + 1e-8
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=bound)


def test_in_a_run_of_text_the_last_layer_and_the_head_keep_their_activations(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.training.model.activation_offload.LEAST_BYTES", 1)
    rows, path = [make_row([], [61, 62, 63])], paths["qwen3_vl"]
    engine = make_engine(
        path, optimizer=SECTION, gradient_checkpointing=True, activation_offload=True, shows_images=False
    )
    microbatch = packed(path, rows, ("loss_mask",))
    engine.forward_backward([microbatch], SftObjective(local_counts(rows)))
    config = engine.config.get_text_config()
    input_bytes = len(microbatch.token_ids_N) * config.hidden_size * 4
    assert engine._activations is not None
    assert input_bytes <= engine._activations.num_bytes < config.num_hidden_layers * input_bytes


def test_two_images_of_one_size_under_the_same_tokens_are_computed_apart(paths: dict[str, Path]) -> None:
    rows = [make_row([WIDE], [80, 81]), make_row([OTHER_WIDE], [80, 81])]
    apart = packed(paths["qwen3_vl"], rows)
    alike = packed(paths["qwen3_vl"], [rows[0], rows[0]])
    assert np.array_equal(rows[0]["token_ids"], rows[1]["token_ids"])
    assert alike.prefixes is not None
    assert alike.prefixes.num_saved == len(rows[0]["token_ids"])
    assert apart.prefixes is not None
    assert apart.prefixes.num_saved == list(rows[0]["token_ids"]).index(SHOWS)


def test_episodes_share_what_they_have_alike_up_to_the_first_image_that_differs(paths: dict[str, Path]) -> None:
    first, alike, other, *_ = rows = make_episodes()
    assert np.array_equal(first["token_ids"], other["token_ids"])
    ids = first["token_ids"].tolist()
    whole, second_image = (
        len(ids) - 2,
        ids.index(SHOWS, ids.index(81)),
    )  # all but the last turn's tokens; WIDE's are before
    saved = {}
    for name, pair in {"alike": (first, alike), "other": (first, other), "segment": (first, rows[-1])}.items():
        prefixes = packed(paths["qwen3_vl"], list(pair)).prefixes
        assert prefixes is not None
        saved[name] = prefixes.num_saved
    assert saved == {"alike": whole, "other": second_image, "segment": len(rows[-1]["token_ids"])}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placeholder_that_was_sampled_is_a_token_like_any_other(paths: dict[str, Path], family: str) -> None:
    path = paths[family]
    row = make_row([WIDE], [80, SHOWS, SHOWS, 81, 82])
    model = oracle_model(path)
    other = 200
    with torch.no_grad():  # transformers would look for an image, so another id gets its embedding
        embeddings = model.get_input_embeddings().weight
        embeddings[other] = embeddings[SHOWS]
        sampled = (row["token_ids"] == SHOWS) & (row["response_mask"] != 0)
        expected = oracle_logprobs(model, path, {**row, "token_ids": np.where(sampled, other, row["token_ids"])})
    (outputs,) = make_engine(path).forward([packed(path, [row])])
    assert isinstance(outputs, TokenOutputs)
    np.testing.assert_allclose(outputs.logprobs_N[~sampled], expected[~sampled], atol=1e-5)
    assert float(outputs.logprobs_N[-1]) != 0


@pytest.mark.parametrize(
    ("family", "options", "rtol", "atol"),
    [
        (
            "qwen2_5_vl",
            {
                "gradient_checkpointing": True,
                "activation_offload": True,
                "parallel": ParallelSection(keep_gathered=True),
            },
            1e-5,
            2e-5,
        ),
        # one weight of 65,536 is 2.8e-5 apart on an AMD EPYC: a small gradient's rounding, which Adam makes large
        ("qwen3_vl", {"gradient_checkpointing": True}, 1e-5, 1e-4),
        ("qwen3_vl", {"freeze_vision_tower": True, "activation_offload": True}, 1e-5, 2e-5),
        ("qwen3_vl", {"freeze_vision_tower": True, "dtype": "bfloat16"}, 1e-2, 2e-2),
        ("qwen3_5_moe", {"gradient_checkpointing": True}, 1e-5, 1e-4),
        ("qwen3_vl_moe", {"freeze_vision_tower": True}, 1e-5, 1e-4),
    ],
    ids=["windows", "checkpointing", "frozen", "frozen beside float32 masters", "recurrent", "turned experts"],
)
def test_two_ranks_train_like_one_also_where_a_rank_has_no_image_and_where_it_has_nothing(
    paths: dict[str, Path], tmp_path: Path, family: str, options: dict[str, Any], rtol: float, atol: float
) -> None:
    """Row 4 shows no image."""
    plans: list[list[list[list[int]]]] = [
        [[[0, 1, 2, 3, 4, 5, 6]]],
        [[[0, 1, 2], [3, 6, 5]], [[4], []]],
    ]
    found = []
    for plan in plans:
        out = tmp_path / str(len(plan))
        out.mkdir()
        job = {
            "model": str(paths[family]),
            "world_size": len(plan),
            "plan": plan,
            "out": str(out),
            "rendezvous": str(out / "rendezvous"),
            "options": options,
        }
        forks.run_ranks(out, len(plan), train_on_rank, job)
        found.append(load_file(out / "weights.safetensors"))
    one, two = found
    torch.testing.assert_close(two.pop("norms"), one.pop("norms"), rtol=rtol, atol=0)
    assert_same_weights(two, one, atol=atol)
    before = load_file(paths[family] / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name].to(one[name].dtype), one[name])}
    tower = {name for name in before if "visual" in name}
    assert moved == (before.keys() - tower if options.get("freeze_vision_tower") else before.keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_in_half_precision_keeps_its_frequencies_in_float32(paths: dict[str, Path], family: str) -> None:
    engine = make_engine(paths[family], optimizer=SECTION, dtype="bfloat16", freeze_vision_tower=True)
    trained = make_engine(paths[family], optimizer=SECTION, dtype="bfloat16")
    tower, other = (each._model.vision for each in (engine, trained))
    assert tower is not None
    assert other is not None
    assert {parameter.dtype for parameter in tower.module.parameters()} == {torch.bfloat16}
    expected = dict(other.module.named_buffers())
    assert any(buffer.is_floating_point() for buffer in expected.values())
    for name, buffer in tower.module.named_buffers():
        assert buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_not_called_in_a_run_of_text(paths: dict[str, Path], family: str) -> None:
    path, rows = paths[family], [make_row([], [61, 62, 63]), make_row([], [SHOWS, 64])]
    engine = make_engine(path, optimizer=SECTION, freeze_vision_tower=True, shows_images=False)
    usual = make_engine(path, optimizer=SECTION, freeze_vision_tower=True)
    calls = []
    for each in (engine, usual):
        tower = each._model.vision
        assert tower is not None
        tower.module.register_forward_pre_hook(lambda *_, called=each: calls.append(called))
        each.forward_backward([packed(path, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
    assert set(calls) == {usual}
    outcomes = [each.step() for each in (engine, usual)]
    assert outcomes[0].grad_norm == outcomes[1].grad_norm
    assert_same_weights(weights_of(engine), weights_of(usual), atol=0)


class Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts indices that are masks, for whose number of elements a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            self.num += any(index is not None and index.dtype == torch.bool for index in args[1])
        self.num += func.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten.masked_select)
        return func(*args, **(kwargs or {}))


def test_no_layer_waits_for_a_device_to_count_the_tokens_that_show_images(paths: dict[str, Path]) -> None:
    path = paths["qwen3_vl"]
    tower = build_model(path, "policy", torch.float32).to_empty(device="cpu").vision
    assert tower is not None
    microbatch = packed(path, make_rows())
    plan = plan_attention(microbatch.lengths, microbatch.cu_seqlens, torch.float32)
    with torch.no_grad():
        inputs = tower.inputs(microbatch.token_ids_N, microbatch.position_ids_N, microbatch.shown)
        with Masks() as masks:
            tower.backbone(**inputs, use_cache=False, packed=plan)
    assert masks.num == 0


def test_attention_over_patches_refuses_bounds_that_it_was_not_given(paths: dict[str, Path]) -> None:
    tower = make_engine(paths["qwen2_5_vl"])._model.vision
    assert tower is not None
    microbatch = packed(paths["qwen2_5_vl"], [make_row([WIDE], [80])])
    tower.module.register_forward_pre_hook(copy_bounds, with_kwargs=True)
    with torch.no_grad(), pytest.raises(ValueError, match="not enough values to unpack"):
        tower.inputs(microbatch.token_ids_N, microbatch.position_ids_N, microbatch.shown)


def copy_bounds(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Has a tower hand on others, though equal ones."""
    return args, {**given, "cu_window_seqlens": given["cu_window_seqlens"].clone()}


def train(engine: FsdpEngine, path: Path, *, num_steps: int) -> list[float]:
    """Norms of the gradients of steps on all rows."""
    rows, norms = make_rows(), []
    for _ in range(num_steps):
        engine.forward_backward([packed(path, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
        norms.append(engine.step().grad_norm)
    return norms


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_published_under_the_directorys_own_names_and_tied_ones_once(tmp_path: Path, family: str) -> None:
    path = write_vision(tmp_path, family, tied=True)  # type: ignore[arg-type]
    assert_same_weights(weights_of(make_engine(path, optimizer=SECTION)), load_file(path / "model.safetensors"), atol=0)


def write_as_on_the_hub(path: Path, folder: Path) -> Path:
    """A copy in `folder` of the Qwen2-VL or 2.5-VL in `path`, under the names and with the flat config of published
    ones, or of the GLM-4.1V, of which published ones say rotary positions otherwise.
    """
    shutil.copytree(path, folder)
    if (tree := json.loads((path / "config.json").read_text()))["model_type"] == "glm4v":
        rope = tree["text_config"].pop("rope_parameters")
        tree["text_config"]["rope_scaling"] = {"rope_type": "default", "mrope_section": rope["mrope_section"]}
        tree["text_config"] |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")}
        (folder / "config.json").write_text(json.dumps(tree))
        return folder
    weights = load_file(path / "model.safetensors")
    named = {
        name.replace("model.visual.", "visual.").replace("language_model.", ""): each for name, each in weights.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    vision["in_chans"] = vision.pop("in_channels")
    flat = {
        **text,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (folder / "config.json").write_text(json.dumps(flat))
    return folder


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
def test_a_directory_as_on_the_hub_is_trained_and_exported_under_its_own_names(
    paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    path, rows = paths[family], make_rows()
    hub = write_as_on_the_hub(path, tmp_path / "hub")
    engine, usual = make_engine(hub, optimizer=SECTION), make_engine(path, optimizer=SECTION)
    assert train(engine, hub, num_steps=1) == train(usual, path, num_steps=1)
    names = load_file(hub / "model.safetensors").keys()
    assert ("visual.patch_embed.proj.weight" in names) == (family != "glm4v")
    assert weights_of(engine).keys() == names
    save(engine, tmp_path / "checkpoint")
    whole = exported(tmp_path / "checkpoint")
    assert load_file(whole / "model.safetensors").keys() == names
    (outputs,) = engine.forward([packed(hub, [rows[3]])])
    assert isinstance(outputs, TokenOutputs)
    with torch.no_grad():
        expected = oracle_logprobs(oracle_model(whole), whole, rows[3])
    np.testing.assert_allclose(outputs.logprobs_N, expected, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_goes_on_and_is_exported_with_its_tower(
    paths: dict[str, Path], tmp_path: Path, frozen: bool
) -> None:
    path = paths["qwen2_5_vl"]
    engine = make_engine(path, optimizer=SECTION, freeze_vision_tower=frozen)
    train(engine, path, num_steps=2)
    save(engine, tmp_path / "checkpoint")
    weights = weights_of(engine)
    model = AutoModelForImageTextToText.from_pretrained(exported(tmp_path / "checkpoint"), dtype=torch.float32)
    other = make_engine(path, optimizer=SECTION, freeze_vision_tower=frozen)
    load(other, tmp_path / "checkpoint")
    assert_same_weights(weights_of(other), weights, atol=0)
    assert_same_weights(weights_of(make_engine(tmp_path / "checkpoint-model")), weights, atol=0)
    assert train(other, path, num_steps=1) == train(engine, path, num_steps=1)
    row = make_rows()[3]
    (outputs,) = make_engine(tmp_path / "checkpoint-model").forward([packed(path, [row])])
    assert isinstance(outputs, TokenOutputs)
    with torch.no_grad():
        np.testing.assert_allclose(outputs.logprobs_N, oracle_logprobs(model.eval(), path, row), atol=1e-5)


def values_of(engine: FsdpEngine, path: Path, rows: list[Row]) -> torch.Tensor:
    """Values of all of `rows`, computed together."""
    (outputs,) = engine.forward([packed(path, rows)])
    assert isinstance(outputs, ValueOutputs)
    return outputs.values_N


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2_5_vl", False), ("qwen3_vl", False), ("qwen3_vl", True), ("qwen3_5_moe", True)]
)
def test_a_critic_reads_images_and_its_head_learns(tmp_path: Path, family: VisionFamily, tied: bool) -> None:
    path = write_vision(tmp_path / "model", family, tied=tied)
    rows: list[Row] = [
        {**row, "returns": np.full(row["token_ids"].shape, 0.5, np.float32), "values": np.zeros(row["token_ids"].shape)}
        for row in make_rows()
    ]
    engine = make_engine(path, head="value", optimizer=SECTION)
    alone = [values_of(engine, path, [row]) for row in rows]
    torch.testing.assert_close(values_of(engine, path, rows), torch.cat(alone), rtol=0, atol=1e-5)
    assert not torch.equal(alone[0], alone[2])  # which shows another image
    microbatch = packed(path, rows, ("loss_mask", "returns", "values"))
    losses = []
    for _ in range(3):
        metrics = engine.forward_backward([microbatch], ValueObjective(None, local_counts(rows)))
        engine.step()
        losses.append(metrics.values()["critic/loss"])
    assert losses[2] < losses[0]
    save(engine, tmp_path / "checkpoint")
    again = make_engine(exported(tmp_path / "checkpoint"), head="value")
    torch.testing.assert_close(values_of(again, path, rows), values_of(engine, path, rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_the_language_model_are_those_of_peft_and_merge_into_the_directorys_names(
    paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    path, section = paths[family], adapters(family)
    engine = make_engine(path, optimizer=SECTION, lora=section)
    train(engine, path, num_steps=2)
    adapter = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert not any("visual" in name for name in adapter)
    save(engine, tmp_path / "checkpoint")
    whole = exported(tmp_path / "checkpoint")
    rows = make_rows()
    (outputs,) = engine.forward([packed(path, rows)])
    (merged,) = make_engine(whole).forward([packed(path, rows)])
    (base,) = engine.forward([packed(path, rows)], base=True)
    assert isinstance(outputs, TokenOutputs)
    assert isinstance(merged, TokenOutputs)
    assert isinstance(base, TokenOutputs)
    torch.testing.assert_close(outputs.logprobs_N, merged.logprobs_N, rtol=0, atol=1e-5)
    assert not torch.allclose(outputs.logprobs_N, base.logprobs_N, atol=1e-3)
    assert load_file(whole / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()
    modules = r".*language_model.*\.(" + "|".join(section.target_modules) + ")"
    config = LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=modules)
    theirs = get_peft_model(oracle_model(path), config)
    named = {name.replace(".default.weight", ".weight"): each for name, each in theirs.named_parameters()}
    assert adapter.keys() == {name for name, each in named.items() if each.requires_grad}
    with torch.no_grad():
        for name, tensor in adapter.items():
            named[name].copy_(tensor)
        expected = oracle_logprobs(theirs.eval(), path, rows[3])
    (alone,) = engine.forward([packed(path, [rows[3]])])
    assert isinstance(alone, TokenOutputs)
    np.testing.assert_allclose(alone.logprobs_N, expected, atol=1e-5)
    start = section.model_copy(update={"start": whole / "adapter"})
    again = {name: tensor.clone() for name, tensor in make_engine(path, optimizer=SECTION, lora=start).named_weights()}
    assert_same_weights(again, adapter, atol=0)
