"""Rows of vs_peers.py: policy losses under every aggregation, the value loss and the actor's whole objective.

Shapes as in peer_batch.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.peer_batch import B, Batch, Row, T, behind_a_prompt, flat, gradient_of, replace_mask
from benchmarks.peer_cases import Case
from rolecall.algorithms.aggregation import Counts, token_weights
from rolecall.algorithms.correction import correct
from rolecall.algorithms.losses import token_losses
from rolecall.algorithms.losses.value import value_loss
from rolecall.algorithms.selection import Tokens, num_selected, order
from rolecall.settings import (
    Aggregation,
    AlgorithmSection,
    ClippedLoss,
    CorrectionSection,
    CovarianceLoss,
    DppoLoss,
    DroLoss,
    EntropySection,
    KlSection,
    PolicyLossSection,
    ReinforceLoss,
    SapoLoss,
)
from rolecall.training.engine import TokenOutputs
from rolecall.training.objective.objectives import PolicyObjective, policy_columns
from rolecall.training.packing.pack import pack
from rolecall.v1.trajectory_pb2 import Coefficients
from rolecall.wire import Array

MODES: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "seq_mean_token_mean": "seq-mean-token-mean",
}
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
OURS_CLIP = {"clip_eps_low": 0.1, "clip_eps_high": 0.2}


def our_loss(
    batch: Batch, section: PolicyLossSection, kind: Aggregation, correction: CorrectionSection | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, its leaf [N])."""
    leaf = flat(batch.logprobs).requires_grad_()
    columns = {"selected": _selected(batch, section)} if isinstance(section, CovarianceLoss) else {}
    policy = batch.policy(leaf, columns)
    losses_N = token_losses(section, policy).losses_N
    if correction is not None:
        losses_N = losses_N * correct(correction, policy, flat(batch.sampled)).weights_N
    return (losses_N * weights_of(batch, kind)).sum(), leaf


def weights_of(batch: Batch, kind: Aggregation) -> torch.Tensor:
    """[N]."""
    mask, counts = flat(batch.mask) > 0, Counts(int(batch.mask.sum()), int((batch.mask.sum(1) > 0).sum()))
    return token_weights(mask, torch.arange(B).repeat_interleave(T), B, kind, counts, T).to(flat(batch.mask).dtype)


def geo_mean(low: float, high: float) -> dict[str, Any]:
    """GMPO, as verl calls it."""
    return {"name": "geo_mean", "clip_ratio_low": low, "clip_ratio_high": high}


def _selected(batch: Batch, section: CovarianceLoss) -> torch.Tensor:
    mask = batch.mask.reshape(-1) > 0
    logprobs, old, advantages = (array.reshape(-1)[mask] for array in (batch.logprobs, batch.old, batch.advantages))
    tokens = Tokens(logprobs, old, advantages, np.arange(int(mask.sum())))
    ordered = order(section, tokens, tokens.sums())
    selected = torch.zeros(B * T, dtype=torch.bool)
    selected[torch.from_numpy(mask)] = torch.from_numpy(
        ordered.up_to(ordered.first(num_selected(section, int(mask.sum()))))
    )
    return selected


def loss_rows(batch: Batch) -> Iterator[Row]:
    """Every policy loss of verl's; PPO's under every aggregation, and with a correction; the value loss."""
    yield from _clipped_rows(batch)
    yield from _plain_rows(batch)
    yield from _selecting_rows(batch)
    yield from _dppo_rows(batch)
    yield _value_row(batch)


def _given(batch: Batch) -> dict[str, Array]:
    return {
        "old_log_prob": batch.old,
        "log_prob": batch.logprobs,
        "advantages": batch.advantages,
        "response_mask": batch.mask,
    }


def _row(
    batch: Batch, what: str, section: PolicyLossSection, kind: Aggregation, options: dict[str, Any], **more: Any
) -> Row:
    only, correction = more.pop("only", ("loss", "gradient")), more.pop("correction", None)
    inputs = {**_given(batch), **more.pop("inputs", {})}
    loss, leaf = our_loss(batch, section, kind, correction)
    ours = {"loss": loss.detach().numpy(), "gradient": gradient_of(loss, leaf)}
    case = Case("loss", {"mode": MODES[kind], **options}, inputs)
    return Row(what, "verl", case, {name: ours[name] for name in only}, **{"tolerance": 1e-6, **more})


