"""The probe's bound in bfloat16 on real models whose logits spread as trained ones do (standard deviation 4), on CPUs.

The actor is the trainer's engine. The rollout is transformers with layers that round where vLLM's fused ones do: the
residual is added, normalised and scaled in float32, and the activation is multiplied before it is rounded.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import pack, unpack
from rolecall.v1 import actor_pb2, rollout_pb2, weights_pb2
from rolecall.wire import Array, encode_tensor
from services.controller.publish.probe import difference
from tests.tiny_models import write_qwen3

OLD_BOUND = 0.05
"""What the mean difference had to stay below before the bound was derived from noise."""
VOCABULARY = 1024
STD = 4.0
NUM_TOKENS = 128

pytestmark = pytest.mark.usefixtures("one_rank")


class FusedNorm(Qwen3RMSNorm):  # type: ignore[misc]  # transformers is not type-checked
    """Rounds once, after the scale."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden = hidden_states.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        scaled: torch.Tensor = hidden * self.weight.float()
        return scaled.to(hidden_states.dtype)


class FusedMlp(Qwen3MLP):  # type: ignore[misc]
    """Rounds once, after the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.nn.functional.silu(self.gate_proj(x).float()) * self.up_proj(x).float()
        output: torch.Tensor = self.down_proj(product.to(x.dtype))
        return output


def fuse(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """`model` as another engine computes it."""
    others: dict[type[Any], type[Any]] = {Qwen3RMSNorm: FusedNorm, Qwen3MLP: FusedMlp}
    for module in model.modules():
        if type(module) in others:
            module.__class__ = others[type(module)]
    return model


class Ends:
    """An actor and a rollout of one model."""

    def __init__(self, path: Path) -> None:
        self._ids = np.random.default_rng(1).integers(3, VOCABULARY, NUM_TOKENS, dtype=np.int32)
        device = torch.device("cpu")
        engine = FsdpEngine(EngineOptions(path=path, head="policy", dtype="bfloat16", optimizer=None), device=device)
        row: dict[str, Array] = {"token_ids": self._ids, "response_mask": np.ones(NUM_TOKENS, np.uint8)}
        microbatch = pack([row], (), temperature=1.0, device=device)
        self.passes = []
        for plain in (False, True):
            (outputs,) = engine.forward([microbatch], plain=plain)
            assert isinstance(outputs, TokenOutputs)
            self.passes += unpack(outputs.logprobs_N, microbatch.lengths)
        self.model = fuse(
            Qwen3ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        )

    @torch.no_grad()
    def rollout(self) -> Array:
        """float32 [T], of the rollout as its model is now."""
        ids = torch.from_numpy(self._ids.astype(np.int64))
        logprobs = torch.log_softmax(self.model(ids[None]).logits[0].float(), -1)[:-1].gather(1, ids[1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), logprobs.numpy()])

    def verdict(self) -> str | None:
        """What the controller says of the rollout as its model is now."""
        ours, again = (encode_tensor(said) for said in self.passes)
        sent = actor_pb2.PublishWeightsResponse(digest="d", probe=weights_pb2.Probe(logprobs=ours, again=again))
        nothing = encode_tensor(np.zeros(0, np.float32))
        probe = weights_pb2.Probe(
            logprobs=encode_tensor(self.rollout()), decoded_logprobs=nothing, prefilled_logprobs=nothing
        )
        return difference(
            sent, rollout_pb2.ReceiveWeightsResponse(digest="d", probe=probe), exact=False, tolerance=None
        )


def with_spread_logits(path: Path) -> None:
    """Scales the head of the model at `path`."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(3, 259)[None]).logits
        model.lm_head.weight.mul_(STD / logits.std())
    model.to(torch.bfloat16).save_pretrained(path)


@pytest.fixture(scope="module", params=[4, 24], ids=["4 layers", "24 layers"])
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    path = write_qwen3(
        tmp_path_factory.mktemp("model"), hidden=128, num_layers=request.param, vocab=VOCABULARY, dtype=torch.float32
    )
    with_spread_logits(path)
    return Ends(path)


def test_two_right_engines_are_told_apart_by_the_old_bound_and_not_by_the_actors_own_noise(ends: Ends) -> None:
    gap = np.abs(ends.passes[0] - ends.rollout())[1:]
    noise = np.abs(ends.passes[0] - ends.passes[1])[1:]
    assert gap.mean() > OLD_BOUND
    assert 0.3 < np.median(gap) / np.median(noise) < 3  # the actor's own noise is of the size of what it stands for
    assert ends.verdict() is None


@pytest.mark.parametrize("wrong", ["mlp.", "self_attn.", "mlp.down_proj."])
def test_a_layer_of_other_weights_and_one_stale_matrix_are_refused(ends: Ends, wrong: str) -> None:
    layer = ends.model.model.layers[1]
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(wrong) and parameter.dim() == 2:
                other = torch.randn(parameter.shape, generator=generator) * parameter.float().std()
                parameter.copy_(other.to(parameter.dtype))
    problem = ends.verdict()
    layer.load_state_dict(kept)
    assert "the engine computes with others" in (problem or "")
    assert ends.verdict() is None
