"""Responses per second of a reward model: as `rolecall serve reward-model` computes them, from items to results, beside
a plain transformers loop over padded batches of the same conversations, on CPUs or a GPU.

    python -m benchmarks.reward_model [--groups 16] [--responses 8] [--hidden 256] [--layers 4] [--device 0]

Lengths are ragged: those of prompts and responses are drawn log-normally. `alone` are responses to different prompts,
`groups` responses of one prompt each, as a trainer sends them. Both ways compute the same scores, which is looked at.
The two take turns, so that a busy machine is busy for both. On CPUs seconds are those of the process's own cores.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.settings import RewardModelSettings
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.v1 import reward_pb2, trajectory_pb2
from services.reward_model import config
from services.reward_model.batcher import TokenBatcher
from services.reward_model.conversations import Conversations
from services.reward_model.ranks import build
from services.reward_model.service import ModelScores
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer

BATCH = 16
"""Sequences of the plain loop's padded batches, in the order in which they come."""
CALL = 64
"""Items of a call, all calls at once."""
ROUNDS = 3
"""Times that each way is measured, after one to warm up; the median counts."""


def write_model(folder: Path, hidden: int, num_layers: int, max_tokens: int) -> None:
    """A random Qwen3 with a head of one number, and a tokenizer of bytes."""
    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=288,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=max_tokens,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        bos_token_id=None,
        num_labels=1,
    )
    Qwen3ForSequenceClassification(settings).float().save_pretrained(folder)
    write_tokenizer(folder)


def items_of(num_groups: int, num_responses: int, *, alone: bool) -> list[reward_pb2.ScoreItem]:
    """Items of ragged lengths; where they are `alone`, each of a prompt of its own."""
    draw = random.Random(0)

    def text(mean_log: float) -> str:
        length = min(1500, max(8, int(draw.lognormvariate(mean_log, 0.8))))
        return "".join(draw.choice("abcdefgh ijklmnop") for _ in range(length))

    items = []
    for group in range(num_groups):
        prompt = text(5.3)
        for index in range(num_responses):
            prompt = text(5.3) if alone else prompt
            message = trajectory_pb2.Message(role="user", content=prompt)
            items.append(
                reward_pb2.ScoreItem(
                    id=f"{group}/{index}", messages=[message], response_text=text(5.0), group=str(group)
                )
            )
    return items


def plain_loop(
    path: Path, device: torch.device, dtype: torch.dtype
) -> Callable[[list[reward_pb2.ScoreItem]], list[float]]:
    """The loop that anybody writes first: padded batches, one after the other."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).to(device).eval()
    tokenizer = ChatTokenizer(path)

    def score(items: list[reward_pb2.ScoreItem]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(items), BATCH):
            rows = []
            for item in items[start : start + BATCH]:
                turns = [{"role": each.role, "content": each.content} for each in item.messages]
                turns.append({"role": "assistant", "content": item.response_text})
                rows.append(tokenizer.encode(tokenizer.render(turns, generate=False)))
            longest = max(map(len, rows))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
            with torch.no_grad():
                scores += model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        return scores

    return score


async def ours(scores: ModelScores, items: list[reward_pb2.ScoreItem]) -> list[float]:
    """All calls at once."""
    calls = [items[start : start + CALL] for start in range(0, len(items), CALL)]
    answers = await asyncio.gather(*(scores.score(call) for call in calls))
    return [result.reward.value for answer in answers for result in answer]


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Prints a row for each kind of items."""
    write_model(folder, arguments.hidden, arguments.layers, 4096)
    on_gpu = arguments.device is not None
    settings = RewardModelSettings.model_validate(
        {
            "path": folder,
            "dtype": "bfloat16" if on_gpu else "float32",
            "devices": [arguments.device] if on_gpu else [],
            "num_threads": arguments.threads,
            "token_budget": arguments.token_budget,
        }
    )
    ranks = build(settings, folder, ProcessHooks())
    device = ranks.context.device
    tokenizer = ChatTokenizer(folder)
    batcher = TokenBatcher(
        lambda sequences: asyncio.to_thread(ranks.outputs_of, sequences), settings.token_budget * ranks.num_slots
    )
    scores = ModelScores(
        Conversations(settings, tokenizer, config.max_tokens(settings)), batcher, config.describe(settings)
    )
    batcher.start()
    clock = time.perf_counter if on_gpu else time.process_time
    plain = plain_loop(folder, device, torch.bfloat16 if on_gpu else torch.float32)
    for name in ("alone", "groups"):
        items = items_of(arguments.groups, arguments.responses, alone=name == "alone")
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        for number in range(ROUNDS + 1):
            started = clock()
            found = await ours(scores, items)
            between = clock()
            expected = plain(items)
            if number:  # the first one warms up
                seconds["ours"].append(between - started)
                seconds["plain"].append(clock() - between)
        apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        rates = {way: len(items) / sorted(taken)[ROUNDS // 2] for way, taken in seconds.items()}
        print(
            f"{name}: {len(items)} items, plain {rates['plain']:.1f}/s, ours {rates['ours']:.1f}/s, "
            f"{rates['ours'] / rates['plain']:.2f}x; scores at most {apart:.1e} apart"
        )
    await batcher.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--device", type=int, help="a GPU's index; absent: CPUs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments, Path(folder)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
