"""Router replay: the experts that tokens were sent to in one pass are chosen again in another, so that a router near a
tie does not make another policy of the same weights.

What a layer chooses is taken and given at its one `torch.topk` over the experts' scores, whatever the model makes of
the scores before and of their values after it; the values are those of this pass's scores, with their gradient. Which
choice is meant travels with the plan of the pass (`PackedPlan.routes`) into every layer, as attention's does: passes,
models and microbatches share nothing, and a layer that backward recomputes chooses what it chose before.

Shapes: n tokens that this rank computes; L layers; E experts, k of them chosen; W bytes of one token's routing
(rolecall/data/model/mixture.py).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rolecall.data.model.mixture import Mixture
from rolecall.errors import ConfigError, InvalidInputError


class Routes:
    """The experts that the layers choose in one pass over a microbatch."""

    def __init__(self, given_nLk: torch.Tensor | None = None) -> None:
        """`given_nLk`: int64 ids that are chosen, whatever the routers say; None: the routers choose."""
        self.given_nLk = given_nLk
        self.chosen: dict[int, torch.Tensor] = {}
        """int64 [n, k] by layer, in the order of the pass."""
        self.num_choices = 0
        """Choices asked for, those of recomputed layers included."""
        self.num_differing_n: torch.Tensor | None = None
        """float32, layers in which the routers would have sent a token to others; None: no layer replayed any."""

    def choose(self, layer: int, own_nk: torch.Tensor) -> torch.Tensor:
        """The ids for `layer`, in the shape of `own_nk`, its router's."""
        self.num_choices += 1
        if layer in self.chosen:  # backward computes it again
            return self.chosen[layer].view_as(own_nk)
        given_nk = own_nk if self.given_nLk is None else self.given_nLk[:, layer].reshape_as(own_nk)
        if self.given_nLk is not None:
            differing_n = (own_nk.sort().values != given_nk.sort().values).any(-1).flatten().float()
            self.num_differing_n = differing_n if self.num_differing_n is None else self.num_differing_n + differing_n
        self.chosen[layer] = given_nk.reshape(-1, own_nk.shape[-1])
        return given_nk

    def record(self, mixture: Mixture) -> torch.Tensor:
        """uint8 [n, W] of what was chosen; zeros for layers without experts."""
        first = next(iter(self.chosen.values()))
        none = torch.zeros_like(first)
        return encode_routing(
            torch.stack([self.chosen.get(layer, none) for layer in range(mixture.num_layers)], 1), mixture
        )


def encode_routing(ids_nLk: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """uint8 [n, W] of ids of any type."""
    return ids_nLk.to(_dtype(mixture)).flatten(1).view(torch.uint8)


def decode_routing(record_nW: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """int64 [n, L, k] of the bytes uint8 [n, W]. InvalidInputError when they are not of this mixture."""
    if record_nW.shape[1:] != (mixture.width,):
        raise InvalidInputError(
            f"the routing to replay has {record_nW.shape[1:].numel()} bytes a token, and this model's {mixture.width}; "
            "the rollouts sample with another model"
        )
    ids = record_nW.contiguous().view(_dtype(mixture))
    return ids.long().view(-1, mixture.num_layers, mixture.num_chosen)


def follow_routes(blocks: Sequence[nn.Module], mixture: Mixture) -> None:
    """Makes each of `blocks`, the layers of one model in order, choose by the routes of its plan where it has some.
    ConfigError when there are not as many as the mixture has.
    """
    if len(blocks) != mixture.num_layers:
        raise ConfigError(
            f"actor.router_replay: the model has {len(blocks)} layers and its config.json says {mixture.num_layers}; "
            "leave it off"
        )
    for index, block in enumerate(blocks):
        block.forward = _following(block.forward, index, mixture)


def check_followed(blocks: Iterable[nn.Module], traced: Routes) -> None:
    """ConfigError unless each of `blocks` with experts chose them once in the pass `traced`, by a topk of its
    mixture's.
    """
    with_experts = [
        index
        for index, block in enumerate(blocks)
        if any("experts" in name.split(".") for name, _ in block.named_parameters())
    ]
    if sorted(traced.chosen) != with_experts or traced.num_choices != len(with_experts):
        raise ConfigError(
            f"actor.router_replay: {len(with_experts)} layers of the model have experts, and {traced.num_choices} "
            "choices of as many as config.json says were seen in a pass; this architecture chooses in a way that "
            "cannot be replayed: leave it off"
        )


def _following(forward: Callable[..., Any], layer: int, mixture: Mixture) -> Callable[..., Any]:
    @functools.wraps(forward)
    def following(*args: Any, **kwargs: Any) -> Any:
        routes: Routes | None = kwargs["packed"].routes
        if routes is None:
            return forward(*args, **kwargs)
        with Choosing(routes, layer, mixture):
            return forward(*args, **kwargs)

    return following


class Choosing(TorchFunctionMode):
    """Answers the choice of experts in one call of a layer."""

    def __init__(self, routes: Routes, layer: int, mixture: Mixture) -> None:
        super().__init__()
        self._routes, self._layer = routes, layer
        self._sizes = (mixture.num_experts, mixture.num_chosen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores = args[0] if args else kwargs["input"]
        found = func(*args, **(kwargs or {}))
        if (scores.shape[-1], found.indices.shape[-1]) != self._sizes:
            return found
        # The same operations whoever chose: a layer that is recomputed must keep for backward what it kept before.
        ids = self._routes.choose(self._layer, found.indices)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _dtype(mixture: Mixture) -> torch.dtype:
    return torch.uint8 if mixture.id_bytes == 1 else torch.int16
