"""Routers of experts in a training engine: what they say of each microbatch, and the losses that keep them even and
small.

    seen = engine.forward(minibatch.microbatches)  # before each update, with the weights it starts from
    loss = RouterLosses(loss, settings.actor.moe, router_load(group, seen), "actor")
    engine.forward_backward(minibatch.microbatches, loss)

Every real token counts, of prompts and responses, trained on or not: a router serves them all. Router logits are taken
where transformers' own output recorder takes them. The formulas are algorithms/losses/router.py's.

Shapes: N tokens of one microbatch; L layers with a router; E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from rolecall.algorithms.losses.router import RouterLoad, Routing, balance_loss, sum_routing, z_loss
from rolecall.errors import ConfigError
from rolecall.settings import MoeSection
from rolecall.telemetry import Metrics
from rolecall.training.engine import Loss, Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.attention.packed import PackedPlan
from rolecall.training.ranks.command_group import CommandGroup


class Routers:
    """The routers of one model."""

    def __init__(self, hf: PreTrainedModel) -> None:
        """ConfigError when it has none whose balance transformers knows a loss for."""
        routers, self._index = find_routers(hf)
        self._num_chosen: int = hf.config.get_text_config().num_experts_per_tok
        self._num_routers = len(routers)
        self._tape: list[torch.Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._keep)

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Router logits [N, E] of what is computed inside, layer after layer. Backward's recomputation of a layer is
        not: it happens outside.
        """
        self._tape = []
        try:
            yield self._tape
        finally:
            self._tape = None

    def sums(self, logits_LNE: Sequence[torch.Tensor], microbatch: Microbatch, packed: PackedPlan) -> Routing:
        """Sums over the whole microbatch, also where ranks share its tokens (each then goes on with the gradient of its
        own run).
        """
        assert len(logits_LNE) == self._num_routers
        chosen_LNK = list(packed.routes.chosen.values()) if packed.routes is not None else None
        routing = sum_routing(logits_LNE, tokens_behind(microbatch, packed), self._num_chosen, chosen_LNK)
        return routing if packed.sequence is None else routing.each(packed.sequence.whole)

    def _keep(self, router: nn.Module, inputs: Any, output: Any) -> None:
        if self._tape is not None:
            self._tape.append(output[self._index])


def find_routers(hf: PreTrainedModel) -> tuple[list[nn.Module], int]:
    """The routers of `hf`, and where in their outputs the logits are. ConfigError when it has none whose balance
    transformers knows a loss for.
    """
    routers, index = _recorded(hf)
    if not routers or not hasattr(hf.config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(
            f"actor.moe: {type(hf).__name__} has no routers of experts that a balancing loss is known for; "
            "remove actor.moe"
        )
    return routers, index


def freeze_routers(hf: PreTrainedModel) -> None:
    """Takes the routers of `hf` out of training. ConfigError when it has none that transformers tells from other
    layers.
    """
    routers, _ = _recorded(hf)
    if not routers:
        raise ConfigError(f"model.freeze_routers: {type(hf).__name__} has no routers of experts; leave it out")
    for router in routers:
        router.requires_grad_(False)


def _recorded(hf: PreTrainedModel) -> tuple[list[nn.Module], int]:
    recorder: Any = (hf._can_record_outputs or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return [], 0
    return [each for each in hf.modules() if isinstance(each, recorder.target_class)], recorder.index


def tokens_behind(microbatch: Microbatch, packed: PackedPlan) -> torch.Tensor:
    """float32, how many tokens of the microbatch stand behind each that the routers saw."""
    device, num_tokens = microbatch.token_ids_N.device, microbatch.token_ids_N.shape[0]
    if packed.sequence is not None:
        run = packed.sequence.run(num_tokens)
        return (torch.arange(run.start, run.stop, device=device) < num_tokens).float()
    if packed.prefixes is not None:
        return packed.prefixes.home_N.bincount(minlength=packed.prefixes.first_C.shape[0]).float()
    return torch.ones(num_tokens, device=device)


def router_load(group: CommandGroup, outputs: Sequence[TokenOutputs | ValueOutputs]) -> RouterLoad:
    """Sums the load of a mini-batch from the outputs of its microbatches, the empty ones included, on every rank; a
    collective.
    """
    routings = [_routing(each) for each in outputs]
    counts_LE = torch.stack([routing.counts_LE.double() for routing in routings]).sum(0)
    num_choices = sum(float(routing.num_choices) for routing in routings)
    totals = group.sum_over_slots(np.append(counts_LE.numpy(force=True).ravel(), num_choices))
    return RouterLoad(torch.from_numpy(totals[:-1]).view(counts_LE.shape).to(counts_LE.device), float(totals[-1]))


@dataclass(frozen=True)
class RouterLosses:
    """A Loss with those of the routers added."""

    loss: Loss
    section: MoeSection
    load: RouterLoad
    """Load of the global mini-batch."""
    prefix: str
    """Beginning of the metrics' names."""

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        """A Loss. router_balance and router_z are shown without their coefficients."""
        value, metrics = self.loss(microbatch, outputs)
        routing = _routing(outputs)
        balance, z = balance_loss(routing, self.load), z_loss(routing, self.load)
        added = self.section.balance_coef * balance + self.section.z_coef * z
        metrics.sum(f"{self.prefix}/router_balance", float(balance.detach()))
        metrics.sum(f"{self.prefix}/router_z", float(z.detach()))
        metrics.max(f"{self.prefix}/expert_load_max", self.load.busiest)
        metrics.sum(f"{self.prefix}/loss", float(added.detach()))
        return value + added, metrics


def _routing(outputs: TokenOutputs | ValueOutputs) -> Routing:
    assert isinstance(outputs, TokenOutputs)
    assert outputs.routing is not None
    return outputs.routing
