"""Routers of experts in the stages of a pipeline: what they say of a microbatch reaches the loss at its end, and they
choose what they are told to.

What a stage's routers say is a few numbers, most of them sums over tokens. They travel to the last stage behind the
hidden states, each stage adding its own, and their gradient comes back with that of the hidden states: bits that pass
unchanged in any type. A stage knows that gradient before backward reaches its layers, so each router adds its share to
the gradient of its logits, in a layer that is computed again, too. Any loss of the routers is thus computed as without
a pipeline; Megatron's own losses, which are others for every cut into microbatches, stay off.

Shapes: n tokens that this rank computes, padding included, of those that tensor ranks cut its part; H hidden size; L
layers; E experts, k of them chosen; M numbers of a pass.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from torch.nn.functional import pad

from rolecall.algorithms.losses.router import Routing, sum_routing
from rolecall.data.model.mixture import Mixture
from rolecall.training.engine import Microbatch, TokenOutputs
from rolecall.training.model.attention.packed import PackedPlan
from rolecall.training.model.router_replay import Choosing, Routes, encode_routing
from rolecall.training.model.sequence_parallel import SequenceShare
from rolecall.training.objective.routing import tokens_behind
from rolecall.training.packing.outputs import begin_routes, with_record, with_rerouted


class RoutersPass:
    """One pass over a microbatch, as the routers of one stage see it."""

    def __init__(
        self,
        microbatch: Microbatch,
        packed: PackedPlan,
        cut: SequenceShare | None,
        mixture: Mixture,
        *,
        layers: Sequence[int],
        sums: bool,
        replay: bool,
    ) -> None:
        """`cut`: the tensor ranks that this rank's tokens are cut over; `layers`: those of the whole model that have a
        router; `sums`: whether a loss wants any; `replay`: whether the microbatch's column of routing is replayed, or
        without one the routing told.
        """
        self._microbatch, self._packed, self._cut, self._mixture = microbatch, packed, cut, mixture
        self._layers = layers
        weights = tokens_behind(microbatch, packed)
        self._num_tokens = weights.shape[0]
        self._weights_n = weights if cut is None else cut.own(weights)
        self._routes = self._begin() if replay else None
        self._said: dict[int, Routing] = {}
        self._gradient_M: torch.Tensor | None = None
        self.sums_wanted = sums
        self._shapes = self._shapes_of()

    @property
    def num_numbers(self) -> int:
        """M."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def choosing(self, layer: int) -> AbstractContextManager[Any]:
        """Inside, the router of `layer` chooses what it is told to, or tells."""
        return nullcontext() if self._routes is None else Choosing(self._routes, layer, self._mixture)

    def sums(self, layer: int, logits_nE: torch.Tensor) -> Routing:
        """The sums of what the router of `layer` says and chose."""
        chosen = None if self._routes is None else [self._routes.chosen[layer]]
        return sum_routing([logits_nE], self._weights_n, self._mixture.num_chosen, chosen)

    def keep(self, layer: int, logits_nE: torch.Tensor) -> None:
        """Keeps the sums of `layer`, the first time: backward may compute it again."""
        if self.sums_wanted and layer not in self._said:
            self._said[layer] = self.sums(layer, logits_nE.detach())

    def gradient(self, layer: int, logits_nE: torch.Tensor) -> torch.Tensor:
        """The share of the loss's gradient by the numbers that goes to these logits."""
        assert self._gradient_M is not None
        parts = self._parts(self._gradient_M)
        with torch.enable_grad():
            logits_nE = logits_nE.detach().requires_grad_()
            said = self.sums(layer, logits_nE)
            (found,) = torch.autograd.grad((said.probs_E, said.squares), logits_nE, (parts["probs"], parts["squares"]))
        return found

    def add(self, hidden: torch.Tensor, numbers_M: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers with this stage's own added to those of the stages before, beside its last hidden states."""
        before = self._weights_n.new_zeros(self.num_numbers) if numbers_M is None else numbers_M
        found: tuple[torch.Tensor, torch.Tensor] = _Added.apply(hidden, before, self)  # type: ignore[no-untyped-call]
        return found

    def own(self) -> torch.Tensor:
        """float32 [M], of this stage alone; zeros where it has nothing to say."""
        parts = {name: self._weights_n.new_zeros(shape) for name, shape in self._shapes.items()}
        for layer, said in self._said.items():
            parts["probs"] += said.probs_E
            parts["squares"] += said.squares
            parts["choices"] += said.num_choices
            parts["counts"][layer] = said.counts_LE[0]
        if self._routes is not None and self._routes.num_differing_n is not None:
            parts["differing"] += self._routes.num_differing_n
        elif self._routes is not None:
            for layer, ids_nk in self._routes.chosen.items():
                parts["chosen"][:, layer] = ids_nk.float()
        return torch.cat([part.flatten() for part in parts.values()])

    def take(self, gradient_M: torch.Tensor) -> None:
        """Takes the loss's gradient by the numbers, before backward reaches the layers."""
        self._gradient_M = gradient_M

    def with_numbers(self, outputs: TokenOutputs, numbers_M: torch.Tensor) -> TokenOutputs:
        """The last stage's outputs with all that the routers of the model said: of the whole microbatch, on every rank
        that shares it.
        """
        parts = self._parts(numbers_M)
        if self.sums_wanted:
            counts, choices = parts["counts"][self._layers].detach(), parts["choices"].detach()
            routing = Routing(parts["probs"], parts["squares"], counts, choices)
            for share in (self._cut, self._packed.sequence):
                routing = routing if share is None else routing.each(share.whole)
            outputs = replace(outputs, routing=routing)
        told = parts.get("differing", parts.get("chosen"))
        if told is None:
            return outputs
        told_n = told.detach() if self._cut is None else self._cut.joined(told.detach(), self._num_tokens)
        if "differing" in parts:
            return with_rerouted(outputs, told_n / len(self._layers), self._microbatch, self._packed)
        return with_record(outputs, encode_routing(told_n, self._mixture), self._microbatch, self._packed)

    def _begin(self) -> Routes:
        routes = begin_routes(self._microbatch, self._packed, self._mixture, self._cut)
        if routes.given_nLk is not None:
            # padding that went to one expert k times would be sent once
            first = torch.arange(self._mixture.num_chosen, device=self._weights_n.device)
            routes.given_nLk[self._weights_n == 0] = first
        return routes

    def _shapes_of(self) -> dict[str, tuple[int, ...]]:
        """The numbers of a pass and their shapes."""
        num_tokens, layers, experts = self._weights_n.shape[0], self._mixture.num_layers, self._mixture.num_experts
        found: dict[str, tuple[int, ...]] = {}
        if self.sums_wanted:
            found |= {"probs": (experts,), "squares": (), "choices": (), "counts": (layers, experts)}
        if self._routes is not None and self._routes.given_nLk is not None:
            found["differing"] = (num_tokens,)
        elif self._routes is not None:
            found["chosen"] = (num_tokens, layers, self._mixture.num_chosen)
        return found

    def _parts(self, numbers_M: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self._shapes.values()]
        split = zip(self._shapes.items(), torch.split(numbers_M, sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in split}


class Router(TopKRouter):  # type: ignore[misc]  # of no known type
    """Megatron's router, which tells a pass what it says and chooses as the pass does.

    Where it chooses by sigmoid, each expert's has a bias, `expert_bias` float32 [E]. Megatron would move it after each
    step for the sake of balance; here it stays as it was read, in every back end.
    """

    given: RoutersPass | None = None
    """The pass that its layer is in; None: nobody asks."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.moe_router_score_function == "sigmoid":
            del self.expert_bias
            self.register_buffer("expert_bias", torch.empty(config.num_moe_experts, dtype=torch.float32))

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Chooses experts by `logits` [n, 1, E]."""
        if self.given is None:
            return super().routing(logits, *args, **kwargs)
        layer, logits_nE = self.layer_number - 1, logits.flatten(0, 1)
        heard = _Heard.apply(logits_nE, self.given, layer) if self.given.sums_wanted else logits_nE  # type: ignore[no-untyped-call]
        with self.given.choosing(layer):
            found = super().routing(heard.view_as(logits), *args, **kwargs)
        self.given.keep(layer, logits_nE)
        return found


def follow_passes(layers: nn.ModuleList) -> None:
    """Tells the routers of `layers` of each pass, which the layers get as the packed_seq_params of a StagePass."""

    def tell(layer: Any, args: Any, kwargs: Any) -> None:
        layer.mlp.router.given = kwargs["packed_seq_params"].routers

    for layer in layers:
        if not isinstance(layer.mlp, MoELayer):
            continue
        layer.register_forward_pre_hook(tell, with_kwargs=True)


def behind(hidden_n1H: torch.Tensor, numbers_M: torch.Tensor) -> torch.Tensor:
    """One tensor of both, in the hidden states' type: as many rows of bits more as the numbers need."""
    joined: torch.Tensor = _Behind.apply(hidden_n1H, numbers_M)  # type: ignore[no-untyped-call]
    return joined


def apart(joined_m1H: torch.Tensor, num_numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `behind` joined: hidden states and `num_numbers` numbers."""
    found: tuple[torch.Tensor, torch.Tensor] = _Apart.apply(joined_m1H, num_numbers)  # type: ignore[no-untyped-call]
    return found


def _joined(hidden_n1H: torch.Tensor, numbers_M: torch.Tensor) -> torch.Tensor:
    width = hidden_n1H.shape[2] * hidden_n1H.element_size() // numbers_M.element_size()
    rows = pad(numbers_M, (0, -numbers_M.shape[0] % width)).view(hidden_n1H.dtype)
    return torch.cat([hidden_n1H, rows.view(-1, 1, hidden_n1H.shape[2])])


def _parted(joined_m1H: torch.Tensor, num_numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = joined_m1H.shape[2] * joined_m1H.element_size() // torch.float32.itemsize
    num_tokens = joined_m1H.shape[0] + -num_numbers // width
    rows = joined_m1H[num_tokens:].clone()
    return joined_m1H[:num_tokens].clone(), rows.view(-1).view(torch.float32)[:num_numbers]


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_n1H: torch.Tensor, numbers_M: torch.Tensor) -> torch.Tensor:
        ctx.num_numbers = numbers_M.shape[0]
        return _joined(hidden_n1H, numbers_M)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _parted(grads[0].contiguous(), ctx.num_numbers)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined_m1H: torch.Tensor, num_numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _parted(joined_m1H, num_numbers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(*grads), None


class _Added(torch.autograd.Function):
    """Adds a stage's numbers; backward tells the stage the gradient, on its way to the layers."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, numbers_M: torch.Tensor, routers: RoutersPass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.routers = routers
        return hidden.view_as(hidden), numbers_M + routers.own()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden_grad, numbers_grad_M = grads
        ctx.routers.take(numbers_grad_M)
        return hidden_grad, numbers_grad_M, None


class _Heard(torch.autograd.Function):
    """A router's logits; backward adds what the loss of the routers wants of them."""

    @staticmethod
    def forward(ctx: Any, logits_nE: torch.Tensor, routers: RoutersPass, layer: int) -> torch.Tensor:
        ctx.routers, ctx.layer = routers, layer
        ctx.save_for_backward(logits_nE)
        return logits_nE.view_as(logits_nE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (logits_nE,) = ctx.saved_tensors
        return grads[0] + ctx.routers.gradient(ctx.layer, logits_nE), None, None
