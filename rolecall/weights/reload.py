"""A whole model into the running vLLM engine: its layerwise reload, the proof that every parameter was written, and the
repairs that the reload needs: on CPUs, for gpt-oss and for MiniMax-M2.

Like the receiver it runs in vLLM's worker. The adapter's counterpart is adapter.py.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, OAIAttention

from rolecall.errors import TornWeightsError
from rolecall.weights.coverage import Coverage
from rolecall.weights.transfer import Reception

logger = logging.getLogger(__name__)

_FUSED = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<part>(gate_up|down)_proj(_bias)?)")
"""Names of gpt-oss' tensors of all experts of a layer, the first dimension counting them."""
_SINKS = re.compile(r".*\.layers\.(?P<layer>\d+)\.self_attn\.sinks")


def load_model(model: torch.nn.Module, config: ModelConfig, device: torch.device, reception: Reception) -> list[str]:
    """Loads all of `reception` and returns the names that this worker left unread, as they have no place in its stage.
    Requests must be paused. TornWeightsError when a tensor was refused or a parameter not written whole.
    """
    tied = _tied_groups(model)
    _rebuild_moe_kernels(model, device)
    name_loaders(model)
    initialize_layerwise_reload(model)
    coverage = Coverage(
        (name, parameter, get_tensor_load_numel(parameter))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    failure: Exception | None = None
    sinks: dict[int, torch.Tensor] = {}
    whole = False
    try:
        for named in reception:
            sinks |= {
                int(found["layer"]): tensor.clone() for name, tensor in named if (found := _SINKS.fullmatch(name))
            }
            if failure is None:
                failure = _load_bucket(model, named, coverage)
        missing = coverage.missing_of_tied(tied)
        if failure is not None or missing:
            raise TornWeightsError(_why(failure, missing)) from failure
        whole = True
    finally:
        if not whole:
            _forget_loads(model)
        with _without_false_alarms():
            finalize_layerwise_reload(model, config)
    _repack_tied_heads(model, tied)
    _write_sinks(model, sinks)
    return coverage.unread()


def name_loaders(model: torch.nn.Module) -> None:
    """Repair 5: the reload asks each loader for its name, which the partial functions of MiniMax-M2's norms lack."""
    for parameter in model.parameters():
        loader = vars(parameter).get("weight_loader")
        if isinstance(loader, partial):
            vars(loader)["__name__"] = "partial"


def _load_bucket(model: torch.nn.Module, named: list[tuple[str, torch.Tensor]], coverage: Coverage) -> Exception | None:
    """Loads one bucket; what vLLM's loaders raise (any type) is returned, so that the remaining buckets are taken off
    the channel and no peer has to wait for this worker.
    """
    given = _one_by_one(named) if isinstance(model, GptOssForCausalLM) else named
    try:
        with coverage.watch(named):
            model.load_weights(given)  # type: ignore[operator]  # every model of vLLM has it
    except Exception as error:  # an edge: vLLM's loaders raise whatever they like
        logger.exception("loading %s .. %s failed", named[0][0], named[-1][0])
        return error
    return None


def _tied_groups(model: torch.nn.Module) -> list[list[str]]:
    """Names of one and the same parameter, for each that has several."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _why(failure: Exception | None, missing: dict[str, tuple[int, int]]) -> str:
    if failure is not None:
        return f"vLLM could not load a tensor: {type(failure).__name__}: {failure}"
    parts = [f"{name} got {written} of {expected} elements" for name, (written, expected) in list(missing.items())[:5]]
    more = f" and {len(missing) - 5} parameters more" if len(missing) > 5 else ""
    return f"the transfer did not cover the engine: {'; '.join(parts)}{more}; the model and the actor's export disagree"


@contextmanager
def _without_false_alarms() -> Iterator[None]:
    """Silences vLLM's warning of layers that nothing was loaded into: it means rotary tables and tied heads at every
    publish, and what is really missing was found by coverage.
    """

    def other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.msg

    reload_log = logging.getLogger(finalize_layerwise_reload.__module__)
    reload_log.addFilter(other)
    try:
        yield
    finally:
        reload_log.removeFilter(other)


def _forget_loads(model: torch.nn.Module) -> None:
    """Makes the reload fall back to the tensors that incomplete layers had, instead of building them out of memory that
    nobody wrote: the engine lives, and the next full load heals it.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def _rebuild_moe_kernels(model: torch.nn.Module, device: torch.device) -> None:
    """Repair 1, CPUs: an expert layer repacks its weights only while it builds its kernel, and would go on computing
    with the old packed copy.
    """
    if device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def _repack_tied_heads(model: torch.nn.Module, tied: list[list[str]]) -> None:
    """Repair 2, CPUs: a tied head shares the embedding's memory and yet computes with a packed copy of its own, which
    the reload of the embedding does not renew.
    """
    for name in (name for names in tied for name in names):
        module = model.get_submodule(name.rpartition(".")[0])
        if (
            isinstance(module, ParallelLMHead)
            and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
            and module.weight.device.type == "cpu"
        ):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _one_by_one(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Repair 3: vLLM's gpt-oss copies tensors of all experts straight into its parameters, which have no memory in a
    reload; of one expert each it loads as other mixtures do.
    """
    parts: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        fused = _FUSED.fullmatch(name)
        parts += (
            [(name, tensor)]
            if fused is None
            else [(f"{fused['layer']}.{index}.{fused['part']}", part) for index, part in enumerate(tensor)]
        )
    return parts


def _write_sinks(model: torch.nn.Module, sinks: dict[int, torch.Tensor]) -> None:
    """Repair 4: gpt-oss' sinks are copied in the same way, and attention may have a copy of its own in another dtype.
    Each worker has those of its heads, of its stage's layers.
    """
    for module in model.modules():
        if isinstance(module, OAIAttention):
            part = sinks[module.layer_idx].chunk(module.num_attention_heads // module.num_local_attention_heads)
            for kept in (module.sinks, module.attn.impl.sinks):
                kept.data.copy_(part[get_tensor_model_parallel_rank()])
