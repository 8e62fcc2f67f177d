"""Makes everything the sort-digits run starts from, in one folder: tokenizer, data, and a 1M-parameter Qwen3 after a
short supervised fine-tuning.

The base is fine-tuned on sorted digits, 30% ascending and 70% descending, so it can sort and prefers the wrong order:
reinforcement learning then *selects* an ordering that the base already knows. It is not a demonstration of learning to
sort. With --teacher a second model beside it, of other random weights, which was shown ascending answers only and
longer: what examples/distillation learns from. Everything derives from the seed. Owns its output folder; knows nothing
of RoleCall.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

NUM_DIGITS = 5
NUM_TRAIN = 4096
NUM_HELDOUT = 1000
VOCAB_SIZE = 288
END = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SFT_STEPS = 220
SFT_BATCH = 48
SFT_LEARNING_RATE = 3e-3
ASCENDING_SHARE = 0.3
TEACHER_STEPS = 300


def prepare(
    folder: Path,
    seed: int,
    *,
    num_steps: int = SFT_STEPS,
    teacher: bool = False,
    ascending_share: float = ASCENDING_SHARE,
) -> None:
    """Writes `folder`/model, warm after `num_steps`, train.jsonl, heldout.jsonl and perhaps teacher. Held-out prompts
    are in neither training set.
    """
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    numbers = distinct_numbers(rng, NUM_TRAIN + NUM_HELDOUT)
    train, heldout = numbers[:NUM_TRAIN], numbers[NUM_TRAIN:]
    write_prompts(folder / "train.jsonl", train)
    write_prompts(folder / "heldout.jsonl", heldout)
    tokenizer = make_tokenizer()
    models = {"model": fine_tuned(make_model(tokenizer, seed), tokenizer, train, rng, num_steps, ascending_share)}
    if teacher:
        models["teacher"] = fine_tuned(make_model(tokenizer, seed + 1), tokenizer, train, rng, TEACHER_STEPS, 1.0)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def distinct_numbers(rng: random.Random, count: int) -> list[str]:
    """`count` different strings of NUM_DIGITS different digits, none of them sorted either way already."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        number = "".join(rng.sample("0123456789", k=NUM_DIGITS))
        if list(number) not in (sorted(number), sorted(number, reverse=True)):
            drawn[number] = None
    return list(drawn)


def write_prompts(path: Path, numbers: list[str]) -> None:
    """JSONL in the fields that `data` of the configuration reads by default."""
    rows = ({"uid": number, "prompt": f"sort: {number}", "ground_truth": "".join(sorted(number))} for number in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 288 ids with every digit a token of its own, and the ChatML template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(
        [
            *["user\nsort: ", "assistant\n", "system\n"] * 10,
            "ascending order, smallest first; descending order, largest first",
        ],
        trainer,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=SPECIAL_TOKENS[0], chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 1.03M random parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=496,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def fine_tuned(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    numbers: list[str],
    rng: random.Random,
    num_steps: int,
    ascending_share: float,
) -> Qwen3ForCausalLM:
    """Supervised steps on answers of which `ascending_share` are ascending, the others descending; the loss is over the
    answer's tokens.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / num_steps)) / 2
    )
    model.train()
    columns = (
        TextColumn("fine-tuning"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps  loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=num_steps, loss="-")
        for token_ids, labels in batches(tokenizer, numbers, rng, num_steps, ascending_share):
            loss = model(input_ids=token_ids, labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            bar.update(task, advance=1, loss=f"{loss.item():.3f}")
    return model.eval()


def batches(
    tokenizer: PreTrainedTokenizerFast, numbers: list[str], rng: random.Random, num_steps: int, ascending_share: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`num_steps` pairs (token ids, labels), int64 [B, T]; every sequence is equally long, labels are -100 on the
    prompt.
    """
    for step in range(num_steps):
        rows, masked = [], []
        # The share is met by every batch, not only on average, so that bases of different seeds are alike.
        num_ascending = round((step + 1) * SFT_BATCH * ascending_share) - round(step * SFT_BATCH * ascending_share)
        for index, number in enumerate(rng.choices(numbers, k=SFT_BATCH)):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"sort: {number}"}], add_generation_prompt=True, tokenize=False
            )
            answer = "".join(sorted(number, reverse=index >= num_ascending)) + END
            prompt_ids, answer_ids = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
            rows.append(prompt_ids + answer_ids)
            masked.append([-100] * len(prompt_ids) + answer_ids)
        yield torch.tensor(rows), torch.tensor(masked)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--teacher", action="store_true", help="also make the model that examples/distillation learns from"
    )
    parser.add_argument("--once", action="store_true", help="do nothing where it was all made before")
    arguments = parser.parse_args()
    made = arguments.folder / "made"
    if not (arguments.once and made.exists()):
        prepare(arguments.folder, arguments.seed, teacher=arguments.teacher)
        made.touch()


if __name__ == "__main__":
    main()
