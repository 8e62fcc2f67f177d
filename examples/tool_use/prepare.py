"""Makes everything the tool-use run starts from, in one folder: tokenizer, data, conversations for `rolecall sft`, and
an untrained Qwen3 of 1M parameters.

The conversations are sums. First the calculator is always called and its result told, until copying is learned; then
that is 30%, and 70% tell the first number of the two, which is seldom right. So what was fine-tuned on them can use the
tool and prefers not to: reinforcement learning then selects the way that is right. Each number is one token, and so is
what stands around it in a call, so that both are learned in minutes on CPUs. Everything derives from the seed. Owns its
output folder.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rolecall.environment.tools.calculator import Calculator

NUM_TRAIN = 2048
NUM_HELDOUT = 200
LARGEST = 99
"""Of the numbers that are added."""
NUM_NUMBERS = 2 * LARGEST + 1
VOCAB_SIZE = 1000
"""More than the texts of the template have pieces: each becomes as few tokens as it can."""
END = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END]
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ ('\n' if message.content else '') + '<tool_call>\n' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUM_CONVERSATIONS = 19200
NUM_COPYING = 15360
"""Of these, the first ones, in which the calculator is always called."""
CALLING_SHARE = 0.3
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "*"}}\n</tool_call>'
"""A call of the calculator, as the template shows one."""


def prepare(folder: Path, seed: int) -> None:
    """Writes `folder`/base, sft.jsonl, train.jsonl and heldout.jsonl."""
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        sums = [asked(rng) for _ in range(count)]
        rows = (
            {"uid": f"{name}-{i}", "prompt": prompt, "ground_truth": answer} for i, (prompt, answer) in enumerate(sums)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = (conversation(rng, calls=i < NUM_COPYING or rng.random() < CALLING_SHARE) for i in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(json.dumps({"messages": each, "tools": tools()}) + "\n" for each in said))
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


def asked(rng: random.Random) -> tuple[str, str]:
    """A sum, and what it is."""
    left, right = rng.randrange(LARGEST + 1), rng.randrange(LARGEST + 1)
    return f"{left}+{right}", str(left + right)


def tools() -> list[dict[str, object]]:
    """The calculator, as chat templates are given it."""
    tool = Calculator.tool
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return [{"type": "function", "function": function}]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with every number that a sum may hold, and every text around them, a token or few."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("+", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["user\n", "assistant\n", "tool\n", *CALL.split("*")]
    bpe.train_from_iterator(["system\n" + json.dumps(tools()), *3 * texts] * 10, trainer)
    bpe.add_tokens([str(number) for number in range(NUM_NUMBERS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=SPECIAL_TOKENS[0], chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 1M random parameters, float32. Its tied embeddings make copying a token of one kind copying any."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=496,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def conversation(rng: random.Random, *, calls: bool) -> list[dict[str, object]]:
    """The messages of a sum, by somebody who calls the calculator or who tells its first number."""
    prompt, answer = asked(rng)
    question: dict[str, object] = {"role": "user", "content": prompt}
    if not calls:
        return [question, {"role": "assistant", "content": prompt.partition("+")[0]}]
    function = {"name": Calculator.tool.name, "arguments": json.dumps({"expression": prompt})}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer, "tool_call_id": call["id"]},
        {"role": "assistant", "content": answer},
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