def _clipped_rows(batch: Batch) -> Iterator[Row]:
    """PPO, GSPO, GMPO and CISPO."""
    ppo = ClippedLoss(**OURS_CLIP, dual_clip=1.5)
    for kind in MODES:
        yield _row(batch, f"PPO, {kind}", ppo, kind, {"name": "vanilla", **CLIP, "clip_ratio_c": 1.5})
    weights = {"rollout_is_weights": np.minimum(np.exp(batch.old - batch.sampled), 2.0)}
    options = {"name": "vanilla", **CLIP, "clip_ratio_c": 1.5}
    yield _row(batch, "PPO, corrected", ppo, "token_mean", options, correction=CorrectionSection(), inputs=weights)
    mean: Aggregation = "seq_mean_token_mean"
    yield _row(
        batch,
        "GSPO",
        ClippedLoss(kind="gspo", clip_eps_low=0.05, clip_eps_high=0.1),
        mean,
        {"name": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    )
    yield _row(batch, "GMPO", ClippedLoss(kind="gmpo", clip_eps_low=0.3, clip_eps_high=0.4), mean, geo_mean(0.3, 0.4))
    masked = replace_mask(batch, np.where(np.arange(B)[:, None] == 0, 0.0, batch.mask))
    loss, _ = our_loss(masked, ClippedLoss(kind="gmpo"), mean)
    case = Case("loss", {"mode": MODES[mean], **geo_mean(0.4, 0.4)}, {**_given(batch), "response_mask": masked.mask})
    why = "a sequence without trained tokens counts in the denominator there"
    yield Row("GMPO, a masked sequence", "verl", case, {"loss": loss.detach().numpy()}, 1e-6, why)
    cispo = ClippedLoss(kind="cispo", clip_eps_low=0.3, clip_eps_high=0.4)
    yield _row(batch, "CISPO", cispo, "token_mean", {"name": "cispo", "clip_ratio_low": 0.3, "clip_ratio_high": 0.4})


def _plain_rows(batch: Batch) -> Iterator[Row]:
    """SAPO, REINFORCE and DRO."""
    sapo = {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.5}
    yield _row(batch, "SAPO", SapoLoss(tau_pos=1.0, tau_neg=1.5), "seq_mean_token_mean", sapo)
    yield _row(batch, "REINFORCE", ReinforceLoss(), "token_mean", {"name": "gpg"})
    yield _row(batch, "DRO", DroLoss(beta=0.4), "token_mean", {"name": "dro", "policy_loss": {"dro_beta": 0.4}})


def _selecting_rows(batch: Batch) -> Iterator[Row]:
    """Clip-Cov and KL-Cov."""
    band = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.5}
    clip_cov = CovarianceLoss(kind="clip_cov", **OURS_CLIP, fraction=1.0, cov_low=0.2, cov_high=1.5)
    yield _row(
        batch, "Clip-Cov, all of the band", clip_cov, "token_mean", {"name": "clip_cov", **CLIP, "policy_loss": band}
    )
    covering = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
    yield _row(
        batch,
        "KL-Cov",
        CovarianceLoss(kind="kl_cov", kl_coef=0.7, fraction=0.2),
        "token_mean",
        {"name": "kl_cov", "policy_loss": covering},
    )


