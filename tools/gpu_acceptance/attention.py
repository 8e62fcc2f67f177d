"""Check 3: packed attention against scaled_dot_product_attention of each sequence alone, in float32; forward and
gradients.

The oracle goes by blocks of queries, each with its own mask, so that a row of 32k tokens and any window fit; heads are
independent, so of the longest
sequences the first and the last group of heads stand for all.

Shapes: N tokens of the pack, C distinct ones; H query heads, K key heads, D and E sizes of a key and of a value; L
tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rolecall.training.model.attention.packed import packed_attention, plan_attention
from rolecall.training.model.prefixes import SharedPrefixes, find_prefixes
from rolecall.training.ranks.device import take_peak_bytes, wait_for
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage, relative

FORWARD, BACKWARD = 1e-2, 2e-2
"""Largest relative norms in bfloat16: of the output, of a gradient."""
EXACT = 2e-5
"""The tolerance in float32, of both."""
_BLOCK = 2048
"""Queries of one block of the oracle."""
_WHOLE = 4096
"""Sequences up to this length are compared in all their heads."""
_FLOOR = {torch.bfloat16: 1e-3, torch.float32: 0.1}
"""Root mean square below which a tensor counts as of this size: the gradients of a sequence of one token are zeros, up
to the rounding of the values they are differences of (6e-8 of 1 in float32, which must stay below EXACT).
"""


@dataclass(frozen=True)
class Case:
    """One call of packed attention."""

    heads: tuple[int, int, int, int]
    """H, K, D, E."""
    lengths: tuple[int, ...]
    window: int | None = None
    shared: int = 0
    """Tokens that all sequences have in common from their start; 0: nothing is shared."""
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"heads {self.heads} window {self.window} shared {self.shared} {str(self.dtype).removeprefix('torch.')}"


def cases(stage: Stage) -> list[Case]:
    """All that the trainer meets: shapes of Qwen3 and Qwen2.5, windows, shared prompts; float32; a key that is longer
    than a value."""
    heads = stage.pick([(16, 8, 128), (32, 8, 128), (64, 8, 128), (14, 2, 64)], [(4, 2, 8), (3, 1, 4)])
    lengths = stage.pick((1, 2, 3, 511, 32768), (1, 2, 3, 17, 40))
    joint = stage.pick((900, 1500, 4096, 16384), (9, 15, 40))
    made = []
    for h, k, d in heads:
        for window in (None, 7, stage.pick(4096, 16)):
            made += [Case((h, k, d, d), lengths, window), Case((h, k, d, d), joint, window, shared=stage.pick(600, 6))]
    h, k, d = heads[0]
    made.append(Case((h, k, d, d), stage.pick((1, 511, 4096), (1, 17, 40)), dtype=torch.float32))
    made.append(Case(stage.pick((16, 16, 192, 128), (4, 4, 12, 8)), stage.pick((3, 511, 4096), (3, 17, 40))))
    # Wider than flash attention takes.
    made.append(Case(stage.pick((4, 2, 320, 320), (2, 1, 20, 20)), stage.pick((3, 511, 2048), (3, 17))))
    return made


def check_attention(found: Findings, folder: Path) -> None:
    """Compares every case; the worst relative norms are the figures."""
    stage = Stage.of(found, folder)
    worst: dict[str, tuple[float, str]] = {}
    for case in cases(stage):
        exact, gaps = case.dtype == torch.float32, dict[str, float]()
        with found.attempt(str(case)):
            gaps = compare(stage, case)
        for name, gap in gaps.items():
            bound = EXACT if exact else FORWARD if name == "out" else BACKWARD
            key = f"{name}{' float32' if exact else ''}"
            if gap >= worst.get(key, (-1.0, ""))[0]:
                worst[key] = gap, str(case)
                found.figure(f"worst {key}", f"{gap:.2e} ({case})")
            found.require(f"{name} of {case} is {gap:.2e} off", gap < bound)
    found.figure("float32 GQA, GiB beyond its inputs, a row of 4k", _float32_bytes(stage) / 2**30)


def compare(stage: Stage, case: Case) -> dict[str, float]:
    """The largest relative norm over the sequences, of the output and of the gradients."""
    (h, k, d, e), lengths, device = case.heads, case.lengths, stage.device
    prefixes = _prefixes(case, device)
    num_distinct = sum(lengths) if prefixes is None else prefixes.first_C.numel()
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, num_distinct, size, generator=generator, device=device).to(case.dtype).requires_grad_()
        for heads, size in ((h, d), (k, d), (k, e))
    )
    upstream = torch.randn(1, num_distinct, h, e, generator=generator, device=device).to(case.dtype)
    plan = plan_attention(lengths, _starts(lengths, device), case.dtype, prefixes=prefixes, head_size=max(d, e))
    out = packed_attention(torch.nn.Identity(), query, key, value, None, packed=plan, sliding_window=case.window)[0]
    gradients = torch.autograd.grad(out, (query, key, value), upstream)
    ours = {
        "out": out.detach()[0],
        **{f"d{name}": gradient[0].transpose(0, 1) for name, gradient in zip("qkv", gradients, strict=True)},
    }
    inputs = [tensor.detach()[0].transpose(0, 1).float() for tensor in (query, key, value)]
    if prefixes is None:
        return _worst_of_sequences(case, ours, inputs, upstream[0].float())
    return _worst_shared(case, prefixes, ours, inputs, upstream[0].float())


def _worst_of_sequences(
    case: Case, ours: dict[str, torch.Tensor], inputs: Sequence[torch.Tensor], upstream: torch.Tensor
) -> dict[str, float]:
    worst = dict.fromkeys(ours, 0.0)
    start = 0
    for length in case.lengths:
        own = slice(start, start + length)
        start += length
        for group in _groups(case, length):
            query, key, value = (tensor[own, _heads(case, group, index)] for index, tensor in enumerate(inputs))
            exact = oracle(query, key, value, upstream[own, _heads(case, group, 0)], case.window)
            for index, (name, tensor) in zip((0, 0, 1, 1), ours.items(), strict=True):
                worst[name] = max(
                    worst[name], relative(tensor[own, _heads(case, group, index)], exact[name], _FLOOR[case.dtype])
                )
    return worst


def _worst_shared(
    case: Case,
    prefixes: SharedPrefixes,
    ours: dict[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    upstream: torch.Tensor,
) -> dict[str, float]:
    """The oracle attends over whole sequences; the output of a shared token counts where it is first, its gradients
    are sums over all sequences."""
    worst = dict.fromkeys(ours, 0.0)
    is_first_N = torch.zeros(prefixes.home_N.numel(), dtype=torch.bool, device=upstream.device)
    is_first_N[prefixes.first_C] = True
    for group in _groups(case, max(case.lengths)):
        query, key, value = (
            tensor[prefixes.home_N][:, _heads(case, group, index)] for index, tensor in enumerate(inputs)
        )
        above = upstream[prefixes.home_N][:, _heads(case, group, 0)] * is_first_N[:, None, None]
        parts, start = [], 0
        for length in case.lengths:
            own = slice(start, start + length)
            start += length
            parts.append(oracle(query[own], key[own], value[own], above[own], case.window))
        for index, (name, tensor) in zip((0, 0, 1, 1), ours.items(), strict=True):
            whole = torch.cat([part[name] for part in parts])
            mine = tensor[:, _heads(case, group, index)]
            exact = (
                whole[prefixes.first_C]
                if name == "out"
                else torch.zeros_like(mine, dtype=torch.float32).index_add_(0, prefixes.home_N, whole)
            )
            worst[name] = max(worst[name], relative(mine, exact, _FLOOR[case.dtype]))
    return worst


def oracle(
    query_LHD: torch.Tensor,
    key_LKD: torch.Tensor,
    value_LKE: torch.Tensor,
    upstream_LHE: torch.Tensor,
    window: int | None,
) -> dict[str, torch.Tensor]:
    """Output and gradients of causal attention of one sequence, float32, a block of queries at a time."""
    length, (num_heads, num_keys) = query_LHD.shape[0], (query_LHD.shape[1], key_LKD.shape[1])
    found = {
        "out": torch.empty_like(upstream_LHE),
        "dq": torch.empty_like(query_LHD),
        "dk": torch.zeros_like(key_LKD),
        "dv": torch.zeros_like(value_LKE),
    }
    for start in range(0, length, _BLOCK):
        queries = slice(start, min(start + _BLOCK, length))
        keys = slice(0 if window is None else max(0, start - window + 1), queries.stop)
        distance = torch.arange(queries.start, queries.stop, device=query_LHD.device)[:, None] - torch.arange(
            keys.start, keys.stop, device=query_LHD.device
        )
        mask = (distance >= 0) & (distance < (length if window is None else window))
        q, k, v = (
            tensor.transpose(0, 1).detach().requires_grad_()
            for tensor in (query_LHD[queries], key_LKD[keys], value_LKE[keys])
        )
        each_k, each_v = (tensor.repeat_interleave(num_heads // num_keys, 0)[None] for tensor in (k, v))
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(q[None], each_k, each_v, attn_mask=mask)[0]
        grads = torch.autograd.grad(out, (q, k, v), upstream_LHE[queries].transpose(0, 1))
        found["out"][queries], found["dq"][queries] = out.detach().transpose(0, 1), grads[0].transpose(0, 1)
        found["dk"][keys] += grads[1].transpose(0, 1)
        found["dv"][keys] += grads[2].transpose(0, 1)
    return found


def _groups(case: Case, length: int) -> list[int]:
    """Key heads that are compared, each with its query heads."""
    num_keys = case.heads[1]
    return list(range(num_keys)) if length <= _WHOLE else sorted({0, num_keys - 1})


def _heads(case: Case, group: int, index: int) -> slice:
    """Returns, of the queries (index 0) or of keys and values, those of one key head."""
    size = case.heads[0] // case.heads[1] if index == 0 else 1
    return slice(group * size, (group + 1) * size)


def _prefixes(case: Case, device: torch.device) -> SharedPrefixes | None:
    if not case.shared:
        return None
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, case.shared, dtype=np.int32)
    prefixes = find_prefixes(
        [
            np.concatenate([prompt, rng.integers(0, 1000, length - case.shared, dtype=np.int32)])
            for length in case.lengths
        ],
        device,
    )
    assert prefixes is not None, "the sequences share too little"
    return prefixes


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


def _float32_bytes(stage: Stage) -> int:
    """Returns what attention in float32 over one row, with fewer key heads than query heads, takes forward and backward
    beside its inputs.
    """
    h, k, d, length = stage.pick((16, 8, 128, 4096), (4, 2, 8, 40))
    device = stage.device
    query, key, value = (torch.randn(1, heads, length, d, device=device, requires_grad=True) for heads in (h, k, k))
    wait_for(device)
    take_peak_bytes(device)
    before = take_peak_bytes(device)
    plan = plan_attention((length,), _starts((length,), device), torch.float32, head_size=d)
    out = packed_attention(torch.nn.Identity(), query, key, value, None, packed=plan)[0]
    torch.autograd.grad(out.sum(), (query, key, value))
    wait_for(device)
    return max(0, take_peak_bytes(device) - before)
