"""Compiled layers compute what others do, in graphs that all layers and all lengths share."""

import asyncio
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch._dynamo
from pydantic import ValidationError
from torch._dynamo.utils import counters

from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts, pack
from tests import vision_rig
from tests.conftest import MakeSettings
from tests.integration.fsdp_ranks import make_rows, train_step
from tests.tiny_gemma import write_gemma4
from tests.tiny_models import VisionFamily, write_gpt_oss, write_qwen3, write_qwen3_moe, write_vision

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="no C++ compiler (g++), which kernels for CPUs are made with"
    ),
]
BUDGETS = (200, 64, 31)
"""Tokens of a microbatch: each step packs the same rows into other numbers of tokens."""
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_qwen3(root / "dense", num_layers=10),
        "moe": write_qwen3_moe(root / "moe"),
        "sinks": write_gpt_oss(root / "sinks"),
    }


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_engine(path: Path, device: str = "cpu", **more: Any) -> FsdpEngine:
    dtype = "bfloat16" if device == "cuda" else "float32"
    options = {"optimizer": OptimizerSection(learning_rate=1e-3), "dtype": dtype, "total_steps": 8, **more}
    return FsdpEngine(EngineOptions(path=path, head="policy", **options), device=torch.device(device))


def trained(engine: FsdpEngine) -> list[dict[str, float]]:
    rows = make_rows(8)
    return [train_step(engine, rows, token_budget=budget, seed=step) for step, budget in enumerate(BUDGETS)]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "kept": ("dense", {}),
    "recomputed": ("dense", {"gradient_checkpointing": True}),
    "offloaded": ("dense", {"activation_offload": True}),
    "inputs offloaded": ("dense", {"activation_offload": True, "gradient_checkpointing": True}),
    "adapters": ("dense", {"lora": LoraSection(rank=4)}),
    "experts": ("moe", {}),
    "sinks": ("sinks", {}),
}


