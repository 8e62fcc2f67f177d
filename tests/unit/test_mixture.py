"""Mixtures of experts by their config.json: their bytes in rows, what counts them, and who is refused a replay."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.commands.check import find_problems
from rolecall.data.model.mixture import Mixture, read_mixture
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings, SftSettings, load_settings
from rolecall.store.budget import PromptBytes, StoreBudget, batch_bytes
from rolecall.training.model.router_replay import Routes, decode_routing
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from services.rollout.config import configure
from tests.twins.launched import write_light_config

EXPERTS = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}


@given(st.integers(1, 4), st.integers(2, 600), st.integers(1, 2), st.integers(1, 5), st.randoms(use_true_random=False))
def test_what_is_encoded_is_decoded_and_recorded_alike(
    num_layers: int, num_experts: int, num_chosen: int, num_tokens: int, random: Any
) -> None:
    mixture = Mixture(num_layers, num_experts, num_chosen)
    shape = (num_tokens, num_layers, num_chosen)
    ids_TLk = np.array([random.randrange(num_experts) for _ in range(int(np.prod(shape)))]).reshape(shape)
    record_TW = mixture.encode(ids_TLk)
    assert record_TW.shape == (num_tokens, mixture.width)
    assert record_TW.dtype == np.uint8
    given_TLk = decode_routing(torch.from_numpy(record_TW), mixture)
    assert np.array_equal(given_TLk.numpy(), ids_TLk)
    routes = Routes(given_TLk)
    for layer in range(num_layers):
        routes.choose(layer, torch.zeros(num_tokens, num_chosen, dtype=torch.int64))
    assert np.array_equal(routes.record(mixture).numpy(), record_TW)


def test_an_id_takes_a_byte_and_in_larger_mixtures_two() -> None:
    assert (Mixture(48, 128, 8).width, Mixture(61, 256, 8).width, Mixture(61, 257, 8).width) == (384, 488, 976)


@pytest.mark.parametrize("ids", [np.zeros((3, 1, 2), int), np.zeros((3, 2, 1), int), np.full((3, 2, 2), 4)], ids=str)
def test_a_routing_of_another_mixture_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidInputError, match="not of a mixture of 2 layers that choose 2 of 4 experts"):
        Mixture(2, 4, 2).encode(ids)


def write_model(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 512, "eos_token_id": 2, "head_dim": 64, **config})
    )
    return path


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_architectures_name_their_experts_differently(tmp_path: Path, name: str) -> None:
    config = {"num_hidden_layers": 3, name: 16, "num_experts_per_tok": 2}
    assert read_mixture(write_model(tmp_path / "a", **config)) == Mixture(3, 16, 2)
    assert read_mixture(write_model(tmp_path / "b", text_config=config)) == Mixture(3, 16, 2)
    with pytest.raises(ConfigError, match=r"actor\.router_replay: model\.path .* is no mixture of experts"):
        read_mixture(write_model(tmp_path / "c", num_hidden_layers=3))


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_the_store_has_room_for_what_is_replayed(
    make_settings: Callable[..., RunSettings], tmp_path: Path, replay: str
) -> None:
    write_model(tmp_path / "model", **EXPERTS)
    off, on = make_settings(), make_settings(actor={"router_replay": replay})
    tokens = off.data.max_prompt_tokens + off.sampling.max_tokens
    longest = [StoreBudget.of(settings, PromptBytes(0)).group_bytes for settings in (off, on)]
    assert longest[1] - longest[0] == off.responses_per_group * tokens * 384
    batch = TrainBatch(rows=[RowRef(num_tokens=100), RowRef(num_tokens=50)], gids=[1])
    assert batch_bytes(on, batch, PromptBytes(0)) - batch_bytes(off, batch, PromptBytes(0)) == 150 * 384


def test_a_pass_that_is_not_made_cannot_be_replayed(make_settings: Callable[..., RunSettings]) -> None:
    bypass = {"groups_per_batch": 2, "correction": {"proximal": "bypass"}}
    with pytest.raises(ValidationError, match=r"actor\.router_replay r2 .* bypass there is none; use r3"):
        make_settings(algorithm=bypass, actor={"router_replay": "r2"})
    make_settings(algorithm=bypass, actor={"router_replay": "r3"})


def test_no_stage_of_a_sampler_says_what_experts_all_of_them_took(make_settings: Callable[..., RunSettings]) -> None:
    stages = {"pipeline_parallel_size": 2}
    with pytest.raises(ValidationError, match=r"router_replay r3: .* rollout.pipeline_parallel_size is 2; make it 1"):
        make_settings(actor={"router_replay": "r3"}, rollout=stages)
    make_settings(actor={"router_replay": "r2"}, rollout=stages)


def test_other_trainers_have_no_such_setting(make_settings: Callable[..., RunSettings]) -> None:
    with pytest.raises(ValidationError, match=r"critic\.router_replay"):
        make_settings(algorithm={"groups_per_batch": 2, "advantage": {"kind": "gae"}}, critic={"router_replay": "r3"})
    tree = {
        "run": {"name": "t", "dir": "/t", "num_steps": 1},
        "model": {"path": "/m"},
        "data": {"train": "/d", "batch_size": 2},
        "actor": {"router_replay": "r2"},
    }
    with pytest.raises(ValidationError, match=r"actor\.router_replay: examples have no routing"):
        SftSettings.model_validate(tree)


def test_rollouts_on_cpus_are_refused_what_vllm_does_on_gpus_only(
    make_settings: Callable[..., RunSettings], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", **EXPERTS)
    sampled = {"actor": {"router_replay": "r3"}}
    with pytest.raises(ConfigError, match=r"actor\.router_replay r3: .* on GPUs only"):
        configure(make_settings(**sampled), "rollout-0", range(4))
    on_gpus = {"num_replicas": 1, "devices": [[1]]}
    assert configure(make_settings(**sampled, rollout=on_gpus), "rollout-0", range(4)).mixture == Mixture(48, 128, 8)
    assert configure(make_settings(actor={"router_replay": "r2"}), "rollout-0", range(4)).mixture is None


def findings(config: Path, *overrides: str) -> tuple[list[str], str]:
    out = io.StringIO()
    return find_problems(load_settings(config, list(overrides)), out), out.getvalue()


def test_check_tells_what_is_replayed_and_what_it_takes(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    path = load_settings(config).model.path / "config.json"
    dense, r2 = json.loads(path.read_text()), "actor.router_replay=r2"
    assert any("is no mixture of experts" in problem for problem in findings(config, r2)[0])
    path.write_text(json.dumps({**dense, **EXPERTS}))
    problems, told = findings(config, r2, "algorithm.num_epochs=2")
    assert not problems
    assert "router replay r2: tokens go to the experts of the old policy; 48 layers x 8 of 128 experts, 384 by" in told
    assert "so that nothing is replayed" in findings(config, r2)[1]
    problems, _ = findings(config, "actor.router_replay=r3", "rollout.num_replicas=1")
    assert any("on GPUs only" in problem for problem in problems)
