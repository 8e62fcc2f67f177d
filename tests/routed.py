"""Mixtures of experts whose routing is seen, told by hand or perturbed: plain transformers, for tests of replays."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import Qwen3MoeForCausalLM

from rolecall.data.model.mixture import Mixture
from rolecall.wire import Array

MIXTURE = Mixture(num_layers=2, num_experts=4, num_chosen=2)
"""That of tiny_models.write_qwen3_moe."""


def random_routing(rng: np.random.Generator, num_tokens: int, mixture: Mixture = MIXTURE) -> Array:
    """int64 [T, L, k]: any experts, and never one twice."""
    drawn = rng.random((num_tokens, mixture.num_layers, mixture.num_experts)).argsort(-1)
    return np.asarray(drawn[:, :, : mixture.num_chosen])


def routed_ids(record_TW: Array) -> torch.Tensor:
    """int64 [T, L, k] of what a row says."""
    return torch.from_numpy(record_TW.astype(np.int64)).view(-1, MIXTURE.num_layers, MIXTURE.num_chosen)


def route_by_hand(network: Qwen3MoeForCausalLM, chosen_TLk: torch.Tensor) -> None:
    """Makes every router send the tokens of one sequence to `chosen_TLk`, by its own probabilities of them."""
    for layer, block in enumerate(network.model.layers):
        gate = block.mlp.gate

        def told(hidden: torch.Tensor, gate: Any = gate, layer: int = layer) -> tuple[torch.Tensor, ...]:
            logits_TE = linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            weights_Tk = torch.stack(
                [
                    torch.stack([probs_E[int(id)] for id in ids_k])
                    for probs_E, ids_k in zip(logits_TE.softmax(-1), chosen_TLk[:, layer], strict=True)
                ]
            )
            if gate.norm_topk_prob:
                weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
            return logits_TE, weights_Tk, chosen_TLk[:, layer]

        gate.forward = told


def own_routing(network: Qwen3MoeForCausalLM, token_ids: Array) -> Array:
    """uint8 [T, W]: where a model sends the tokens of one sequence, the last one as a sampler would say it."""
    with torch.no_grad():
        said = network(torch.from_numpy(token_ids.astype(np.int64))[None], output_router_logits=True).router_logits
    ids_TLk = torch.stack([logits_TE.topk(MIXTURE.num_chosen).indices for logits_TE in said], 1).numpy()
    encoded = MIXTURE.encode(ids_TLk)
    return np.concatenate([encoded[:-1], encoded[-2:-1]])


def write_with_other_routers(path: Path, model: Path, scale: float) -> Path:
    """Writes `model` with noise of `scale` on the weights of its routers, in units of their own spread. Returns
    `path`.
    """
    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for block in network.model.layers:
            weight = block.mlp.gate.weight
            weight.add_(scale * weight.std() * torch.randn(weight.shape, generator=noise))
    network.save_pretrained(path)
    return path
