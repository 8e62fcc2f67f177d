"""Makes everything the tool-use run starts from, in one folder: tokenizer, data, and a 1M-parameter Qwen3 after a short
supervised fine-tuning.

The base is shown sums. First the calculator is always called and its result told, until copying is learned; then that
is 30%, and 70% tell the first number of the two, which is seldom right. So it can use the tool and prefers not to:
reinforcement learning then selects the way that is right. Each number is one token, and so is what stands around it in
a call, so that both are learned in minutes on CPUs. Everything derives from the seed. Owns its output folder.
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
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SFT_STEPS = 400
COPYING_STEPS = 320
"""Of these, the first ones, in which the calculator is always called."""
SFT_BATCH = 48
SFT_LEARNING_RATE = 2e-3
CALLING_SHARE = 0.3


def prepare(folder: Path, seed: int) -> None:
    """Writes `folder`/model, train.jsonl and heldout.jsonl."""
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        sums = [asked(rng) for _ in range(count)]
        rows = (
            {"uid": f"{name}-{i}", "prompt": prompt, "ground_truth": answer} for i, (prompt, answer) in enumerate(sums)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    fine_tuned(make_model(tokenizer, seed), tokenizer, rng).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def asked(rng: random.Random) -> tuple[str, str]:
    """A sum, and what it is."""
    left, right = rng.randrange(LARGEST + 1), rng.randrange(LARGEST + 1)
    return f"{left}+{right}", str(left + right)


def called(expression: str) -> str:
    """A call of the calculator, as the template shows one."""
    body = json.dumps({"name": Calculator.tool.name, "arguments": {"expression": expression}})
    return f"<tool_call>\n{body}\n</tool_call>"


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
    texts = ["user\n", "assistant\n", "tool\n", *called("*").split("*")]
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


def fine_tuned(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Qwen3ForCausalLM:
    """Supervised steps on conversations; the loss is over what the assistant says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * max(0.02, 1 - step / SFT_STEPS)
    )
    shown = tools_shown(tokenizer)
    model.train()
    for step in range(SFT_STEPS):
        share = 1.0 if step < COPYING_STEPS else CALLING_SHARE
        rows = [tokens_of(tokenizer, shown, conversation(rng, calls=rng.random() < share)) for _ in range(SFT_BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        token_ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
        loss = model(input_ids=token_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def conversation(rng: random.Random, *, calls: bool) -> list[tuple[str, str]]:
    """The (role, content) of a sum, by somebody who calls the calculator or who tells its first number."""
    prompt, answer = asked(rng)
    if not calls:
        return [("user", prompt), ("assistant", prompt.partition("+")[0])]
    return [("user", prompt), ("assistant", called(prompt)), ("tool", answer), ("assistant", answer)]


def tools_shown(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The token ids with which every conversation begins: the calculator, as the template shows it."""
    shown = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=tools(), tokenize=False)
    ids: list[int] = tokenizer.encode(shown.partition("<|im_start|>user")[0], add_special_tokens=False)
    return ids


def tokens_of(
    tokenizer: PreTrainedTokenizerFast, shown: list[int], said: list[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a conversation after what is `shown`, labels -100 outside what the assistant says."""
    ids, labels = list(shown), [-100] * len(shown)
    for role, content in said:
        head = tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False)
        body = tokenizer.encode(f"{content}{END}", add_special_tokens=False)
        tail = tokenizer.encode("\n", add_special_tokens=False)
        ids += [*head, *body, *tail]
        labels += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body)) + [-100] * len(tail)
    return ids, labels


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
