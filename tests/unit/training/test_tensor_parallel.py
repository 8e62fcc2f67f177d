"""What tensor parallelism needs of transformers, and what it adds to its plans."""

from typing import Any

import pytest
import torch
import transformers.distributed.tensor_parallel
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rolecall.errors import ConfigError
from rolecall.training.model.tensor_parallel import split_tensors, unnamed_partial


def small_model(kind: str = "qwen3", **more: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
    return model


def test_a_transformers_that_cannot_cut_experts_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    monkeypatch.delattr(transformers.distributed.tensor_parallel, "apply_expert_parallelism")  # as in 5.17
    with pytest.raises(
        ConfigError, match=rf"needs transformers 5\.19.*{transformers.__version__} is installed.*`trainer`"
    ):
        split_tensors(small_model(), mesh)


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("glm4_moe", {"use_qk_norm": True}, {"model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"}),
        ("apertus", {}, {"model.layers.*.mlp.act_fn"}),
        ("qwen3", {}, set()),  # named by the plan
        ("olmo2", {}, set()),  # of whole queries and keys
        ("llama", {}, set()),
    ],
)
def test_parameters_that_see_a_part_and_that_the_plan_forgets_are_found(
    kind: str, more: dict[str, Any], expected: set[str]
) -> None:
    model = small_model(kind, **more)
    assert unnamed_partial(model, model.tp_plan) == expected


def test_norms_with_parameters_for_each_head_are_refused() -> None:
    model = small_model("cohere", use_qk_norm=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with pytest.raises(
        ConfigError, match=r"for each head in model.layers.0.self_attn.q_norm.*set parallel.tensor to 1"
    ):
        unnamed_partial(model, model.tp_plan)
