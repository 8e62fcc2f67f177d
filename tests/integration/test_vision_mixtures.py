"""Mixtures of experts that see images: what their routers choose and are told, and adapters of their experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.model.mixture import read_mixture
from rolecall.settings import LoraSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.router_replay import decode_routing
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts
from tests.checkpoint_rig import exported, save
from tests.integration.fsdp_oracle import assert_same_weights
from tests.integration.fsdp_ranks import make_engine
from tests.integration.vision_ranks import SECTION
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import make_rows, packed

pytestmark = pytest.mark.usefixtures("one_rank")

MIXTURES: tuple[VisionFamily, ...] = ("qwen3_vl_moe", "qwen3_5_moe")


@pytest.fixture(scope="module", params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: VisionFamily = request.param
    return write_vision(tmp_path_factory.mktemp("models") / family, family)


def outputs_of(engine: FsdpEngine, microbatch: Any) -> TokenOutputs:
    (outputs,) = engine.forward([microbatch])
    assert isinstance(outputs, TokenOutputs)
    return outputs


def test_tokens_go_where_they_are_sent_images_among_them(path: Path) -> None:
    engine, mixture, microbatch = make_engine(path, router_replay=True), read_mixture(path), packed(path, make_rows())
    assert microbatch.prefixes is not None
    free = outputs_of(engine, microbatch)
    assert free.routed_experts_NW is not None

    def sent(routed_NW: torch.Tensor) -> TokenOutputs:
        return outputs_of(engine, replace(microbatch, columns={ROUTED_EXPERTS: routed_NW}))

    again = sent(free.routed_experts_NW)
    assert again.rerouted_N is not None
    assert not again.rerouted_N.any()
    assert torch.equal(again.logprobs_N, free.logprobs_N)
    elsewhere_NLk = (decode_routing(free.routed_experts_NW, mixture) + 1) % mixture.num_experts
    moved = sent(torch.from_numpy(mixture.encode(elsewhere_NLk.numpy())))
    assert moved.rerouted_N is not None
    assert moved.rerouted_N.mean() > 0.8
    assert (moved.logprobs_N - free.logprobs_N).abs().max() > 1e-3


def test_what_routers_say_is_summed_over_all_tokens_however_they_are_packed(path: Path) -> None:
    engine, rows = make_engine(path, routers=True), make_rows()
    together = outputs_of(engine, packed(path, rows)).routing
    each_alone = [outputs_of(engine, packed(path, [row])).routing for row in rows]
    alone = [each for each in each_alone if each is not None]
    assert together is not None
    num_tokens = sum(len(row["token_ids"]) for row in rows)
    assert int(together.num_choices) == num_tokens * read_mixture(path).num_layers
    assert torch.equal(together.counts_LE, torch.stack([each.counts_LE for each in alone]).sum(0))
    expected_E = torch.stack([each.probs_E for each in alone]).sum(0)
    torch.testing.assert_close(together.probs_E, expected_E, rtol=1e-5, atol=1e-4)


def test_routers_stay_as_they_are_where_they_are_asked_to(path: Path) -> None:
    engine, rows = make_engine(path, optimizer=SECTION, freeze_routers=True), make_rows()
    engine.forward_backward([packed(path, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
    engine.step()
    before = load_file(path / "model.safetensors")
    same = {name for name, each in engine.named_weights() if torch.equal(each, before[name])}
    assert same == {name for name in before if name.endswith("mlp.gate.weight")}


def test_adapters_of_experts_merge_into_the_directorys_own_layout(path: Path, tmp_path: Path) -> None:
    section = LoraSection(rank=4, alpha=12.0, target_modules=("q_proj",), experts=True)
    engine, rows = make_engine(path, optimizer=SECTION, lora=section, merges_adapters=True), make_rows()
    before = outputs_of(engine, packed(path, rows)).logprobs_N
    for _ in range(2):
        engine.forward_backward([packed(path, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
        engine.step()
    save(engine, tmp_path / "checkpoint")
    whole = exported(tmp_path / "checkpoint")
    found, own = (load_file(each / "model.safetensors") for each in (whole, path))
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in own.items()}
    assert_same_weights(dict(engine.named_weights()), found, atol=0)
    assert all(torch.equal(found[name], own[name]) != (".experts." in name or "q_proj" in name) for name in own)
    after = outputs_of(engine, packed(path, rows)).logprobs_N
    torch.testing.assert_close(after, outputs_of(make_engine(whole), packed(whole, rows)).logprobs_N, rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-3
