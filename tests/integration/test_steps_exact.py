"""Whole steps of the actor, update after update, against loops over single tokens on plain transformers in float64:
mini-batches, epochs, segments, masks, the correction and the schedule at once, on one rank and on ranks of which some
get nothing.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolecall.settings import RunSettings
from rolecall.training.account.flops import CostModel
from rolecall.training.packing.pack import Row
from rolecall.training.packing.pieces import cut
from rolecall.training.packing.plan import plan_pieces
from rolecall.training.state.learning_rate import learning_rate
from rolecall.trajectory import seed_of, segment_lengths
from rolecall.v1.trajectory_pb2 import RowRef
from tests import forks
from tests.integration.steps_ranks import KL_COEF, NUM_STEPS, TOKEN_BUDGET, Sampled, main, settings_of, train
from tests.tiny_models import write_qwen3
from tests.unit.algorithms.loss_rig import Drawn, oracle_token

pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB = 150
CASES: dict[str, dict[str, Any]] = {
    "ppo": {
        "policy_loss": {"kind": "ppo", "dual_clip": 1.5},
        "num_minibatches": 2,
        "num_epochs": 2,
        "correction": {"weight": {"kind": "token", "cap": 1.5, "normalize": True}},
    },
    "gspo": {
        "policy_loss": {"kind": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.1},
        "aggregation": "seq_mean_token_mean",
        "num_minibatches": 3,
        "kl": {"reference": "ref", "kl_coef": KL_COEF},
    },
    "gmpo": {
        "policy_loss": {"kind": "gmpo"},
        "aggregation": "seq_mean_token_mean",
        "num_minibatches": 2,
        "num_epochs": 3,
        "correction": {"weight": {"kind": "sequence", "cap": 2.0}},
    },
    "cispo": {
        "policy_loss": {"kind": "cispo", "clip_eps_high": 0.3},
        "aggregation": "seq_mean_token_sum",
        "num_epochs": 3,
        "correction": {"proximal": "bypass"},
    },
    "sapo": {"policy_loss": {"kind": "sapo"}, "aggregation": "token_sum", "num_minibatches": 4, "correction": None},
    "dppo": {
        "policy_loss": {"kind": "dppo_tv", "max_divergence": 0.02},
        "aggregation": "seq_mean_token_sum_norm",
        "num_minibatches": 2,
        "kl": {"reference": "ref", "kl_coef": KL_COEF},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a batch for it."""
    folder = tmp_path_factory.mktemp("steps")
    write_qwen3(folder / "model", vocab=VOCAB, hidden=28, num_layers=1, heads=2, kv_heads=1)
    sample(policy(folder)).write(folder)
    return folder


@pytest.fixture(scope="module")
def spread(folder: Path) -> Path:
    """What three ranks made of each case."""
    forks.run_ranks(folder, 3, main, str(folder), 3, CASES)
    return folder


def policy(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager", dtype=torch.float64
    ).eval()


