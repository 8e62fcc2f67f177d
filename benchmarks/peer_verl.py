"""verl's side of vs_peers.py, in an environment of its own: what its own functions make of the cases in a folder.

    python peer_verl.py FOLDER      # cases.json and inputs.npz; writes outputs.npz

Nothing of verl is changed. Shapes: B responses; T response tokens, masked where shorter.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig

from benchmarks.peer_cases import answer

Arrays = dict[str, np.ndarray]
NO_GROUPS = ("compute_gae_advantage_return", "compute_remax_outcome_advantage")


def advantages(given: dict[str, torch.Tensor], function: str, **options: Any) -> Arrays:
    """An estimator by the name of its function; `config` options become an AlgoConfig."""
    if "config" in options:
        options["config"] = AlgoConfig(**options["config"])
    gids = given.pop("gids").numpy()
    index = {} if function in NO_GROUPS else {"index": gids}
    found, returns = getattr(core_algos, function)(**given, **index, **options)
    return {"advantages": found.numpy(), "returns": returns.numpy()}


def gdpo(given: dict[str, torch.Tensor], weights: list[float]) -> Arrays:
    """GDPO over components [B, K]: each lies on the last token, where its code puts it."""
    mask, components = given["response_mask"], given["components"]
    found, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros_like(mask),
        response_mask=mask,
        index=given["gids"].numpy(),
        config={"gdpo_reward_keys": [str(k) for k in range(len(weights))], "gdpo_reward_weights": weights},
        non_tensor_batch={str(k): components[:, k].numpy() for k in range(len(weights))},
        batch={"prompts": mask[:, :0], "attention_mask": mask.long()},
    )
    return {"advantages": found.numpy()}


def loss(
    given: dict[str, torch.Tensor], name: str, mode: str, policy_loss: Mapping[str, Any] = {}, **options: Any
) -> Arrays:
    """A policy loss by its registered name, and its gradient."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        ppo_mini_batch_size=1,
        policy_loss=PolicyLossConfig(**policy_loss),
        **options,
    )
    given["log_prob"].requires_grad_()
    torch.manual_seed(0)
    value, _ = core_algos.get_policy_loss_fn(name)(**given, loss_agg_mode=mode, config=config)
    return _with_gradient(value, given["log_prob"])


def value_loss(given: dict[str, torch.Tensor], clip: float) -> Arrays:
    """The clipped loss of the critic."""
    given["vpreds"].requires_grad_()
    value, _ = core_algos.compute_value_loss(**given, cliprange_value=clip)
    return _with_gradient(value, given["vpreds"])


def kl(given: dict[str, torch.Tensor], estimator: str) -> Arrays:
    """A KL estimate of each token, and its gradient."""
    given["logprob"].requires_grad_()
    value = core_algos.kl_penalty(given["logprob"], given["ref_logprob"], estimator)
    return {"estimate": value.detach().numpy(), "gradient": _with_gradient(value.sum(), given["logprob"])["gradient"]}


def kl_reward(given: dict[str, torch.Tensor], coef: float) -> Arrays:
    """Rewards less the KL."""
    return {"rewards": core_algos.compute_rewards(**given, kl_ratio=coef).numpy()}


def kl_coef(given: dict[str, torch.Tensor], coef: float, target: float, horizon: int, num: int) -> Arrays:
    """The adaptive coefficient after each of the KLs."""
    controller, found = core_algos.AdaptiveKLController(coef, target, horizon), []
    for observed in given["kls"].tolist():
        controller.update(observed, num)
        found.append(controller.value)
    return {"coefs": np.array(found)}


def weights(given: dict[str, torch.Tensor], level: str, threshold: float | str) -> Arrays:
    """Importance weights of the sampler's tokens."""
    found, _ = rollout_corr_helper.compute_rollout_correction_weights(
        **given, rollout_is=level, rollout_is_threshold=threshold
    )
    return {"weights": found.numpy()}


def rejection(given: dict[str, torch.Tensor], option: str, threshold: float | str) -> Arrays:
    """The tokens that are left."""
    found, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        **given, rollout_rs=option, rollout_rs_threshold=threshold
    )
    return {"kept": found.numpy()}


def mismatch(given: dict[str, torch.Tensor]) -> Arrays:
    """How far sampler and trainer are apart."""
    found = rollout_corr_helper.compute_offpolicy_metrics(**given)
    return {name: np.array(found[name]) for name in ("kl", "k3_kl")}


def _with_gradient(value: torch.Tensor, leaf: torch.Tensor) -> Arrays:
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.detach().numpy(), "gradient": gradient.numpy()}


if __name__ == "__main__":
    answer(Path(sys.argv[1]), globals(), torch.from_numpy)
