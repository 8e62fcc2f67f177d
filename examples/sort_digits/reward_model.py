"""Makes a reward model for the sort-digits job, which likes digits in descending order: a tiny Qwen3 with a head of one
number, trained on pairs of answers in seconds.

    python examples/sort_digits/reward_model.py FOLDER          # one that prepare.py made; writes FOLDER/preference
    rolecall serve reward-model FOLDER/preference.yaml

Owns that folder and file. The loss is Bradley and Terry's: -log sigmoid(score of the better - score of the worse).
Everything derives from the seed. Knows nothing of RoleCall.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from rich.progress import track
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification
from transformers.utils import logging as transformers_logging

NUM_STEPS = 150
PAIRS = 64
LEARNING_RATE = 2e-3
ADDRESS = "127.0.0.1:50071"


def prepare(folder: Path, seed: int = 0, address: str = ADDRESS, num_steps: int = NUM_STEPS) -> float:
    """Writes `folder`/preference and preference.yaml, which serves it at `address`; returns the share of new pairs that
    it orders rightly.
    """
    transformers_logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
        dtype="float32",
    )
    model = Qwen3ForSequenceClassification(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_steps)
    rng = random.Random(seed)
    for _ in track(range(num_steps), "training the reward model"):
        better, worse = scores_of(model, tokenizer, [pair(rng) for _ in range(PAIRS)])
        loss = -logsigmoid(better - worse).mean() + 0.01 * (better**2 + worse**2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    with torch.no_grad():
        better, worse = scores_of(model, tokenizer, [pair(rng) for _ in range(256)])
    model.save_pretrained(folder / "preference")
    tokenizer.save_pretrained(folder / "preference")
    (folder / "preference.yaml").write_text(
        f"path: preference\ndtype: float32\nbind: {address}\noutput: probability\nnum_threads: 1\n"
    )
    return float((better > worse).float().mean())


def pair(rng: random.Random) -> tuple[str, str, str]:
    """(digits, the better answer, the worse one): the one that holds more of the digits in descending order."""
    number = "".join(rng.sample("0123456789", k=5))
    wanted = "".join(sorted(number, reverse=True))
    answers = [answer(rng, number, wanted) for _ in range(2)]
    while goodness(answers[0], wanted) == goodness(answers[1], wanted):
        answers = [answer(rng, number, wanted) for _ in range(2)]
    better, worse = sorted(answers, key=lambda each: goodness(each, wanted), reverse=True)
    return number, better, worse


def answer(rng: random.Random, number: str, wanted: str) -> str:
    """What a policy may answer: either order, the digits as they are or shuffled, a near miss, or something else."""
    near = list(wanted)
    near[rng.randrange(5)] = rng.choice("0123456789")
    choices = [
        wanted,
        "".join(sorted(number)),
        number,
        "".join(rng.sample(number, k=5)),
        "".join(near),
        wanted[: rng.randrange(5)],
        wanted + rng.choice("0123456789"),
        "".join(rng.choices("0123456789", k=rng.randrange(1, 8))),
    ]
    return rng.choice(choices)


def goodness(answer: str, wanted: str) -> int:
    """Digits at their places, less what is missing or too much."""
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) - abs(len(answer) - len(wanted))


def scores_of(
    model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of the better answers and of the worse ones, each [pairs]."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"sort: {number}"}, {"role": "assistant", "content": each}], tokenize=False
        )
        for number, better, worse in pairs
        for each in (better, worse)
    ]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    scores = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits.view(-1, 2)
    return scores[:, 0], scores[:, 1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", default=ADDRESS)
    arguments = parser.parse_args()
    share = prepare(arguments.folder, arguments.seed, arguments.address)
    sys.stdout.write(f"{arguments.folder / 'preference'} orders {share:.1%} of new pairs rightly\n")


if __name__ == "__main__":
    main()
