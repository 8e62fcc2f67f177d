"""Makes a judge for the sort-digits job: a Qwen3 of 1M parameters that reads a prompt and a response and says `yes`
where the response is the digits in descending order, else `no`.

    python -m examples.sort_digits.judge FOLDER   # one that prepare.py made; writes FOLDER/judge and rubric.yaml
    python -m vllm.entrypoints.openai.api_server --model FOLDER/judge --served-model-name judge   # or another server

Owns those two. A general model of this size could judge nothing: this one is taught the one question of its rubric, by
supervised steps on answers right and wrong. Everything derives from the seed. Knows nothing of RoleCall.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from rich.progress import track
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from examples.sort_digits.prepare import END, NUM_DIGITS, make_model

NUM_STEPS = 300
BATCH = 96
LEARNING_RATE = 2e-3
RUBRIC = """\
model: judge
verdicts: {"yes": 1, "no": 0}
answer: choice
template: "{{ prompt }} {{ response | tojson }}"
parameters: {temperature: 0, max_tokens: 8}
"""


def prepare(folder: Path, seed: int = 0, num_steps: int = NUM_STEPS) -> float:
    """Writes `folder`/judge and rubric.yaml; returns the share of new answers that it judges rightly."""
    transformers_logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    model = make_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, num_steps, pct_start=0.1)
    rng = random.Random(seed)
    for _ in track(range(num_steps), "teaching the judge"):
        token_ids, labels = tokens_of(tokenizer, [case(rng) for _ in range(BATCH)])
        model(input_ids=token_ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    model.eval()
    right = share_right(model, tokenizer, [case(rng) for _ in range(1024)])
    model.save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    (folder / "rubric.yaml").write_text(RUBRIC)
    return right


def case(rng: random.Random) -> tuple[str, str, str]:
    """(digits, an answer, the verdict)."""
    number = "".join(rng.sample("0123456789", k=NUM_DIGITS))
    wanted = "".join(sorted(number, reverse=True))
    given = wanted if rng.random() < 0.45 else wrong(rng, number, wanted)
    return number, given, "yes" if given == wanted else "no"


def wrong(rng: random.Random, number: str, wanted: str) -> str:
    """What a policy may answer in place of `wanted`: the other order, the digits as they are or shuffled, two of them
    exchanged, one that is another, missing, twice or too much, or something else.
    """
    place, other = rng.sample(range(NUM_DIGITS), k=2)
    exchanged, near = list(wanted), list(wanted)
    exchanged[place], exchanged[other] = wanted[other], wanted[place]
    near[place] = rng.choice("0123456789")
    choices = [
        wanted[::-1],
        number,
        "".join(rng.sample(number, k=NUM_DIGITS)),
        "".join(exchanged),
        "".join(near),
        "".join(sorted(near, reverse=True)),
        wanted[:place] + wanted[place + 1 :],
        wanted[:place] + wanted[place] + wanted[place:],
        wanted + rng.choice("0123456789"),
        wanted[: rng.randrange(NUM_DIGITS)],
        "".join(rng.choices("0123456789", k=rng.randrange(1, 8))),
    ]
    return rng.choice(choices)


def question(tokenizer: PreTrainedTokenizerFast, number: str, given: str) -> str:
    """The question that RUBRIC makes of a response, as the judge reads it."""
    words = f"sort: {number} {json.dumps(given)}"
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}], add_generation_prompt=True, tokenize=False
    )
    return text


def tokens_of(
    tokenizer: PreTrainedTokenizerFast, cases: list[tuple[str, str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64 [cases, T], padded at the end; labels are -100 but on the verdict and its end."""
    rows = [
        (tokenizer.encode(question(tokenizer, number, given)), tokenizer.encode(verdict + END))
        for number, given, verdict in cases
    ]
    length = max(len(asked) + len(said) for asked, said in rows)
    token_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for index, (asked, said) in enumerate(rows):
        token_ids[index, : len(asked) + len(said)] = torch.tensor(asked + said)
        labels[index, len(asked) : len(asked) + len(said)] = torch.tensor(said)
    return token_ids, labels


@torch.no_grad()
def share_right(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, cases: list[tuple[str, str, str]]
) -> float:
    """Share of cases whose verdict is more likely than the other, by its first token."""
    yes, no = (tokenizer.encode(word)[0] for word in ("yes", "no"))
    token_ids, labels = tokens_of(tokenizer, cases)
    first = (labels != -100).int().argmax(dim=1)
    logits = model(input_ids=token_ids).logits[torch.arange(len(cases)), first - 1]
    says_yes = logits[:, yes] > logits[:, no]
    return float((says_yes == torch.tensor([verdict == "yes" for *_, verdict in cases])).float().mean())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    share = prepare(arguments.folder, arguments.seed)
    sys.stdout.write(f"{arguments.folder / 'judge'} judges {share:.1%} of new answers rightly\n")


if __name__ == "__main__":
    main()
