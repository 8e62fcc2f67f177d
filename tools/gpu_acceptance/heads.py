"""Check 4: logprobs and entropy of a vocabulary of 152k against float32 log_softmax by slices of tokens; their time and
memory.

Shapes as in rolecall/training/model/logits/logprobs.py: M scored tokens, K targets of each, H hidden size, V
vocabulary; m tokens of a slice.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from rolecall.training.model.logits.logprobs import KERNEL_BLOCK_ELEMENTS, logprobs_and_entropy
from rolecall.training.ranks.device import free_cached_memory, take_peak_bytes, wait_for
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage, relative

FORWARD, BACKWARD = 5e-3, 2e-2
"""Largest relative norms of outputs and of gradients."""
EXACT = 1e-4
"""The tolerance of outputs where logits are float32."""
_SLICE = 512
"""Tokens of one slice of the oracle."""
_COMPARED = 4
"""Slices that are compared of many tokens; the weight's gradient, which needs all of them, is compared where they are
all."""
_ROUNDS = 3
_OVERHEAD = 1.3
"""Longest time of the head, in that of the products it makes; of many tokens, whose products fill the device."""


@dataclass(frozen=True)
class Case:
    """One call of the head that is checked."""

    num_tokens: int
    hidden: int
    entropy: bool
    num_targets: int
    float32: bool = False
    """Whether logits are float32, of products that are not rounded."""

    def __str__(self) -> str:
        more = f"{' entropy' if self.entropy else ''}{' float32 logits' if self.float32 else ''}"
        return f"M {self.num_tokens} H {self.hidden} K {self.num_targets}{more}"


def check_logprobs(found: Findings, folder: Path) -> None:
    """Every size with and without entropy, of one target and of nine."""
    stage = Stage.of(found, folder)
    vocab = stage.pick(151_936, 331)
    worst: dict[str, float] = {}
    for hidden in stage.pick((1024, 2560, 5120), (16, 24)):
        for num_tokens in stage.pick((512, 8192, 32768), (5, 40)):
            for entropy, num_targets, float32 in (
                (True, 9, False),
                (False, 1, False),
                (True, 1, False),
                (True, 1, True),
            ):
                case = Case(num_tokens, hidden, entropy, num_targets, float32)
                with found.attempt(str(case)):
                    gaps = _measure(stage, case, vocab, compared=num_targets == 9 or not entropy or float32)
                    for name, gap in gaps.items():
                        key = f"{name}{' of float32 logits' if float32 else ''}"
                        worst[key] = max(gap, worst.get(key, 0.0))
                free_cached_memory(stage.device)
    for name, gap in worst.items():
        outputs = name.startswith(("logprobs", "entropy"))
        found.at_most(f"{name}, relative", gap, (EXACT if "float32" in name else FORWARD) if outputs else BACKWARD)


@dataclass(frozen=True)
class Inputs:
    """The tensors that a call gets, and what comes from above in its backward pass."""

    hidden_MH: torch.Tensor
    weight_VH: torch.Tensor
    targets_MK: torch.Tensor
    temperature_M: torch.Tensor
    above_MK: torch.Tensor
    above_entropy_M: torch.Tensor


def _measure(stage: Stage, case: Case, vocab: int, compared: bool) -> dict[str, float]:
    inputs = _draw(stage, case, vocab)
    results: dict[str, torch.Tensor] = {}

    def both() -> None:
        logprobs, entropy_M = logprobs_and_entropy(
            inputs.hidden_MH,
            inputs.weight_VH,
            inputs.targets_MK,
            inputs.temperature_M,
            entropy=case.entropy,
            float32_logits=case.float32,
        )
        asked = 2 if case.entropy else 1  # as the trainer does: nothing comes back through what was not asked for
        outputs, above = [logprobs, entropy_M][:asked], [inputs.above_MK, inputs.above_entropy_M][:asked]
        dhidden, dweight = torch.autograd.grad(outputs, (inputs.hidden_MH, inputs.weight_VH), above)
        results.update(logprobs=logprobs.detach(), entropy=entropy_M.detach(), dhidden=dhidden, dweight=dweight)

    both()
    gaps = _compare(case, inputs, results) if compared else {}
    results.clear()
    wait_for(stage.device)
    take_peak_bytes(stage.device)
    before = take_peak_bytes(stage.device)
    both()
    wait_for(stage.device)
    extra = take_peak_bytes(stage.device) - before
    results.clear()
    seconds = median(stage.seconds(both) for _ in range(_ROUNDS))
    bound = 2 * vocab * case.hidden + 10 * case.num_tokens * case.hidden + 600e6
    # Three products, and the logits again as far as the weight's gradient had no room to keep them.
    kept = 0.0 if case.float32 else min(1.0, case.hidden / case.num_tokens)
    overhead = seconds / (_product_s(stage, inputs) * (4.0 - kept) / 3.0)
    stage.found.figure(
        str(case),
        f"{1e6 * seconds / case.num_tokens:.2f} us/token, {overhead:.2f} of its products, {extra / 1e9:.2f} GB extra",
    )
    if case.num_tokens >= 8192 and not case.float32:
        stage.found.require(f"{case} takes {overhead:.2f} of its products", overhead <= _OVERHEAD, on_device=True)
    stage.found.require(
        f"{case} takes {extra / 1e9:.2f} GB, more than {bound / 1e9:.2f}", extra <= bound, on_device=True
    )
    return gaps


def _draw(stage: Stage, case: Case, vocab: int) -> Inputs:
    device, generator = stage.device, torch.Generator(stage.device).manual_seed(0)
    hidden = torch.randn(case.num_tokens, case.hidden, generator=generator, device=device)
    weight = torch.randn(vocab, case.hidden, generator=generator, device=device)
    weight *= 2.0 / case.hidden**0.5  # logits of standard deviation 2
    shape = (case.num_tokens, case.num_targets) if case.num_targets > 1 else (case.num_tokens,)
    return Inputs(
        hidden.bfloat16().requires_grad_(),
        weight.bfloat16().requires_grad_(),
        torch.randint(vocab, shape, generator=generator, device=device),
        torch.rand(case.num_tokens, generator=generator, device=device) + 0.5,
        torch.randn(shape, generator=generator, device=device),
        torch.randn(case.num_tokens, generator=generator, device=device),
    )


def _compare(case: Case, inputs: Inputs, ours: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative norms over the compared slices together."""
    starts = list(range(0, case.num_tokens, _SLICE))
    whole = len(starts) <= 16
    if not whole:
        starts = starts[:: -(-len(starts) // _COMPARED)]
    weight_VH = inputs.weight_VH.detach().float().requires_grad_(whole)
    exact: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": [], "dhidden": []}
    mine: dict[str, list[torch.Tensor]] = {name: [] for name in exact}
    dweight_VH = torch.zeros_like(weight_VH, requires_grad=False) if whole else None
    for start in starts:
        own = slice(start, start + _SLICE)
        hidden_mH = inputs.hidden_MH[own].detach().float().requires_grad_()
        log_p_mV = ((hidden_mH @ weight_VH.T) / inputs.temperature_M[own, None]).log_softmax(-1)
        targets = inputs.targets_MK[own] if case.num_targets > 1 else inputs.targets_MK[own, None]
        logprobs_mK = log_p_mV.gather(1, targets)
        entropy_m = -(log_p_mV.exp() * log_p_mV).sum(-1)
        above = inputs.above_MK[own].reshape(logprobs_mK.shape)
        loss = (logprobs_mK * above).sum() + (entropy_m * inputs.above_entropy_M[own]).sum() * float(case.entropy)
        gradients = torch.autograd.grad(loss, (hidden_mH, weight_VH) if whole else (hidden_mH,))
        if dweight_VH is not None:
            dweight_VH += gradients[1]
        rows = {
            "logprobs": logprobs_mK.detach().view(inputs.targets_MK[own].shape),
            "entropy": entropy_m.detach(),
            "dhidden": gradients[0],
        }
        for name, tensor in rows.items():
            if name != "entropy" or case.entropy:
                exact[name].append(tensor)
                mine[name].append(ours[name][own])
    gaps = {name: relative(torch.cat(mine[name]), torch.cat(parts)) for name, parts in exact.items() if parts}
    if dweight_VH is not None:
        gaps["dweight"] = relative(ours["dweight"], dweight_VH)
    return gaps


def _product_s(stage: Stage, inputs: Inputs) -> float:
    """Seconds of the three matrix products that a forward and a backward pass cannot do without, at the speed of
    blocks of the vocabulary."""
    hidden_MH, weight_VH = inputs.hidden_MH.detach(), inputs.weight_VH.detach()
    rows = min(max(1, KERNEL_BLOCK_ELEMENTS // len(hidden_MH)), len(weight_VH))
    block_BH = weight_VH[:rows]

    def products() -> None:
        logits_MB = hidden_MH @ block_BH.T
        _ = logits_MB @ block_BH
        _ = logits_MB.T @ hidden_MH

    products()
    return median(stage.seconds(products) for _ in range(_ROUNDS)) * len(weight_VH) / rows
