"""The layers of a model as torch.compile makes them: what lies between their matrix products and attention (norms,
rotations, activations, residuals) becomes few kernels, and less of it is kept for backward.

Attention stays as it is, so a layer is two graphs. All layers of a kind share them, whatever the number of tokens. They
are made in the first passes of each kind (with gradients or without, adapters on or off), which takes tens of seconds.
"""

import os

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

from rolecall.training.model.packed_model import PackedModel, layers

MAX_COMPILERS = 8
"""Most processes of one rank that compile kernels beside each other."""


def compile_layers(model: PackedModel, num_ranks: int, *, deterministic: bool) -> None:
    """Has each layer's forward compiled at its first call, inside FSDP's hooks and inside what recomputes a layer. What
    cannot be compiled is computed as before, with a warning in the log.

    `num_ranks` share the cores that this process may use. `deterministic`: kernels are chosen without timing them.
    """
    torch._dynamo.config.suppress_errors = True
    torch._inductor.config.compile_threads = max(1, min(MAX_COMPILERS, len(os.sched_getaffinity(0)) // num_ranks))
    torch._inductor.config.deterministic = deterministic
    # Graphs are kept on the disk as pickles, in a folder that anybody may have made. The kernels' own files are not.
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)
