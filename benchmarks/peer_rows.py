"""Rows of vs_peers.py: advantages, KL and corrections. Shapes as in peer_batch.py."""

from collections.abc import Iterator, Mapping
from math import exp
from typing import Any

import numpy as np
import torch

from benchmarks.peer_batch import EXACT, ROUGH, B, Batch, G, Row, T, flat, gradient_of, replace_mask
from benchmarks.peer_cases import Case
from rolecall.algorithms.advantages import ScoredBatch, estimate
from rolecall.algorithms.advantages.grpo import grpo
from rolecall.algorithms.control import kl_coef_next
from rolecall.algorithms.correction import correct
from rolecall.algorithms.correction.mismatch import mismatch, mismatch_sums
from rolecall.algorithms.kl import kl_N
from rolecall.algorithms.shaping import Moments, penalise_kl, shape_rewards
from rolecall.settings import (
    AdvantageSection,
    CorrectionSection,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    ImportanceWeight,
    PlainAdvantage,
    ReinforcePlusPlusAdvantage,
    Rejection,
    ShapingSection,
)
from rolecall.wire import Array

GDPO_WEIGHTS = {"0": 1.0, "1": 0.5}


def advantage_rows(batch: Batch) -> Iterator[Row]:
    """Every estimator that verl or TRL has."""
    greedy_B = batch.normal(B)
    given = {"token_level_rewards": batch.rewards, "response_mask": batch.mask, "gids": batch.gids}
    whitened = {"up_to_scale": True, "tolerance": 1e-5}
    kinds: list[tuple[str, AdvantageSection, str, dict[str, Any], dict[str, Array], dict[str, Any]]] = [
        ("GRPO", GrpoAdvantage(), "grpo_outcome", {}, {}, {}),
        (
            "GRPO without std",
            GrpoAdvantage(normalize_std=False),
            "grpo_outcome",
            {"norm_adv_by_std_in_grpo": False},
            {},
            {},
        ),
        ("RLOO", PlainAdvantage(kind="rloo"), "rloo_outcome", {}, {}, {}),
        ("OPO", PlainAdvantage(kind="opo"), "opo_outcome", {}, {}, {}),
        ("GPG", PlainAdvantage(kind="gpg"), "gpg_outcome", {}, {}, {"up_to_scale": True}),
        (
            "REINFORCE++",
            ReinforcePlusPlusAdvantage(gamma=0.95),
            "reinforce_plus_plus_outcome",
            {"config": {"gamma": 0.95}},
            {},
            whitened,
        ),
        (
            "REINFORCE++ baseline",
            ReinforcePlusPlusAdvantage(baseline="group"),
            "reinforce_plus_plus_baseline_outcome",
            {},
            {},
            whitened,
        ),
        ("ReMax", PlainAdvantage(kind="remax"), "remax_outcome", {}, {"reward_baselines": greedy_B}, {}),
    ]
    scored = batch.scored(greedy=greedy_B)
    for what, section, function, options, more, kind in kinds:
        ours = {"advantages": estimate(section, scored).advantages_N.reshape(B, T)}
        case = Case("advantages", {"function": f"compute_{function}_advantage", **options}, {**given, **more})
        yield Row(what, "verl", case, ours, **kind)
    yield _otb_row(batch)
    yield from _gae_rows(batch, given)
    yield _gdpo_row(batch)
    yield from _trl_rows(batch)
    yield from _group_edges()


def _gdpo_row(batch: Batch) -> Row:
    ours = {"advantages": estimate(GdpoAdvantage(weights=GDPO_WEIGHTS), batch.scored()).advantages_N.reshape(B, T)}
    case = Case(
        "gdpo",
        {"weights": [1.0, 0.5]},
        {"response_mask": batch.mask, "gids": batch.gids, "components": batch.components},
    )
    return Row("GDPO", "verl", case, ours, ROUGH, "over tokens there, over trajectories here", up_to_scale=True)


