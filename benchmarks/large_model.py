"""Writes a random Qwen3 of about 74M float32 parameters for publishing, with the tokenizer of another model. See
README.md.

Its answers mean nothing; what counts is that its weights fill many buckets.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM


def write(folder: Path, tokenizer_of: Path) -> None:
    """Makes `folder`, a Hugging Face model directory, with the tokenizer in `tokenizer_of`."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2560,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer-of", type=Path, required=True)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.tokenizer_of)


if __name__ == "__main__":
    main()
