"""The layers of a model as torch.compile makes them: what lies between their matrix products and attention (norms,
rotations, activations, residuals) becomes few kernels, and less of it is kept for backward.

    compile_layers(model)
    with compiling():
        ...                       # a pass, forward or backward, which compiles what is not yet

Attention stays as it is, so a layer is two graphs. All layers of one kind share them, whatever the number of tokens.
They are made in the first passes of each kind (with gradients or without, adapters on or off), which takes tens of
seconds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

from rolecall.training.model.lora import expert_adapters
from rolecall.training.model.packed_model import PackedModel, language_layers

MAX_COMPILERS = 8
"""Most processes of one rank that compile kernels beside each other."""
MAX_GRAPHS = 32
"""Most graphs of one piece of a layer, by kinds of layers and of passes: of Gemma 4, 12; torch's own bound is 8. Beyond
it layers are computed as before, and one of which forward had a graph ends in an error where backward has none.
"""


def compile_layers(model: PackedModel) -> None:
    """Has each layer's forward compiled at its first call, inside FSDP's hooks and inside what recomputes a layer. A
    vision tower's stay as they are, and so do experts with adapters, for which peft makes a class in every pass.
    """
    for adapter in expert_adapters(model):
        adapter.forward = torch.compiler.disable(adapter.forward)  # type: ignore[no-untyped-call]
    for layer in language_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


@contextmanager
def compiling() -> Iterator[None]:
    """Rules for what is compiled inside. What cannot be is computed as before, with a warning in the log. No graph is
    kept on the disk: torch would pickle it.

    Around every pass, because torch keeps its configuration by thread and context: set once, it is lost to others.
    """
    compilers = min(MAX_COMPILERS, len(os.sched_getaffinity(0)))
    with (
        # Else a layer's numbers (an adapter's scale) are tensors on the host, computed by kernels in C++.
        torch._dynamo.config.patch(suppress_errors=True, specialize_float=True, recompile_limit=MAX_GRAPHS),
        torch._inductor.config.patch(compile_threads=compilers, fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