def _trl_rows(batch: Batch) -> Iterator[Row]:
    """The estimators of TRL's, which has one number for each response."""
    scored = batch.scored()
    rewards = {"rewards": batch.outcomes[:, None], "weights": np.ones(1, batch.mask.dtype)}
    shaped_B = shape_rewards(
        ShapingSection(normalize="batch"), batch.outcomes, batch.mask.sum(1), Moments.of(batch.outcomes), T
    )
    normalised = {"advantages": grpo(shaped_B, batch.gids, normalize_std=False)}
    case = Case("advantages", {"num_generations": G, "scale_rewards": "batch"}, rewards)
    yield Row("rewards normalised by the batch", "TRL", case, normalised, ROUGH, up_to_scale=True)
    for what, section, options in (
        ("GRPO", GrpoAdvantage(), {}),
        ("GRPO without std", GrpoAdvantage(normalize_std=False), {"scale_rewards": "none"}),
    ):
        ours = {"advantages": estimate(section, scored).advantages_N.reshape(B, T)[np.arange(B), batch.last]}
        yield Row(what, "TRL", Case("advantages", {"num_generations": G, **options}, rewards), ours, ROUGH)
    ours = {
        "advantages": estimate(GdpoAdvantage(weights=GDPO_WEIGHTS), scored).advantages_N.reshape(B, T)[
            np.arange(B), batch.last
        ]
    }
    several = {"rewards": batch.components, "weights": np.array([1.0, 0.5])}
    summed = {"num_generations": G, "multi_objective_aggregation": "normalize_then_sum"}
    yield Row("GDPO", "TRL", Case("advantages", summed, several), ours, ROUGH, up_to_scale=True)


def _otb_row(batch: Batch) -> Row:
    """Returns the row for responses of one length: verl compares by the place in a padded row, and leaves what has no
    counterpart its reward.
    """
    whole = replace_mask(batch, np.ones_like(batch.mask))
    probs = np.exp(whole.old)
    squares = (probs**2 + whole.rng.random((B, T)) * (1 - probs) ** 2).astype(probs.dtype)
    scored = whole.scored({"old_logprobs": whole.old, "sum_squared_probs": squares})
    inputs = {
        "token_level_rewards": whole.rewards,
        "response_mask": whole.mask,
        "gids": whole.gids,
        "old_log_probs": whole.old,
        "sum_pi_squared": squares,
    }
    ours = {"advantages": estimate(PlainAdvantage(kind="optimal_token_baseline"), scored).advantages_N.reshape(B, T)}
    return Row(
        "OTB, equal lengths",
        "verl",
        Case("advantages", {"function": "compute_optimal_token_baseline_advantage"}, inputs),
        ours,
    )


def _gae_rows(batch: Batch, given: Mapping[str, Array]) -> Iterator[Row]:
    for gamma, gae_lambda in ((1.0, 1.0), (0.97, 0.9), (0.9, 0.0)):
        options = {"function": "compute_gae_advantage_return", "gamma": gamma, "lam": gae_lambda}
        case = Case("advantages", options, {**given, "values": batch.values})
        section = GaeAdvantage(gamma=gamma, gae_lambda=gae_lambda)
        result = estimate(section, batch.scored({"values": batch.values}))
        assert result.returns_N is not None
        yield Row(
            "GAE, whitened", "verl", case, {"advantages": result.advantages_N.reshape(B, T)}, 1e-5, up_to_scale=True
        )
        yield Row("GAE's returns", "verl", case, {"returns": result.returns_N.reshape(B, T)})
        bootstrapped = batch.scored({"values": batch.values, "bootstrap_value": np.ones((B, 1), batch.mask.dtype)})
        result = estimate(section.model_copy(update={"bootstrap_truncated": True}), bootstrapped)
        assert result.returns_N is not None
        yield Row(
            "GAE, bootstrap_truncated",
            "verl",
            case,
            {"returns": result.returns_N.reshape(B, T)},
            EXACT,
            "an option here, unknown there",
        )


def _group_edges() -> Iterator[Row]:
    """A group of one, and one of rewards that are equal in float32."""
    for what, rewards, gids, why in (
        ("GRPO, a group of one", [1.0, 0.0, 0.7], [0, 0, 1], "0 here, the raw reward there"),
        ("GRPO, equal float32 rewards", [0.9, 0.9, 0.9], [0, 0, 0], "0 here, what rounding leaves over 1e-6 there"),
    ):
        rows = np.array(rewards, np.float32)[:, None]
        mask = np.ones((3, 1), np.uint8)
        ours = estimate(
            GrpoAdvantage(), ScoredBatch.of_rows(gids, list(rows), list(mask), list(mask))
        ).advantages_N.reshape(3, 1)
        given = {"token_level_rewards": rows, "response_mask": mask.astype(np.float32), "gids": np.array(gids)}
        case = Case("advantages", {"function": "compute_grpo_outcome_advantage"}, given)
        yield Row(what, "verl", case, {"advantages": ours}, 1e-6, why)


