"""Makes everything the guess-number run starts from, in one folder: tokenizer, data, and a 1M-parameter Qwen3 after a
short supervised fine-tuning.

The base is shown games of two players: 30% halve what is left, and always win; 70% count down from 9, and win four
times in ten. So it can play well and prefers not to: reinforcement learning then selects the way that wins. Everything
derives from the seed. Owns its output folder; knows nothing of RoleCall.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from game import MAX_GUESSES, hint  # type: ignore[import-not-found]  # beside this file
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

NUM_TRAIN = 2048
NUM_HELDOUT = 200
VOCAB_SIZE = 300
END = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RULES = "a number from 0 to 9"
SFT_STEPS = 200
SFT_BATCH = 48
SFT_LEARNING_RATE = 3e-3
HALVING_SHARE = 0.3


def prepare(folder: Path, seed: int) -> None:
    """Writes `folder`/model, train.jsonl and heldout.jsonl."""
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        rows = ({"uid": f"{name}-{i}", "prompt": RULES, "ground_truth": str(i % 10)} for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    fine_tuned(make_model(tokenizer, seed), tokenizer, rng).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 ids with every digit a token of its own, and the ChatML template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user\nmore", "user\nless", "user\nguess", "assistant\n", f"user\n{RULES}"] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=SPECIAL_TOKENS[0], chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 1M random parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=496,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=160,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def fine_tuned(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Qwen3ForCausalLM:
    """Supervised steps on games; the loss is over the guesses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, SFT_STEPS)
    model.train()
    for _ in track(range(SFT_STEPS), "fine-tuning"):
        rows = [tokens_of(tokenizer, game(rng, halves=rng.random() < HALVING_SHARE)) for _ in range(SFT_BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        token_ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
        loss = model(input_ids=token_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    return model.eval()


def game(rng: random.Random, *, halves: bool) -> list[tuple[str, str]]:
    """The (role, content) of a game after its rules, by a player who halves what is left or one who counts down."""
    secret, low, high = rng.randrange(10), 0, 9
    said = [("user", "guess")]
    for _ in range(MAX_GUESSES):
        guess = (low + high) // 2 if halves else high
        said.append(("assistant", str(guess)))
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        said.append(("user", hint(str(guess), secret)))
    return said


def tokens_of(tokenizer: PreTrainedTokenizerFast, said: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a game, labels -100 outside the guesses."""
    ids: list[int] = []
    labels: list[int] = []
    for role, content in [("user", RULES), *said]:
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
