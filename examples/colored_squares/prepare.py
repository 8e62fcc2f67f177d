"""Makes everything the colored-squares run starts from, in one folder: pictures, data, and a 1M-parameter model of text
and images after a short supervised fine-tuning.

A picture shows two rows of two colored squares; the prompt is the same under every one, so whoever answers must look.
The base is fine-tuned on the letters of the colors, 30% row by row and 70% column by column: it can see, and prefers
the wrong order. Reinforcement learning then *selects* an order that the base already knows. Everything derives from the
seed. Owns its output folder; knows nothing of RoleCall.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoImageProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
NUM_ROWS, NUM_COLUMNS = 2, 2
CELL = 16
"""Pixels from one square to the next, and those that the model makes a token of."""
COLORS = {
    "R": (225, 45, 45),
    "O": (255, 150, 30),
    "Y": (250, 235, 60),
    "G": (40, 165, 75),
    "B": (45, 90, 225),
    "V": (140, 60, 190),
}
NUM_TRAIN = 768
NUM_HELDOUT = 256
VOCAB_SIZE = 288
QUESTION = "which colors?"
END = "<|im_end|>"
IMAGE = "<|image_pad|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SFT_STEPS = 400
SFT_BATCH = 32
SFT_LEARNING_RATE = 3e-3
ROWS_SHARE = 0.3

Pixels = dict[str, torch.Tensor]


def prepare(folder: Path, seed: int, *, family: str = FAMILIES[0], num_steps: int = SFT_STEPS) -> None:
    """Writes `folder`/model, warm after `num_steps`, pictures, train.jsonl and heldout.jsonl. Held-out pictures are in
    neither training set.
    """
    transformers_logging.disable_progress_bar()
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    squares = distinct_squares(rng, NUM_TRAIN + NUM_HELDOUT)
    for each in squares:
        draw(rng, each).save(folder / "pictures" / f"{each}.png")
    train, heldout = squares[:NUM_TRAIN], squares[NUM_TRAIN:]
    write_prompts(folder / "train.jsonl", train)
    write_prompts(folder / "heldout.jsonl", heldout)
    tokenizer = make_tokenizer()
    model = make_model(family, tokenizer, seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_processors(folder / "model", family)
    pixels = read_pixels(folder, train)
    fine_tune(model, batches(tokenizer, pixels, rng, num_steps), num_steps)
    model.save_pretrained(folder / "model")


def distinct_squares(rng: random.Random, count: int) -> list[str]:
    """`count` different strings of the colors' letters, row by row; none reads the same column by column."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        squares = "".join(rng.choices("".join(COLORS), k=NUM_ROWS * NUM_COLUMNS))
        if by_columns(squares) != squares:
            drawn[squares] = None
    return list(drawn)


def by_columns(squares: str) -> str:
    """The letters of `squares`, which are row by row, column by column."""
    return "".join(squares[column::NUM_COLUMNS] for column in range(NUM_COLUMNS))


def draw(rng: random.Random, squares: str) -> Image.Image:
    """A picture of the squares, each of its own size, place and shade."""
    picture = Image.new("RGB", (NUM_COLUMNS * CELL, NUM_ROWS * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for index, letter in enumerate(squares):
        row, column = divmod(index, NUM_COLUMNS)
        side = rng.randint(CELL // 2, CELL - 2)
        left, top = (place * CELL + rng.randint(0, CELL - side) for place in (column, row))
        shade = tuple(min(255, max(0, value + rng.randint(-15, 15))) for value in COLORS[letter])
        pen.rectangle((left, top, left + side - 1, top + side - 1), fill=shade)
    return picture


def write_prompts(path: Path, pictures: list[str]) -> None:
    """JSONL in the fields that `data` of task.yaml reads; an image is named from the folder of its file."""
    rows = (
        {
            "uid": squares,
            "prompt": f"<image>{QUESTION}",
            "images": [f"pictures/{squares}.png"],
            "ground_truth": squares,
        }
        for squares in pictures
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 288 ids, a token for every color, and a chat template that shows images."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user\n", "assistant\n", QUESTION] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[token for token in SPECIAL_TOKENS[1:] if token != END],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """A model of about a million random parameters, float32."""
    torch.manual_seed(seed)
    shared = {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        **shared,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": rope,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": CELL // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    names = {
        "image": IMAGE,
        "video": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 2 * CELL, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids, **shared)
        ).float()
    text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_interleaved": True}}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids, **shared)
    ).float()


def write_processors(path: Path, family: str) -> None:
    """The files by which transformers and vLLM make pixel values of images."""
    shared: dict[str, Any] = {
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2},
        "processor_class": {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}[family],
    }
    video = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[family]
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": video}),
    ):
        (path / name).write_text(json.dumps({**shared, **kind}, indent=2))
    file = path / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "processor_class": shared["processor_class"]}, indent=2)
    )


def read_pixels(folder: Path, pictures: list[str]) -> dict[str, Pixels]:
    """What the vision tower computes on, by picture."""
    processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
    opened = {squares: Image.open(folder / "pictures" / f"{squares}.png") for squares in pictures}
    return {squares: processor(images=[picture], return_tensors="pt") for squares, picture in opened.items()}


def batches(
    tokenizer: PreTrainedTokenizerFast, pixels: dict[str, Pixels], rng: random.Random, num_steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """`num_steps` batches of prompts with answers of which ROWS_SHARE are row by row, the others column by column;
    every sequence is equally long, labels are -100 on the prompt.
    """
    asked = prompt_ids(tokenizer)
    for step in range(num_steps):
        drawn = rng.choices(list(pixels), k=SFT_BATCH)
        # The share is met by every batch, not only on average, so that bases of different seeds are alike.
        num_rows = round((step + 1) * SFT_BATCH * ROWS_SHARE) - round(step * SFT_BATCH * ROWS_SHARE)
        answers = [
            tokenizer.encode((squares if index < num_rows else by_columns(squares)) + END)
            for index, squares in enumerate(drawn)
        ]
        yield {
            **inputs([asked + answer for answer in answers], [pixels[squares] for squares in drawn], tokenizer),
            "labels": torch.tensor([[-100] * len(asked) + answer for answer in answers]),
        }


def prompt_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The prompt of every picture, with a token of the image for each square."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text.replace(IMAGE, IMAGE * (NUM_ROWS * NUM_COLUMNS)))
    return ids


def inputs(rows: list[list[int]], pixels: list[Pixels], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Arguments of the model for sequences of one length, each with one image."""
    token_ids = torch.tensor(rows)
    return {
        "input_ids": token_ids,
        "mm_token_type_ids": (token_ids == tokenizer.convert_tokens_to_ids(IMAGE)).int(),
        "pixel_values": torch.cat([each["pixel_values"] for each in pixels]),
        "image_grid_thw": torch.cat([each["image_grid_thw"] for each in pixels]),
    }


def fine_tune(model: Any, given: Iterator[dict[str, torch.Tensor]], num_steps: int) -> None:
    """Supervised steps; the loss is over the answers' tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / num_steps)) / 2
    )
    columns = (
        TextColumn("fine-tuning"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps  loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=num_steps, loss="-")
        for batch in given:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            bar.update(task, advance=1, loss=f"{loss.item():.3f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.seed, family=arguments.family)


if __name__ == "__main__":
    main()