def kl_rows(batch: Batch) -> Iterator[Row]:
    """Estimates with both gradients, the KL in the reward and its adaptive coefficient."""
    given = {"logprob": batch.logprobs, "ref_logprob": batch.reference}
    for estimator in ("k1", "k2", "k3", "abs"):
        for through in ("estimator", "k2"):
            leaf = flat(batch.logprobs).requires_grad_()
            value_N = kl_N(leaf, flat(batch.reference), estimator, through)
            ours = {"estimate": value_N.detach().reshape(B, T).numpy(), "gradient": gradient_of(value_N.sum(), leaf)}
            case = Case("kl", {"estimator": estimator + "+" * (through == "k2")}, given)
            yield Row(f"KL {estimator}{', gradient of k2' * (through == 'k2')}", "verl", case, ours)
    far = {"logprob": np.full_like(batch.mask, -4.0), "ref_logprob": np.full_like(batch.mask, -1.0)}
    leaf = flat(far["logprob"]).requires_grad_()
    ours = {"gradient": gradient_of(kl_N(leaf, flat(far["ref_logprob"]), "k3").sum(), leaf)}
    yield Row(
        "KL k3 beyond log r = 2.7",
        "verl",
        Case("kl", {"estimator": "k3"}, far),
        ours,
        EXACT,
        "verl holds k3 at 10, where its gradient is 0",
    )
    rows = zip(batch.rewards, batch.old, batch.reference, batch.mask, strict=True)
    ours = {"rewards": np.stack([penalise_kl(*row, 0.3, "k1") for row in rows]) * batch.mask}
    inputs = {"token_level_scores": batch.rewards, "old_log_prob": batch.old, "ref_log_prob": batch.reference}
    yield Row("KL in the reward", "verl", Case("kl_reward", {"coef": 0.3}, inputs), ours, 1e-6)
    kls, coef, coefs = batch.rng.exponential(0.1, 20), 0.3, []
    for kl in kls.tolist():
        coef = kl_coef_next(coef, kl, 16, target=0.1, horizon=200)
        coefs.append(coef)
    options = {"coef": 0.3, "target": 0.1, "horizon": 200, "num": 16}
    yield Row("adaptive KL coefficient", "verl", Case("kl_coef", options, {"kls": kls}), {"coefs": np.array(coefs)})


def correction_rows(batch: Batch) -> Iterator[Row]:
    """Weights and rejections of the sampler's tokens."""
    given = {"log_ratio": batch.old - batch.sampled, "response_mask": batch.mask}

    def kept(section: CorrectionSection) -> Array:
        return correct(section, batch.policy(flat(batch.logprobs)), flat(batch.sampled)).weights_N.reshape(B, T).numpy()

    for what, weight, options in (
        ("weights of tokens", ImportanceWeight(cap=1.2), {"level": "token", "threshold": 1.2}),
        ("weights of responses", ImportanceWeight(kind="sequence", cap=1.2), {"level": "sequence", "threshold": 1.2}),
        ("IcePop", ImportanceWeight(kind="icepop", low=0.8, cap=1.3), {"level": "token", "threshold": "0.8_1.3"}),
    ):
        yield Row(what, "verl", Case("weights", options, given), {"weights": kept(CorrectionSection(weight=weight))})
    names = {"token": "token", "sequence_mean": "seq_mean", "sequence_sum": "seq_sum", "sequence_max": "seq_max"}
    low, high = exp(-0.15), exp(0.25)
    for over, name in names.items():
        for kind, bound in (("k2", 0.03), ("k3", 0.03)):
            section = CorrectionSection(weight=None, reject=(Rejection(kind=kind, over=over, high=bound),))
            case = Case("rejection", {"option": f"{name}_{kind}", "threshold": bound}, given)
            yield Row(f"rejection {kind} {over}", "verl", case, {"kept": kept(section)})
        if over != "sequence_max":
            ours = {
                "kept": kept(
                    CorrectionSection(weight=None, reject=(Rejection(kind="ratio", over=over, low=low, high=high),))
                )
            }
            inverted = Case("rejection", {"option": f"{name}_k1", "threshold": f"{1 / high}_{1 / low}"}, given)
            yield Row(f"rejection ratio {over}, bounds inverted", "verl", inverted, ours)
            same = Case("rejection", {"option": f"{name}_k1", "threshold": f"{low}_{high}"}, given)
            yield Row(
                f"rejection ratio {over}, same bounds", "verl", same, ours, EXACT, "verl's are of sampler / trainer"
            )
    index = torch.arange(B).repeat_interleave(T)
    found = mismatch(mismatch_sums(flat(batch.sampled), flat(batch.old), flat(batch.mask) > 0, index, B))
    assert found is not None
    inputs = {"old_log_prob": batch.old, "rollout_log_prob": batch.sampled, "response_mask": batch.mask}
    yield Row(
        "mismatch KL", "verl", Case("mismatch", {}, inputs), {"kl": np.array(found.kl_k1), "k3_kl": np.array(found.kl)}
    )
