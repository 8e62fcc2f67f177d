"""What tensor parallelism needs of transformers."""

import pytest
import torch
import transformers.distributed.tensor_parallel
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rolecall.errors import ConfigError
from rolecall.training.model.tensor_parallel import split_tensors


def small_model() -> PreTrainedModel:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**sizes))


def test_a_transformers_that_cannot_cut_experts_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    monkeypatch.delattr(transformers.distributed.tensor_parallel, "apply_expert_parallelism")  # as in 5.17
    with pytest.raises(
        ConfigError, match=rf"needs transformers 5\.19.*{transformers.__version__} is installed.*`trainer`"
    ):
        split_tensors(small_model(), mesh)
