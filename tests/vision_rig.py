"""Rows of a tiny model of text and images, and plain transformers that computes each by itself."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from rolecall.columns import IMAGES
from rolecall.settings import LoraSection
from rolecall.training.engine import Microbatch
from rolecall.training.packing.images import ImageReader, ReadImages
from rolecall.training.packing.pack import Row, pack
from rolecall.v1.trajectory_pb2 import Images
from rolecall.wire import Array

CPU = torch.device("cpu")
START, END, SHOWS = 3, 4, 5
"""Ids before, behind and in the place of an image."""
TOKEN_PIXELS = 8
TEMPERATURE = 0.7
MAX_GAP = 1e-4
"""Nats, in float32: vLLM and transformers on the same pixels differ by 1e-5. Pixels that Pillow resized are .006 off,
and another image, or weights of another seed, tenths and more.
"""
MEAN_GAP = 0.05
"""Nats on average over tokens, where vLLM computes in bfloat16 alone: single tokens of such rough weights are tenths
off, and means .03. Another image is .15 off, other weights 1.
"""


def sampled_dtype(family: str) -> str:
    """The type that vLLM computes the family in on CPUs: recurrent layers in bfloat16 alone."""
    return "bfloat16" if family.startswith("qwen3_5") else "float32"


def gap_size(gaps: Array, family: str) -> float:
    """What there is to say of differences of logprobs: their largest, or in half precision their mean."""
    sizes = np.abs(gaps)
    return float(sizes.max() if sampled_dtype(family) == "float32" else sizes.mean())


def most_gap(family: str) -> float:
    """Greatest size of differences by which vLLM and another library compute the same."""
    return MAX_GAP if sampled_dtype(family) == "float32" else MEAN_GAP


def adapters(family: str, rank: int = 4) -> LoraSection:
    """Adapters of the language model's matrices: of attention's alone where all else in a layer are experts."""
    beside = {"qwen3_vl_moe": (), "glm4v": ("gate_up_proj", "down_proj")}.get(
        family, ("gate_proj", "up_proj", "down_proj")
    )
    return LoraSection(rank=rank, alpha=12.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj", *beside))


def sampled_weights(path: Path, family: str) -> list[tuple[str, torch.Tensor]]:
    """The weights of the model in `path` by name, as its rollout is sent them."""
    dtype = getattr(torch, sampled_dtype(family))
    return [(name, each.to(dtype)) for name, each in sorted(load_file(path / "model.safetensors").items())]


def image_file(height: int, width: int, seed: int) -> bytes:
    """A PNG of noise, of as many tokens as there are squares of TOKEN_PIXELS in it."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


WIDE, OTHER_WIDE, SQUARE, TALL, OTHER_SQUARE = (
    image_file(height, width, seed)
    for seed, (height, width) in enumerate([(16, 40), (16, 40), (24, 24), (40, 16), (24, 24)])
)


def make_row(files: list[bytes], response: list[int], loss_mask: int = 1) -> Row:
    """A prompt that shows `files`, each between words, and a response."""
    ids = [1, 50]
    for number, file in enumerate(files):
        width, height = Image.open(io.BytesIO(file)).size
        ids += [60 + number, START, *[SHOWS] * (height // TOKEN_PIXELS * width // TOKEN_PIXELS), END]
    mask = np.array([0] * (len(ids) + 2) + [1] * len(response), np.uint8)
    return {
        "token_ids": np.array([*ids, 70, 71, *response], np.int32),
        "response_mask": mask,
        "loss_mask": mask * loss_mask,
        IMAGES: np.frombuffer(Images(files=files).SerializeToString(), np.uint8),
    }


def make_episode(files: list[bytes], turns: list[list[int]], num_shown: int | None = None) -> Row:
    """Turns, each behind a message that shows one of `files`; the row has all of them, its tokens the first
    `num_shown`.
    """
    rows = [make_row([file], turn) for file, turn in zip(files[:num_shown], turns, strict=True)]
    row = {name: np.concatenate([row[name] for row in rows]) for name in ("token_ids", "response_mask", "loss_mask")}
    return {**row, IMAGES: make_row(files, [])[IMAGES]}


def make_episodes() -> list[Row]:
    """Episodes of one prompt: two that go on alike, two in which the environment shows other images later, of the same
    tokens and of others; and an earlier segment of the last, which shows the first image alone.
    """
    return [
        make_episode([WIDE, SQUARE, TALL], [[80, 81], [82], [83, 84]]),
        make_episode([WIDE, SQUARE, TALL], [[80, 81], [82], [90, 91]]),
        make_episode([WIDE, OTHER_SQUARE, TALL], [[80, 81], [82], [83, 84]]),
        make_episode([WIDE, TALL], [[80, 81], [33]]),
        make_episode([WIDE, TALL], [[80, 81]], num_shown=1),
    ]


def make_rows() -> list[Row]:
    """Responses to one prompt, to its like with another image, to prompts of two images and of none."""
    return [
        make_row([WIDE], [80, 81, 82]),
        make_row([WIDE], [90, 91]),
        make_row([OTHER_WIDE], [80, 81, 82]),
        make_row([SQUARE, TALL], [33]),
        make_row([], [61, 62, 63]),
        make_row([TALL], [40] * 7),
        make_row([TALL, SQUARE, WIDE], [100, 101, 102]),
    ]


def read_images(path: Path, rows: list[Row], dtype: torch.dtype = torch.float32) -> ReadImages:
    """The images of `rows`, for the model in `path`."""
    read = ReadImages(ImageReader(path, dtype))
    for _ in read.read(rows):
        pass
    return read


def packed(path: Path, rows: list[Row], columns: tuple[str, ...] = ()) -> Microbatch:
    """`rows` as a microbatch of the model in `path`."""
    return pack(rows, columns, temperature=TEMPERATURE, device=CPU, images=read_images(path, rows))


def oracle_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model by transformers alone."""
    return AutoModelForImageTextToText.from_pretrained(path, attn_implementation="sdpa", dtype=dtype).eval()


def oracle_inputs(path: Path, row: Row) -> dict[str, Any]:
    """What transformers computes a row from."""
    ids = torch.from_numpy(row["token_ids"].astype(np.int64))[None]
    begins = np.diff((row["token_ids"] == SHOWS).astype(int), prepend=0) > 0
    files = Images.FromString(row[IMAGES].tobytes()).files[: int(begins.sum())]
    if not files:
        return {"input_ids": ids, "use_cache": False}
    images = [Image.open(io.BytesIO(file)) for file in files]
    made = AutoImageProcessor.from_pretrained(path)(images=images, return_tensors="pt")
    return {"input_ids": ids, "mm_token_type_ids": (ids == SHOWS).int(), "use_cache": False, **made}


def oracle_logprobs(model: PreTrainedModel, path: Path, row: Row, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Logprobs [T] of a row by itself, 0 outside the response mask."""
    log_p = (model(**oracle_inputs(path, row)).logits[0].float() / temperature).log_softmax(-1)[:-1]
    ids = torch.from_numpy(row["token_ids"].astype(np.int64))
    mask = torch.from_numpy(row["response_mask"] != 0)
    return torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]]) * mask


def oracle_gradients(path: Path, rows: list[Row]) -> dict[str, Array]:
    """Gradients of the mean negative logprob of all responses' tokens."""
    model = oracle_model(path)
    num_tokens = sum(int(np.count_nonzero(row["loss_mask"][1:])) for row in rows)
    loss = -torch.stack([oracle_logprobs(model, path, row).sum() for row in rows]).sum() / num_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}


def rounding(name: str) -> float:
    """How far a gradient may be from another way to compute it, in its largest element: in what decays the states of
    recurrent layers much of what tokens say cancels.
    """
    return 5e-4 if name.endswith(("A_log", "dt_bias", "in_proj_a.weight")) else 2e-5


def write_published(path: Path, folder: Path) -> Path:
    """A copy in `folder` of the Qwen3.5 in `path` as it is published: experts of a layer in one tensor, a block that
    predicts further tokens, and names in its config.json that transformers does not read.
    """
    shutil.copytree(path, folder)
    weights, stacks = load_file(path / "model.safetensors"), dict[str, dict[str, list[torch.Tensor]]]()
    for name in sorted(name for name in weights if ".experts." in name):
        layer, _, matrix = name.removesuffix(".weight").partition(".experts.")
        stacks.setdefault(layer, {}).setdefault(matrix.partition(".")[2], []).append(weights.pop(name))
    for layer, stacked in stacks.items():
        gate, up, down = (torch.stack(stacked[f"{matrix}_proj"]) for matrix in ("gate", "up", "down"))
        weights |= {f"{layer}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.experts.down_proj": down}
    further = {"fc.weight": (128, 256), "layers.0.self_attn.k_proj.weight": (64, 128), "norm.weight": (128,)}
    weights |= {f"mtp.{name}": torch.ones(shape) for name, shape in further.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
    config["vision_config"] |= {"deepstack_visual_indexes": [], "model_type": config["model_type"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
