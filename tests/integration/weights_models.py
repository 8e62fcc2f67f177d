"""Tiny random models on disk for the weight-channel tests, and what Hugging Face says of them. No downloads, no
tokenizer.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_SHARED = {
    "vocab_size": 150,  # not a multiple of vLLM's padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "initializer_range": 0.2,
    "dtype": "float32",
}


def make_model(kind: str, seed: int) -> PreTrainedModel:
    """A random model: "dense", "tied" or "moe". Equal seeds give equal weights."""
    torch.manual_seed(seed)
    if kind == "moe":
        config = Qwen3MoeConfig(
            **_SHARED,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
        model: PreTrainedModel = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_SHARED, tie_word_embeddings=kind == "tied"))
    return model.float().eval()


def named_weights(model: PreTrainedModel, directory: Path) -> list[tuple[str, torch.Tensor]]:
    """The model's checkpoint as it would be published: (name, tensor), tied tensors once, experts one by one."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return sorted(load_file(directory / "model.safetensors").items())


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens after `prompt` and their logprobs, by recomputing the whole sequence for each."""
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), dim=-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs
