"""The conditions for training a model packed, with logprobs computed from its head alone: refusals on the meta device,
before a weight is read.

What JSON tells is rolecall/data/model/trainable.py's; that every layer attends by the attention interface is seen by
the trace of flops.py.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

from rolecall.data.model.files import ATTENTION_LAYERS
from rolecall.errors import ConfigError
from rolecall.training.model.recurrent import recurrent_layers

_PLAIN = frozenset(
    {
        "mm",
        "t",
        "transpose",
        "view",
        "_unsafe_view",
        "reshape",
        "slice",
        "select",
        "alias",
        "expand",
        "unsqueeze",
        "squeeze",
        "clone",
        "_to_copy",
    }
)
"""What stands between a plain model's last hidden states and its logits: products with matrices, and other views of the
same numbers.
"""
_PRODUCT = "mm"
_CAPS = ("tanh", "tanh_")
"""What may stand there once, behind the product."""
_SCALING = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
"""What may stand there, too, with a constant: the power of it that becomes a factor of the logits."""


def without_dropout(config: PretrainedConfig) -> None:
    """Sets every dropout of `config` to 0, and a router's jitter: a policy whose logprobs are drawn anew in each pass
    cannot be told from one that has changed. ConfigError where no setting ends that.
    """
    if config.model_type == "phimoe":
        raise ConfigError("a phimoe model draws its experts at random while it trains; use another model")
    within = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    for part in {id(part): part for part in (config, config.get_text_config(), *within)}.values():
        for name, value in part.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "_drop", "_jitter_noise"))):
                setattr(part, name, 0.0)
            elif name == "moe_jitter_eps":
                setattr(part, name, None)


def check_head(hf: PreTrainedModel) -> tuple[float, float | None]:
    """(scale, cap) of the logits that `hf`, on the meta device, makes of its output layer's products x: scale * x, and
    with a cap scale * cap * tanh(x / cap). ConfigError when it does something else.
    """
    head, name = hf.get_output_embeddings(), type(hf).__name__
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"{name} has no linear output layer over the vocabulary; use a causal language model")
    check_stateless(hf)
    if "bias" in dict(head.named_parameters()):
        raise ConfigError(
            f"{name} has a bias in its output layer, which logprobs do not support; use a model without one"
        )
    recorder = _recorded(hf, head.in_features)
    extra = sorted(set(recorder.names) - _PLAIN)
    if extra:
        raise ConfigError(
            f"{name} does more to its logits than its output layer, a constant factor and a soft cap "
            f"({', '.join(extra)}), which logprobs do not support; use a model without it"
        )
    scale = recorder.inner * recorder.outer
    return scale, 1 / recorder.inner if recorder.is_capped else None


def check_stateless(hf: PreTrainedModel) -> None:
    """Raises ConfigError when `hf` hands a state from token to token in layers that are not known to do so."""
    kinds = hf.config.get_text_config().to_dict().get("layer_types")
    attends = bool(kinds) and set(kinds) <= ATTENTION_LAYERS
    if hf._is_stateful and not attends and not recurrent_layers(hf):
        raise ConfigError(
            f"{type(hf).__name__} keeps a state from token to token, which packed sequences would hand on to each "
            "other; use a model with attention, or with gated delta rules, in every layer"
        )


class _Hidden:
    """A stand-in for a backbone's answer: hidden states, and None for whatever else a causal model passes on."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes operations: the products with constants, of what goes into a soft cap and of what comes out of it, and the
    others' names.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.inner = self.outer = 1.0
        self.is_capped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _SCALING and isinstance(args[1], int | float):
            factor = args[1] ** _SCALING[name]
            if self.is_capped:
                self.outer *= factor
            else:
                self.inner *= factor
        elif name in _CAPS and _PRODUCT in self.names and not self.is_capped:
            self.is_capped = True
        else:
            # a product of capped numbers is another function
            self.names.append(f"{name} after tanh" if self.is_capped and name == _PRODUCT else name)
        return func(*args, **(kwargs or {}))


def _recorded(hf: PreTrainedModel, hidden_size: int) -> _Recorder:
    """The operations by which the causal model makes logits of its backbone's output."""
    token_ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    hidden = _Hidden(torch.empty(1, 3, hidden_size, dtype=hf.dtype, device="meta"))
    backbone, recorder = hf.base_model, _Recorder()
    backbone.forward = lambda *_, **__: hidden
    try:
        with torch.no_grad(), recorder:
            hf(input_ids=token_ids, use_cache=False)
    finally:
        del backbone.forward
    return recorder