def sample(model: PreTrainedModel) -> Sampled:
    """Two groups of three responses of up to three segments, in which an environment speaks; one was cut off, and is
    not trained on.
    """
    rng, rows, refs = np.random.default_rng(0), list[Row](), list[RowRef]()
    temperatures = [float(t) for t in rng.choice(np.array([0.7, 1.0, 1.3], np.float32), 6)]
    for number in range(6):
        if number % 3 == 0:
            prompt = rng.integers(0, VOCAB, 4, dtype=np.int32)
        segments = [rng.integers(0, VOCAB, rng.integers(2, 9), dtype=np.int32) for _ in range(1 + number % 3)]
        ids = np.concatenate([part for sampled in segments for part in (prompt, sampled)])
        mask = np.concatenate([part for each in segments for part in (np.zeros(4), np.arange(len(each)) != 3)])
        starts = np.cumsum([len(prompt) + len(each) for each in segments])
        refs.append(RowRef(id=f"{number // 3}/{number % 3}", num_tokens=len(ids), segment_starts=starts[:-1].tolist()))
        with torch.no_grad():
            logprobs = logprobs_T(model, ids, refs[-1], temperatures[number]).numpy()
        noise = rng.normal(scale=0.3, size=(2, len(ids)))
        rows.append(
            {
                "token_ids": ids,
                "response_mask": mask.astype(np.uint8),
                "loss_mask": (mask * (number != 4)).astype(np.uint8),
                "advantages": (rng.normal(size=len(ids)) * mask).astype(np.float32),
                "rollout_logprobs": ((logprobs + noise[0]).clip(max=-1e-3) * mask).astype(np.float32),
                "ref/logprobs": ((logprobs + noise[1]).clip(max=-1e-3) * mask).astype(np.float32),
                "policy_versions": np.where(mask, 0, -1).astype(np.int32),
            }
        )
    return Sampled(rows, temperatures, refs)


