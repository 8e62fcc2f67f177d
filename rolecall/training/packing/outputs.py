"""The outputs of microbatches as every engine gives them, the empty ones included."""

from dataclasses import replace

import torch

from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.model.mixture import Mixture
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.attention.packed import PackedPlan
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.model.router_replay import Routes, decode_routing
from rolecall.training.model.sequence_parallel import SequenceShare


def stand_in(device: torch.device) -> Microbatch:
    """The smallest microbatch there is, for a rank without one of its own to take part in collectives."""
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    return Microbatch(
        token_ids_N=zeros,
        position_ids_N=torch.arange(2, device=device),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32, device=device),
        lengths=(2,),
        trajectories=(0,),
        temperature_N=torch.ones(2, device=device),
        score_mask_N=torch.tensor([False, True], device=device),
        num_scored=1,
        prefixes=None,
        columns={},
    )


def zero_of(outputs: TokenOutputs | ValueOutputs) -> torch.Tensor:
    """A loss of 0 whose gradients are zeros of every parameter."""
    if isinstance(outputs, TokenOutputs):
        return (outputs.logprobs_N.sum() + outputs.entropy_N.sum()) * 0.0
    return (outputs.values_N.sum() + outputs.bootstrap_values_S.sum()) * 0.0


def ranked(logprobs_N: torch.Tensor, entropy_N: torch.Tensor, more_NC: torch.Tensor, wanted: Wanted) -> TokenOutputs:
    """The outputs with what was `wanted`, which PolicyModel gives as columns of one tensor."""
    k = wanted.top_k
    ids_Nk, logprobs_Nk = more_NC[:, :k].to(torch.int32), more_NC[:, k : 2 * k]
    return TokenOutputs(
        logprobs_N, entropy_N, top_ids_Nk=ids_Nk, top_logprobs_Nk=logprobs_Nk, sum_squared_probs_N=more_NC[:, 2 * k]
    )


def narrow(outputs: TokenOutputs | ValueOutputs, microbatch: Microbatch) -> TokenOutputs | ValueOutputs:
    """`outputs` of `microbatch`, without what a stand-in computed in the place of an empty one."""
    if microbatch.lengths:
        return outputs
    if isinstance(outputs, TokenOutputs):
        nothing = {name: part[:0] for name, part in vars(outputs).items() if isinstance(part, torch.Tensor)}
        return replace(outputs, **nothing, routing=outputs.routing and outputs.routing.each(torch.zeros_like))
    return ValueOutputs(outputs.values_N[:0], outputs.bootstrap_values_S[:0])


def begin_routes(
    microbatch: Microbatch, packed: PackedPlan, mixture: Mixture, cut: SequenceShare | None = None
) -> Routes:
    """The routes of a pass over what this rank computes of `microbatch`: those of its column, if it has one. `cut`:
    the ranks that what the plan leaves to this one is cut over.
    """
    record_NW = microbatch.columns.get(ROUTED_EXPERTS)
    if record_NW is None:
        return Routes()
    if packed.sequence is not None:
        record_NW = packed.sequence.own(record_NW)
    if packed.prefixes is not None:
        record_NW = record_NW.index_select(0, packed.prefixes.first_C)
    if cut is not None:
        record_NW = cut.own(record_NW)
    return Routes(decode_routing(record_NW, mixture))


def with_record(
    outputs: TokenOutputs, record_nW: torch.Tensor, microbatch: Microbatch, packed: PackedPlan
) -> TokenOutputs:
    """The outputs of a pass with where it sent the tokens. `record_nW`: of those that this rank computes."""
    return replace(outputs, routed_experts_NW=_everyone(record_nW, microbatch, packed))


def with_rerouted(
    outputs: TokenOutputs, share_n: torch.Tensor, microbatch: Microbatch, packed: PackedPlan
) -> TokenOutputs:
    """The outputs of a pass with the share of layers that would have sent a token elsewhere. `share_n`: of the tokens
    that this rank computes.
    """
    share_N = _everyone(share_n, microbatch, packed)
    return replace(outputs, rerouted_N=torch.cat([share_N[:1], share_N[:-1]]))


def _everyone(own_n: torch.Tensor, microbatch: Microbatch, packed: PackedPlan) -> torch.Tensor:
    """Joins what is known of the tokens that this rank computes to what is known of every token of the microbatch."""
    if packed.sequence is not None:
        return packed.sequence.joined(own_n, microbatch.token_ids_N.shape[0])
    return own_n if packed.prefixes is None else own_n.index_select(0, packed.prefixes.home_N)
