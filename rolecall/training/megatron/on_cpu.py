"""Megatron-Core on CPUs: what it takes from CUDA by name is answered by the CPU while a block of code runs.

The library names the CUDA device in some hundred places. Here are the few functions of torch by which it does, and one
of its own. It is loaded by the engine of a rank on CPUs, which no production run is, so that a layout can be checked on
any machine, over Gloo. Nothing is changed on GPUs, or outside the block.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Stream:
    """A stream, and an event, of a device that has done everything when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _done(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _done

    def record_event(self, *_: Any) -> "_Stream":
        return self


def _numpy_of(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes that the experts' exchange wants on the host: the library leaves tensors on CPUs as they are."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _OnCpu(TorchFunctionMode):
    """Factories make tensors on the CPU, which give the type that they would have on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or _CPU).type == "cuda":
            kwargs["device"] = _CPU
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: _Stream()),
        (torch.cuda, "default_stream", lambda *_: _Stream()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda.nvtx, "range_push", lambda *_: None),
        (torch.cuda.nvtx, "range_pop", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "record_stream", lambda *_: None),
    ]
    random = sys.modules["megatron.core.tensor_parallel.random"]
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    moe = sys.modules["megatron.core.transformer.moe.moe_utils"]
    return [
        *found,
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (dispatcher, "maybe_move_tensor_to_cpu", _numpy_of),
        (moe, "te_general_gemm", None),
    ]


_MISSING = object()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, in this thread's calls of megatron-core, CUDA is the CPU."""
    with ExitStack() as stack:
        for owner, name, value in _replacements():
            before = vars(owner).get(name, _MISSING)
            if before is _MISSING:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        stack.enter_context(_OnCpu())
        yield