def logprobs_T(model: PreTrainedModel, ids: Any, ref: RowRef, temperature: float) -> torch.Tensor:
    """Of each token after those before it in its segment; 0 for a segment's first."""
    parts = []
    for own in torch.split(torch.from_numpy(ids.astype(np.int64)), list(segment_lengths(ref))):
        log_p = (model(own[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        parts += [torch.zeros(1, dtype=torch.float64), log_p.gather(1, own[1:, None])[:, 0]]
    return torch.cat(parts)


def members_of_updates(settings: RunSettings, refs: list[RowRef], step: int) -> list[list[int]]:
    """The rows of each mini-batch, which no test here is about."""
    apart = not settings.algorithm.sees_trajectories
    pieces = cut([segment_lengths(ref) for ref in refs], TOKEN_BUDGET, between_segments=apart)
    (plan,) = plan_pieces(
        pieces,
        num_minibatches=settings.algorithm.num_minibatches,
        token_budget=TOKEN_BUDGET,
        world_size=1,
        cost=CostModel(1.0),
        seed=seed_of(settings.run.seed, step, 0),
        prompts=[ref.id.partition("/")[0] for ref in refs],
    )
    return [sorted({pieces[index].row for each in microbatches for index in each}) for microbatches in plan.minibatches]


@cache
def by_hand(folder: Path, case: str) -> dict[str, torch.Tensor]:
    """The weights after the steps, by loops."""
    model, settings, sampled = policy(folder), settings_of(folder / "model", CASES[case]), Sampled.read(folder)
    section = settings.actor.optimizer
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw, num_updates = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps), 0
    for step in range(NUM_STEPS):
        old = old_logprobs(model, settings, sampled)
        weights = weights_of_tokens(settings, sampled, old)
        for members in settings.algorithm.num_epochs * members_of_updates(settings, sampled.refs, step):
            logprobs = [logprobs_of(model, sampled, number) for number in members]
            gradients = slopes(settings, sampled, members, [each.detach() for each in logprobs], old, weights)
            adamw.zero_grad()
            torch.autograd.backward(logprobs, gradients)
            torch.nn.utils.clip_grad_norm_(model.parameters(), section.max_grad_norm)
            for group in adamw.param_groups:
                group["lr"] = learning_rate(section, num_updates, settings.num_policy_updates)
            adamw.step()
            num_updates += 1
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logprobs_of(model: PreTrainedModel, sampled: Sampled, number: int) -> torch.Tensor:
    row = sampled.rows[number]
    return logprobs_T(model, row["token_ids"], sampled.refs[number], sampled.temperatures[number])


def old_logprobs(model: PreTrainedModel, settings: RunSettings, sampled: Sampled) -> list[torch.Tensor]:
    if settings.algorithm.sampler_is_old:
        return [torch.from_numpy(row["rollout_logprobs"]).double() for row in sampled.rows]
    with torch.no_grad():
        return [logprobs_of(model, sampled, number) for number in range(len(sampled.rows))]


def trained(sampled: Sampled, number: int) -> list[int]:
    return [t for t, is_trained in enumerate(sampled.rows[number]["loss_mask"]) if is_trained]


def weights_of_tokens(settings: RunSettings, sampled: Sampled, old: list[torch.Tensor]) -> list[dict[int, float]]:
    """The correction's weight of each trained token of each row."""
    correction = settings.algorithm.correction
    weight = None if correction is None else correction.weight
    found = []
    for number, row in enumerate(sampled.rows):
        gaps = {t: float(old[number][t]) - float(row["rollout_logprobs"][t]) for t in trained(sampled, number)}
        if weight is None:
            found.append(dict.fromkeys(gaps, 1.0))
        elif weight.kind == "token":
            found.append({t: min(math.exp(gap), weight.cap or math.inf) for t, gap in gaps.items()})
        else:
            found.append(dict.fromkeys(gaps, min(math.exp(sum(gaps.values())), weight.cap or math.inf)))
    if weight is None or not weight.normalize:
        return found
    everything = [value for each in found for value in each.values()]
    mean = sum(everything) / len(everything)
    return [{t: value / mean for t, value in each.items()} for each in found]


def slopes(
    settings: RunSettings,
    sampled: Sampled,
    members: list[int],
    logprobs: list[torch.Tensor],
    old: list[torch.Tensor],
    weights: list[dict[int, float]],
) -> list[torch.Tensor]:
    """The derivatives of a mini-batch's loss by the logprobs of its rows."""
    algorithm, length = settings.algorithm, settings.sampling.max_tokens
    tokens = [trained(sampled, number) for number in members]
    num_tokens, num_sequences = sum(map(len, tokens)), sum(map(bool, tokens))
    gradients = [torch.zeros_like(each) for each in logprobs]
    for place, number in enumerate(members):
        row, own = sampled.rows[number], tokens[place]
        advantages, mask = torch.from_numpy(row["advantages"]).double(), torch.from_numpy(row["loss_mask"] != 0)
        drawn = Drawn([len(mask)], logprobs[place], old[number], advantages, mask, torch.zeros_like(mask))
        for t in own:
            share = {
                "token_mean": 1 / num_tokens,
                "token_sum": 1.0,
                "seq_mean_token_sum": 1 / num_sequences,
                "seq_mean_token_mean": 1 / (num_sequences * len(own)),
                "seq_mean_token_sum_norm": 1 / (num_sequences * length),
            }[algorithm.aggregation]
            for u, slope in oracle_token(algorithm.policy_loss, drawn, own, t)[1].items():
                gradients[place][u] += share * weights[number][t] * slope
            if algorithm.kl is not None:  # k3
                log_ratio = float(row["ref/logprobs"][t]) - float(logprobs[place][t])
                gradients[place][t] += share * KL_COEF * (1 - math.exp(log_ratio))
    return gradients


def assert_same_way(weights: dict[str, torch.Tensor], folder: Path, case: str) -> None:
    expected, start = by_hand(folder, case), dict(policy(folder).named_parameters())
    assert weights.keys() == expected.keys()
    way = sum(float((expected[name] - start[name].detach()).square().sum()) for name in expected)
    off = sum(float((expected[name] - weights[name].double()).square().sum()) for name in expected)
    assert math.sqrt(off / way) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_loops_over_tokens(folder: Path, case: str) -> None:
    assert_same_way(train(folder / "model", CASES[case], Sampled.read(folder)), folder, case)


@pytest.mark.thorough("test_steps_are_those_of_loops_over_tokens")
@pytest.mark.parametrize("case", CASES)
def test_steps_on_three_ranks_of_which_some_get_nothing_are_those_of_loops(spread: Path, case: str) -> None:
    assert_same_way(load_file(spread / f"{case}.safetensors"), spread, case)