@pytest.mark.parametrize(
    ("way", "device"),
    [
        *(
            (way, "cpu") for way in ("kept", "recomputed", "offloaded", "inputs offloaded")
        ),  # one set of kernels: C++ takes minutes for more
        *(pytest.param(way, "cuda", marks=ON_GPU) for way in WAYS),
    ],
)
def test_compiled_layers_train_as_others_do(
    models: dict[str, Path],
    way: str,
    device: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rolecall.training.model.activation_offload.LEAST_BYTES", 256)  # so that these small ones move
    kind, more = WAYS[way]
    expected = trained(make_engine(models[kind], device, **more))
    assert not counters["stats"]
    engine = make_engine(models[kind], device, **more, torch_compile=True)
    with caplog.at_level(logging.WARNING, "torch._dynamo"):
        compiled = trained(engine)
    assert (engine._activations is not None and engine._activations.num_bytes > 0) == ("offloaded" in way)
    assert counters["stats"]["unique_graphs"] > 0
    assert kind in ("moe", "sinks") or not caplog.records, "a graph could not be compiled"
    for ours, theirs in zip(compiled, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2 if device == "cuda" else 1e-4)


def test_all_layers_and_all_lengths_share_their_graphs(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], torch_compile=True)
    trained(engine)
    engine.forward([pack(make_rows(2), [], temperature=0.7, device=engine.device)])
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs <= 8, "ten layers, before and after attention, with gradients and without"
    trained(engine)
    for num_rows in (1, 3, 5):
        engine.forward([pack(make_rows(num_rows, seed=num_rows), [], temperature=0.7, device=engine.device)])
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.thorough("test_all_layers_and_all_lengths_share_their_graphs")
def test_layers_of_many_kinds_are_all_compiled_and_recomputed_by_the_same_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Gemma 4 attend within windows or not, keep keys and values for later layers, read them, or neither."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # kernels would take a minute
    path, packed = write_gemma4(tmp_path), pack(make_rows(5), [], temperature=0.7, device=torch.device("cpu"))
    results = []
    for is_compiled in (False, True):
        engine = make_engine(path, gradient_checkpointing=True, torch_compile=is_compiled)
        with caplog.at_level(logging.WARNING, "torch._dynamo"):
            (outputs,) = engine.forward([packed])
            assert isinstance(outputs, TokenOutputs)
            results.append((outputs.logprobs_N, trained(engine)))
    assert counters["stats"]["unique_graphs"] > 8
    assert not caplog.records, "a graph could not be compiled"
    (before, steps), (compiled, compiled_steps) = results
    torch.testing.assert_close(compiled, before, rtol=0, atol=1e-5)
    for ours, theirs in zip(compiled_steps, steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_experts_with_adapters_are_left_out_of_the_graphs(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return graph.forward  # no kernels, which take minutes

    monkeypatch.setattr("torch.compile", partial(torch.compile, backend=backend))
    more: dict[str, Any] = {"lora": LoraSection(rank=4, target_modules=("q_proj", "o_proj"), experts=True)}
    losses = []
    for torch_compile in (False, True):
        engine = make_engine(models["moe"], **more, torch_compile=torch_compile)
        with caplog.at_level(logging.WARNING, "torch._dynamo"):
            losses += [train_step(engine, make_rows(4), token_budget=64, seed=step)["loss"] for step in range(2)]
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-4)
    assert 0 < counters["stats"]["unique_graphs"] < 15, "with peft's sums and the experts they were 21"
    assert not caplog.records, "a graph could not be compiled, or was made again and again"


@pytest.mark.parametrize("family", get_args(VisionFamily))
def test_layers_behind_a_vision_tower_are_compiled_and_the_tower_is_not(
    tmp_path: Path, family: VisionFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return graph.forward  # no kernels, which take minutes

    monkeypatch.setattr("torch.compile", partial(torch.compile, backend=backend))
    path, rows = write_vision(tmp_path, family), vision_rig.make_rows()
    norms = []
    for torch_compile in (False, True):
        engine = make_engine(path, torch_compile=torch_compile, gradient_checkpointing=True)
        for num_rows in (len(rows), 3):
            microbatch = vision_rig.packed(path, rows[:num_rows], ("loss_mask",))
            engine.forward([microbatch])
            engine.forward_backward([microbatch], SftObjective(local_counts(rows[:num_rows])))
            norms.append(engine.step().grad_norm)
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)
    assert counters["stats"]["unique_graphs"] > 0
    tower = engine._model.vision
    assert tower is not None
    assert not any("forward" in vars(module) for module in tower.module.modules())


@pytest.mark.parametrize("way", ["kept", "adapters"])
def test_graphs_hold_no_number_on_the_host(models: dict[str, Path], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.extend(each for each in inputs if isinstance(each, torch.Tensor))
        return graph.forward

    monkeypatch.setattr("torch.compile", partial(torch.compile, backend=backend))
    kind, more = WAYS[way]
    trained(make_engine(models[kind], torch_compile=True, **more))
    assert given
    assert not [each for each in given if each.dim() == 0]


@pytest.mark.parametrize(
    "kind",
    [
        "moe",
        pytest.param("sinks", marks=pytest.mark.thorough("test_what_moves_activations_is_not_compiled_with_them")),
    ],
)
def test_what_moves_activations_is_not_compiled_with_them(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of a mixture, parts are computed operator by operator, which calls its hooks within a compiled layer."""
    expected = trained(make_engine(models[kind]))
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="aot_eager"))  # graphs alone, no kernels
    compiled = trained(make_engine(models[kind], activation_offload=True, torch_compile=True))
    for ours, theirs in zip(compiled, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert counters["stats"]["unique_graphs"] > 0
    assert not [reason for reason in counters["graph_break"] if "UntypedStorage" in reason]


async def test_a_layer_that_cannot_be_compiled_is_computed_as_before_in_whatever_thread(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps its configuration by thread and context."""
    expected = trained(make_engine(models["dense"]))
    engine = await asyncio.to_thread(make_engine, models["dense"], torch_compile=True)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr("torch._inductor.compile_fx._compile_fx_inner", broken)
    for ours, theirs in zip(await asyncio.to_thread(trained, engine), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


async def test_no_graph_is_kept_on_the_disk(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would pickle it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    engine = await asyncio.to_thread(make_engine, models["dense"], torch_compile=True, optimizer=None)
    microbatch = pack(make_rows(2), [], temperature=0.7, device=engine.device)
    await asyncio.to_thread(engine.forward, [microbatch])
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept, "kernels are kept"
    assert kept.isdisjoint({"fxgraph", "aotautograd"})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"run": {"name": "test", "dir": "run", "num_steps": 1, "deterministic": True}},
            "run.deterministic: compiled layers",
        ),
        ({"actor": {"router_replay": "r2"}}, "layers whose routers"),
        ({"actor": {"moe": {}}}, "layers whose routers"),
        ({"actor": {"num_ranks": 2, "parallel": {"tensor": 2}}}, r"actor\.parallel\.tensor: matrices"),
        (
            {
                "critic": {"num_ranks": 2, "parallel": {"tensor": 2}},
                "algorithm": {"groups_per_batch": 4, "advantage": {"kind": "gae"}},
            },
            r"critic\.parallel\.tensor: matrices",
        ),
    ],
    ids=["deterministic", "replayed", "measured", "split", "another trainer's"],
)
def test_what_is_not_compiled_is_refused(make_settings: MakeSettings, sections: dict[str, Any], told: str) -> None:
    make_settings(**sections)
    with pytest.raises(ValidationError, match=told):
        make_settings(**sections | {"actor": sections.get("actor", {}) | {"torch_compile": True}})