def _dppo_rows(batch: Batch) -> Iterator[Row]:
    """DPPO by both divergences."""
    for name, section in (
        ("dppo_tv", DppoLoss(kind="dppo_tv", max_divergence=0.05)),
        ("dppo_kl", DppoLoss(kind="dppo_kl", max_divergence=0.05)),
    ):
        options = {"name": name, "clip_ratio": 0.05, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
        yield _row(
            batch, f"{name}'s gradient", section, "token_mean", {**options, "clip_ratio_c": 1000.0}, only=("gradient",)
        )
        why = "verl bounds the ratio at clip_ratio_c, 3 unless set"
        yield _row(
            batch,
            f"{name}'s gradient, default cap",
            section,
            "token_mean",
            {**options, "clip_ratio_c": 1.2},
            only=("gradient",),
            differs=why,
        )


def _value_row(batch: Batch) -> Row:
    leaf = flat(batch.values + 0.3 * batch.normal(B, T)).requires_grad_()
    returns = batch.normal(B, T)
    loss, _ = value_loss(leaf, flat(returns), flat(batch.values), weights_of(batch, "token_mean"), clip_eps=0.2)
    inputs = {
        "vpreds": leaf.detach().reshape(B, T).numpy(),
        "returns": returns,
        "values": batch.values,
        "response_mask": batch.mask,
    }
    ours = {"loss": loss.detach().numpy(), "gradient": gradient_of(loss, leaf)}
    return Row("value loss", "verl", Case("value_loss", {"clip": 0.2}, inputs), ours, 1e-6)


def trl_loss_rows(batch: Batch) -> Iterator[Row]:
    """GRPOTrainer's whole loss: policy, KL, entropy and correction at once."""
    given = {
        "logprobs": batch.logprobs,
        "old": batch.old,
        "mask": batch.mask,
        "advantages": batch.advantages_B,
        "entropies": batch.entropies,
    }
    clip = {"epsilon": 0.1, "epsilon_high": 0.2}
    ppo = ClippedLoss(**OURS_CLIP)
    mean: Aggregation = "seq_mean_token_mean"
    kinds: list[tuple[str, PolicyLossSection, Aggregation, dict[str, Any]]] = [
        ("PPO, token_mean", ppo, "token_mean", {"loss_type": "dapo", **clip}),
        ("PPO, token_mean (bnpo)", ppo, "token_mean", {"loss_type": "bnpo", **clip}),
        ("PPO, seq_mean_token_mean", ppo, mean, {"loss_type": "grpo", **clip}),
        (
            "PPO, seq_mean_token_sum_norm",
            ppo,
            "seq_mean_token_sum_norm",
            {"loss_type": "dr_grpo", "max_completion_length": T, **clip},
        ),
        ("PPO, dual clip", ClippedLoss(**OURS_CLIP, dual_clip=1.5), mean, {"loss_type": "grpo", "delta": 1.5, **clip}),
        (
            "GSPO",
            ClippedLoss(kind="gspo", **OURS_CLIP),
            mean,
            {"loss_type": "grpo", "importance_sampling_level": "sequence", **clip},
        ),
        (
            "CISPO",
            ClippedLoss(kind="cispo", clip_eps_high=0.2),
            "token_mean",
            {"loss_type": "cispo", "epsilon_high": 1.2},
        ),
        ("SAPO", SapoLoss(tau_neg=1.5), mean, {"loss_type": "sapo", "sapo_temperature_neg": 1.5}),
    ]
    for what, section, kind, options in kinds:
        loss, leaf = our_loss(batch, section, kind)
        ours = {"loss": loss.detach().numpy(), "gradient": gradient_of(loss, leaf)}
        yield Row(what, "TRL", Case("loss", options, given), ours, 1e-6)
    yield from _assembled_rows(batch, given, clip)
    empty = replace_mask(batch, np.where(np.arange(B)[:, None] == 0, 0.0, batch.mask))
    loss, leaf = our_loss(empty, ppo, mean)
    given = {
        "logprobs": empty.logprobs,
        "old": empty.old,
        "mask": empty.mask,
        "advantages": empty.advantages_B,
        "entropies": empty.entropies,
    }
    why = "a sequence without trained tokens counts in the denominator there"
    case = Case("loss", {"loss_type": "grpo", **clip}, given)
    yield Row("PPO, a masked sequence", "TRL", case, {"loss": loss.detach().numpy()}, 1e-6, why)


def _assembled_rows(batch: Batch, given: Mapping[str, Array], clip: Mapping[str, Any]) -> Iterator[Row]:
    """The actor's own objective, every term of it at once, over packed rows of one prompt token and the response."""
    kl, entropy = KlSection(reference="ref", kl_coef=0.3), EntropySection(entropy_coef=0.2)
    algorithm = AlgorithmSection(groups_per_batch=1, policy_loss=ClippedLoss(**OURS_CLIP), kl=kl, entropy=entropy)
    columns = {
        "advantages": batch.advantages,
        "rollout_logprobs": batch.sampled,
        "old_logprobs": batch.old,
        "ref/logprobs": batch.reference,
    }
    mask = behind_a_prompt(batch.mask).astype(np.uint8)
    rows: list[dict[str, Array]] = [
        {"token_ids": np.arange(T + 1, dtype=np.int32), "response_mask": mask[i], "loss_mask": mask[i]}
        | {name: behind_a_prompt(column)[i] for name, column in columns.items()}
        for i in range(B)
    ]
    microbatch = pack(rows, policy_columns(algorithm), temperature=1.0, device=torch.device("cpu"))
    objective = PolicyObjective(
        algorithm, Counts(int(batch.mask.sum()), B), Coefficients(kl_coef=0.3, entropy_coef=0.2), T
    )
    leaf = flat(behind_a_prompt(batch.logprobs)).requires_grad_()
    loss, _ = objective(microbatch, TokenOutputs(leaf, flat(behind_a_prompt(batch.entropies))))
    (gradient,) = torch.autograd.grad(loss, leaf)
    ours = {"loss": loss.detach().numpy(), "gradient": gradient.reshape(B, T + 1)[:, 1:].numpy()}
    ratio = np.minimum(np.exp(batch.old - batch.sampled), 2.0)
    inputs = {**given, "ref_per_token_logps": batch.reference, "importance_sampling_ratio": ratio}
    options = {"loss_type": "bnpo", "beta": 0.3, "entropy_coef": 0.2, **clip}
    plain = Case("loss", {**options, "use_bias_correction_kl": False}, inputs)
    yield Row("PolicyObjective: PPO, KL, entropy, correction", "TRL", plain, ours, 1e-6)
    why = "TRL multiplies the KL by the ratio unless use_bias_correction_kl is false"
    yield Row("PolicyObjective, TRL's default KL", "TRL", Case("loss", options, inputs), ours, 1e-6, why)
