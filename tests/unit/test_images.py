"""Images in prompts: read from rows, counted as the library counts them, refused by line and field."""

import asyncio
import importlib.util
import io
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from pydantic import ValidationError

from rolecall.commands.check import check
from rolecall.data.dataset import RawPrompt, load_prompts
from rolecall.data.images.files import FORMATS, MAX_BYTES, image_size, media_type, open_image
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.images.tokens import (
    VisualTokens,
    collapsed,
    read_processor_digest,
    read_visual_tokens,
    require_visual_tokens,
    run_lengths,
)
from rolecall.data.model.engine_limits import check_engine
from rolecall.data.row_files import PARQUET_ROWS, read_rows
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Image as Shown
from rolecall.environment import Message, Task
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import DataSection, RewardSection, RunSettings, load_settings
from rolecall.store.budget import PromptBytes
from rolecall.store.position import RunPosition
from rolecall.v1 import trajectory_pb2
from services.controller.board import RunBoard
from services.controller.config import admission_policy
from services.controller.evaluation.sets import load_sets
from services.controller.groups.assembly import Assembly
from services.controller.groups.intake import Intake
from services.controller.groups.prompts import Cursor, PromptRenderer, PromptSequence
from services.controller.publish.probe import make_probe
from services.controller.threads import StoreThreads
from tests.pictures import END, PAD, START, picture, write_seeing
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.launched import write_light_config
from tests.unit.test_controller_prompts import write
from tests.waiting import until

ELSEWHERE = RewardSection(address="scorer:1")
TOKENS = VisualTokens(PAD, 4, 2, 64, 4096)
ORIENTATION = 0x0112
"""EXIF's tag of it."""


def section(path: Path, **fields: Any) -> DataSection:
    return DataSection.model_validate({"train": path, "images_field": "images", **fields})


def load(path: Path, **fields: Any) -> list[RawPrompt]:
    return load_prompts(path, section(path, **fields), ELSEWHERE)


# --- tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", [0, 1, 2])
@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    patch=st.sampled_from([4, 14, 16]),
    least=st.integers(1, 300 * 28**2),
    more=st.integers(0, 300 * 28**2),
)
def test_an_image_has_as_many_tokens_as_the_library_makes_of_it(
    num_frames: int, width: int, height: int, patch: int, least: int, more: int
) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as of_glm
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    factor, bounds = 2 * patch, (least, least + more)
    tokens = VisualTokens(PAD, patch, 2, *bounds, num_frames)
    try:
        rows, columns = (
            of_glm(num_frames, height, width, num_frames, factor, *bounds)
            if num_frames
            else smart_resize(height, width, factor, *bounds)
        )
    except ValueError:
        with pytest.raises(InvalidInputError, match="200 times as long as it is wide"):
            tokens.number(width, height)
    else:
        assert tokens.number(width, height) == rows * columns // factor**2


def test_a_placeholder_is_repeated_for_each_token_and_collapses_to_one() -> None:
    ids = [1, START, PAD, END, 9, START, PAD, END, 7]
    whole = TOKENS.expanded(ids, [3, 1])
    assert whole == [1, START, PAD, PAD, PAD, END, 9, START, PAD, END, 7]
    assert run_lengths(whole, PAD) == [3, 1]
    assert collapsed(whole, PAD, 2) == ids
    assert collapsed([*whole, PAD, PAD], PAD, 2) == [*ids, PAD, PAD], "what is sampled behind them stays"
    assert collapsed([], PAD, 0) == []
    assert collapsed([7, 7, PAD, PAD], PAD, 1) == [7, 7, PAD]
    assert collapsed([7, PAD, PAD], PAD, 0) == [7, PAD, PAD]


@pytest.mark.parametrize(
    ("ids", "numbers", "complaint"),
    [
        ([1, PAD, 2], [], "has 1 tokens that stand for an image .* and 0 images; a text may not spell that token"),
        ([1, 2], [4], "has 0 tokens that stand for an image .* and 1 images"),
        ([1, PAD, PAD, 2], [4, 4], "two images side by side"),
    ],
)
def test_a_prompt_that_does_not_show_each_image_once_is_refused(
    ids: list[int], numbers: list[int], complaint: str
) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        TOKENS.expanded(ids, numbers)


def test_the_tokens_of_a_model_are_read_from_the_files_that_its_processor_is_read_from(tmp_path: Path) -> None:
    assert read_visual_tokens(write_seeing(tmp_path)) == TOKENS
    write_seeing(tmp_path, min_pixels=256, max_pixels=1024)
    assert read_visual_tokens(tmp_path) == VisualTokens(PAD, 4, 2, 256, 1024)
    own = {"image_processor": {"patch_size": 4, "size": {"shortest_edge": 128, "longest_edge": 256}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(own))
    assert read_visual_tokens(tmp_path) == VisualTokens(PAD, 4, 2, 128, 256)


def test_the_bounds_of_glms_processor_are_those_of_the_pixels_of_both_frames(tmp_path: Path) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    own: dict[str, Any]
    for kind, own in (
        (Glm4vImageProcessorPil, {}),
        (Glm46VImageProcessorPil, {"size": {"shortest_edge": 256, "longest_edge": 8192}, "max_pixels": 64}),
    ):
        name = kind.__name__.removesuffix("Pil")
        write_seeing(tmp_path, {"model_type": "glm4v"})
        written = {"image_processor_type": name, "patch_size": 4, "merge_size": 2, **own}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
        library, tokens = kind.from_pretrained(tmp_path), require_visual_tokens(tmp_path)
        assert (tokens.min_pixels, tokens.max_pixels) == (library.size.shortest_edge, library.size.longest_edge)
        for size in ((7, 90), (64, 64), (300, 200)):
            assert tokens.number(*size) == len(library(images=[Image.new("RGB", size)])["pixel_values"]) // 4
        own_digest = read_processor_digest(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(library.to_dict()))
        assert read_processor_digest(tmp_path) == own_digest, "what a file leaves out stands as the library has it"
    with pytest.raises(ConfigError, match="its image processor is Qwen2VLImageProcessor; images are counted as Glm4vI"):
        read_visual_tokens(write_seeing(tmp_path, {"model_type": "glm4v"}))


def test_a_processor_is_told_from_another_by_what_it_makes_of_an_image(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    def digest(**processor: Any) -> str:
        return read_processor_digest(write_seeing(tmp_path, **processor))

    whole: Any = Qwen2VLImageProcessorPil.from_pretrained(write_seeing(tmp_path)).to_dict()
    assert digest(image_mean=None) == digest(**whole), "what a file leaves out stands as the library has it"
    assert digest(image_std=[1, 1, 1]) == digest(image_std=[1.0, 1.0, 1.0])
    others: list[dict[str, Any]] = [
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.5]},
        {"resample": 2},
        {"rescale_factor": 1 / 127.5},
        {"do_rescale": False},
        {"do_normalize": False},
        {"max_pixels": 1024},
    ]
    assert len({digest(), *(digest(**other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"min_pixels": 256, "max_pixels": 1024},
        {"min_pixels": 256, "max_pixels": 1024, "size": {"shortest_edge": 128, "longest_edge": 512}},
        {"max_pixels": 1024, "size": {"shortest_edge": 128, "longest_edge": 512}},
        {"max_pixels": 1024, "size": {"shortest_edge": 128}},
        {"max_pixels": 1024},
        {"size": {"shortest_edge": 128, "longest_edge": 512}},
        {"size": {"longest_edge": 512}},
        {"size": {"shortest_edge": 128}},
        {"size": {"min_pixels": 128, "max_pixels": 512}},
        {"size": {"height": 448, "width": 448}},
        {"min_pixels": 0, "max_pixels": 1024},
    ],
)
def test_the_bounds_of_an_images_pixels_are_the_librarys(tmp_path: Path, own: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write_seeing(tmp_path)
    written = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, **own}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    library = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    if library.size.shortest_edge and library.size.longest_edge:
        tokens = require_visual_tokens(tmp_path)
        assert (tokens.min_pixels, tokens.max_pixels) == (library.size.shortest_edge, library.size.longest_edge)
        return
    with pytest.raises(ValueError, match="must contain 'shortest_edge' and 'longest_edge'"):
        library(images=[Image.new("RGB", (16, 16))])
    with pytest.raises(ConfigError, match=r"_pixels \(or size\.\w+_edge\) is (None|0), not .*; a size of your own has"):
        require_visual_tokens(tmp_path)


@pytest.mark.parametrize(
    ("processor", "complaint"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "its image processor is SiglipImageProcessor; images are"),
        ({"do_resize": False}, "is Qwen2VLImageProcessor without do_resize"),
        ({"do_resize": None}, "is Qwen2VLImageProcessor without do_resize"),
        ({"patch_size": 0}, "patch_size is 0, not a whole number above 0"),
        ({"patch_size": 14}, r"processor's patch_size is 14, and vision_config.patch_size of config.json is 4"),
    ],
)
def test_a_processor_that_makes_other_tokens_is_refused(
    tmp_path: Path, processor: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_visual_tokens(write_seeing(tmp_path, **processor))


def test_a_model_of_text_has_no_tokens_for_images_and_is_refused_where_prompts_show_some(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert read_visual_tokens(tmp_path) is None
    with pytest.raises(ConfigError, match=r"data\.images_field: model\.path .* is no model that sees"):
        require_visual_tokens(tmp_path)


# --- pixels -----------------------------------------------------------------------------------------


def test_an_image_is_opened_upright_on_white_and_in_three_colors() -> None:
    see_through = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    see_through.putpixel((0, 0), (200, 0, 0, 255))
    file = io.BytesIO()
    see_through.save(file, "PNG")
    opened = open_image(file.getvalue())
    assert (opened.mode, opened.getpixel((0, 0)), opened.getpixel((1, 0))) == ("RGB", (200, 0, 0), (255, 255, 255))
    turned = Image.new("RGB", (4, 2))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    file = io.BytesIO()
    turned.save(file, "JPEG", exif=exif)
    assert open_image(file.getvalue()).size == (2, 4)
    gray = io.BytesIO()
    Image.new("L", (2, 2), 7).save(gray, "PNG")
    assert open_image(gray.getvalue()).getpixel((1, 1)) == (7, 7, 7)


def with_exif(image: Image.Image, *tags: tuple[int, int, bytes]) -> bytes:
    """A JPEG of `image`, with EXIF tags of one value each: (tag, type, 4 bytes)."""
    head = b"Exif\0\0II" + struct.pack("<HLH", 42, 8, len(tags))
    body = b"".join(struct.pack("<HHL", tag, kind, 1) + value for tag, kind, value in tags)
    file = io.BytesIO()
    image.save(file, "JPEG", exif=head + body + bytes(4))
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_pillow_turns_it(orientation: int) -> None:
    file = with_exif(Image.open(io.BytesIO(picture(24, 16))), (ORIENTATION, 3, struct.pack("<HH", orientation, 0)))
    opened = open_image(file)
    for again in (ImageOps.exif_transpose(Image.open(io.BytesIO(file))), ImageOps.exif_transpose(opened)):
        assert (again.size, again.tobytes()) == (opened.size, opened.tobytes())


def test_an_image_beside_whose_pixels_something_cannot_be_read_is_shown() -> None:
    sideways = (ORIENTATION, 3, struct.pack("<HH", 6, 0))
    plain = Image.new("RGB", (4, 2), (200, 0, 0))
    negative_width = (0x0100, 9, struct.pack("<l", -1))  # which Pillow reads and cannot write
    assert open_image(with_exif(plain, sideways, negative_width)).size == (2, 4)
    words = PngInfo()
    words.add_text("Raw profile type exif", "\nexif\n   8\n4949zz00\n")
    file = io.BytesIO()
    plain.save(file, "PNG", pnginfo=words)
    assert open_image(file.getvalue()).size == (4, 2)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_what_is_half_transparent_is_mixed_with_white(mode: str) -> None:
    alpha = Image.linear_gradient("L").resize((16, 16))
    image = Image.open(io.BytesIO(picture(16, 16))).convert("L").convert("RGB")
    if mode == "P":
        image = image.quantize(16)
        image.info["transparency"] = bytes(range(0, 256, 16))
    else:
        image.putalpha(alpha)
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "PA" else "PNG")
    opened = Image.open(io.BytesIO(file.getvalue())).convert("RGBA")
    white = Image.new("RGBA", opened.size, "white")
    white.alpha_composite(opened)
    difference = np.asarray(open_image(file.getvalue()), int) - np.asarray(white.convert("RGB"), int)
    assert np.abs(difference).max() <= 1, "a level, by rounding"


@pytest.mark.parametrize("data", [b"no image", b"", picture(40, 40)[:200], picture(40, 40, kind="JPEG")[:-300]])
def test_what_is_no_whole_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="an image cannot be read"):
        open_image(data)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"


def in_iptc(file: bytes) -> bytes:
    """An IPTC file with another file inside."""

    def field(record: int, dataset: int, data: bytes) -> bytes:
        return bytes([0x1C, record, dataset]) + len(data).to_bytes(2, "big") + data

    head = field(3, 60, b"\1\0") + field(3, 20, b"\0\x40") + field(3, 30, b"\0\x40") + field(3, 120, b"\5")
    return head + field(8, 10, file)


@pytest.mark.parametrize("data", [EPS, in_iptc(EPS), picture(8, 8, kind="DDS")])
def test_a_file_of_another_format_is_refused_and_no_program_is_run(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was_run\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for read in (open_image, image_size, media_type):
        with pytest.raises(InvalidInputError, match="of one of the formats PNG, JPEG, WEBP"):
            read(data)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("mode", "kind", "depth"), [("I;16", "PNG", np.uint16), ("I;16", "TIFF", np.uint16), ("I", "TIFF", np.int32)]
)
def test_an_image_of_more_than_8_bits_a_channel_is_refused_by_name(mode: str, kind: str, depth: type) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 4000, depth)).save(file, kind)
    with pytest.raises(InvalidInputError, match=f"an image has pixels of mode {mode}, of 16 or 32 bits in one channel"):
        open_image(file.getvalue())
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(file, "TIFF")
    with pytest.raises(InvalidInputError, match="an image has pixels of mode F"):
        open_image(file.getvalue())


def test_an_image_of_too_many_pixels_is_refused_before_they_are_there() -> None:
    file = io.BytesIO()
    Image.new("1", (8193, 8192)).save(file, "PNG")
    head = file.getvalue()[:64]
    with pytest.raises(
        InvalidInputError, match="an image of 8193 x 8192 pixels has more than 67108864; make it smaller"
    ):
        open_image(head)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_head_of_a_file_tells_as_many_tokens_as_its_pixels(kind: str, tmp_path: Path) -> None:
    encode = encoder(tmp_path / "model").encode
    for number, (width, height) in enumerate([(36, 20), (20, 37), (700, 90), (1, 3), (90, 700)]):
        turned = Image.new("RGB", (width, height))
        exif = turned.getexif()
        exif[0x0112] = 6  # to be turned by 90 degrees
        turned.save(tmp_path / f"{number}.x", kind, exif=exif)
        path = write(tmp_path / "p.jsonl", {"prompt": "<image>", "images": [f"{number}.x"]})
        (raw,) = load(path)
        assert encode(raw, by_heads=True) == encode(raw)


def test_a_file_that_is_broken_behind_its_head_is_measured_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(40, 40)[:200])
    path = write(tmp_path / "p.jsonl", {"prompt": "<image>", "images": ["a.png"]})
    ids, _ = encoder(tmp_path / "model").encode(load(path)[0], by_heads=True)
    assert ids.count(PAD) > 1
    with pytest.raises(InvalidInputError, match="an image cannot be read"):
        image_size(b"no image")


# --- rows -------------------------------------------------------------------------------------------


def test_messages_show_images_by_marks_or_by_parts(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture(16, 16))
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image", "text": None}]
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "how many? <image>", "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": parts}], "images": ["a.png", {"path": "b.png", "bytes": None}]},
        {"prompt": "one alone <image>", "images": str(tmp_path / "b.png")},
        {"prompt": "none"},
        {"prompt": "none either", "images": []},
    )
    prompts = load(path)
    assert [[file.path for file in prompt.images] for prompt in prompts] == [
        [tmp_path / "a.png"],
        [tmp_path / "a.png", tmp_path / "b.png"],
        [tmp_path / "b.png"],
        [],
        [],
    ]
    assert prompts[1].messages == (("user", "<image>and<image>"),)
    assert prompts[0].chat[0]["content"] == [{"type": "text", "text": "how many? "}, {"type": "image"}]
    assert prompts[3].chat[0]["content"] == "none"
    assert all("images" not in prompt.metadata for prompt in prompts)


def test_without_the_setting_a_mark_is_text_and_images_are_a_field_like_others(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "say <image>", "images": ["a"]})
    (prompt,) = load(path, images_field=None)
    assert (prompt.chat[0]["content"], prompt.images, prompt.metadata) == ("say <image>", (), {"images": ["a"]})


def test_a_system_prompt_that_shows_an_image_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "hi"})
    with pytest.raises(ValidationError, match="system_prompt: it says <image>, which stands for an image of a row"):
        section(path, system_prompt="You see <image> tags.")
    assert section(path, system_prompt="You see <image> tags.", images_field=None).system_prompt


def test_parquet_holds_the_bytes_of_images(tmp_path: Path) -> None:
    rows = [{"prompt": "<image>", "images": [{"bytes": picture(9, 9), "path": "gone.png"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    (prompt,) = load(tmp_path / "p.parquet")
    assert [file.read() for file in prompt.images] == [picture(9, 9)]
    assert prompt.image_bytes >= len(picture(9, 9)) > prompt.num_bytes


def test_no_more_of_a_parquet_file_is_in_memory_than_what_is_kept_of_it(tmp_path: Path) -> None:
    path, num_rows, num_bytes = tmp_path / "p.parquet", 4 * PARQUET_ROWS, 2**16
    shown = [[{"bytes": random.Random(number).randbytes(num_bytes), "path": None}] for number in range(num_rows)]
    table = pyarrow.Table.from_pylist([{"prompt": "<image>", "images": images} for images in shown])
    pyarrow.parquet.write_table(table, path, use_dictionary=False, write_batch_size=8)  # pages of half a MiB
    del table
    before, most, number = pyarrow.total_allocated_bytes(), 0, 0
    for number, row in read_rows(path, "data.train"):
        assert row["images"] == shown[number - 1]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert number == num_rows
    assert most < num_rows * num_bytes / 2, "Arrow holds the row group, all of the file, beside the rows"


def test_a_function_of_the_users_leaves_the_bytes_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_images.py").write_text("def row(fields):\n    return {**fields, 'prompt': '<image>?'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": "", "images": [{"bytes": picture(9, 9), "path": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    (prompt,) = load(tmp_path / "p.parquet", preprocess={"function": "mine_images:row"})
    assert prompt.images[0].read() == picture(9, 9)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "<image>"}, r"field 'prompt': the messages show 1 images, .* and field 'images' has 0"),
        ({"prompt": "hi", "images": ["a.png"]}, "the messages show 0 images, .* has 1; show each once"),
        ({"prompt": "<image>", "images": ["gone.png"]}, r"field 'images', image 1: there is no file 'gone\.png' in "),
        ({"prompt": "<image>", "images": ["."]}, r"there is no file '\.' in .* \(it is no file\)"),
        ({"prompt": "<image>", "images": ["a\0"]}, r"there is no file 'a\\x00' in .*null byte"),
        (
            {"prompt": "<image>", "images": ["data:image/png;base64," + "A" * 6000]},
            r"there is no file 'data:image/png;base64,A{78}' in .* \(File name too long\); .* as \{bytes, path\}",
        ),
        ({"prompt": "<image>", "images": [7]}, r"image 1: neither a path nor \{bytes, path\}"),
        ({"prompt": "<image>", "images": [{"bytes": None, "path": ""}]}, "image 1: neither a path nor"),
        ({"prompt": "<image>", "images": ["large.png"]}, f"have {MAX_BYTES + 1} bytes, more than {MAX_BYTES}"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            r"a part of a message is neither \{type: text, text: text\} nor \{type: image\}",
        ),
    ],
)
def test_a_bad_row_of_images_is_named_by_line_and_field(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(16, 16))
    with (tmp_path / "large.png").open("wb") as large:
        large.truncate(MAX_BYTES + 1)
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=rf"p\.jsonl, line 2.*{complaint}"):
        load(path)


# --- prompts ----------------------------------------------------------------------------------------


def encoder(path: Path) -> PromptEncoder:
    return PromptEncoder(ChatTokenizer(write_seeing(path)), TOKENS)


def test_a_prompt_carries_its_files_and_a_placeholder_for_each_token(tmp_path: Path) -> None:
    files = [picture(36, 20), picture(9, 9, kind="JPEG")]
    for name, file in zip(("a.png", "b.jpg"), files, strict=True):
        (tmp_path / name).write_bytes(file)
    path = write(tmp_path / "p.jsonl", {"prompt": "x<image>y<image>z", "images": ["a.png", "b.jpg"], "level": 3})
    renderer = PromptRenderer(encoder(tmp_path / "model"), 64)
    prompt = renderer.render(load(path)[0], 2)
    assert prompt is not None
    assert list(prompt.images) == files
    assert [(said.role, said.content) for said in prompt.messages] == [("user", "x<image>y<image>z")]
    assert list(prompt.metadata) == ["level"]
    ids = np.frombuffer(prompt.token_ids, "<i4").tolist()
    shown = [PAD] * TOKENS.number(36, 20), [PAD] * TOKENS.number(9, 9)
    assert ids.count(PAD) == len(shown[0]) + len(shown[1]) == 8 + 1
    place = ids.index(START)
    assert ids[place : place + 10] == [START, *shown[0], END]
    assert PromptRenderer(encoder(tmp_path / "model"), len(ids) - 1).render(load(path)[0], 0) is None


def test_a_text_that_spells_the_placeholder_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(16, 16))
    path = write(tmp_path / "p.jsonl", {"prompt": "<|image_pad|> <image>", "images": ["a.png"]})
    with pytest.raises(
        InvalidInputError, match=r"p\.jsonl, line 1: .* has 2 tokens that stand for an image .* and 1 images"
    ):
        encoder(tmp_path / "model").encode(load(path)[0])


@pytest.mark.parametrize("damage", ["broken", "changed"])
def test_a_file_that_is_not_what_it_was_is_refused_by_its_line(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"x" * 99 if damage == "broken" else picture(16, 16))
    (prompt,) = load(write(tmp_path / "p.jsonl", {"prompt": "<image>", "images": ["a.png"]}))
    if damage == "changed":
        file.write_bytes(picture(32, 32))
    complaint = {"broken": "cannot be read", "changed": "when the run began"}[damage]
    with pytest.raises(InvalidInputError, match=rf"p\.jsonl, line 1: .*{complaint}"):
        encoder(tmp_path / "model").encode(prompt)


def test_a_row_that_cannot_be_shown_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(16, 16))
    (tmp_path / "cut.png").write_bytes(picture(40, 40)[:-300])
    good: dict[str, Any] = {"prompt": "<image>", "images": ["a.png"]}
    bad: list[dict[str, Any]] = [
        {"prompt": "<image>", "images": ["cut.png"]},
        {"prompt": "what is <|image_pad|>?"},
    ]
    renderer = PromptRenderer(encoder(tmp_path / "model"), 64)

    def prompts(*rows: dict[str, Any]) -> PromptSequence:
        return PromptSequence(load(write(tmp_path / "p.jsonl", *rows)), renderer, seed=0, shuffle=False)

    mixed = prompts(good, *bad, good)
    assert [mixed.next().uid for _ in range(3)] == ["1", "4", "1"]
    assert (mixed.cursor.num_unshown, mixed.cursor.num_too_long) == (2, 0)
    assert Cursor.decode(mixed.cursor.encode()) == mixed.cursor
    assert Cursor.decode(b"[1, 2, 3]") == Cursor(1, 2, 3), "what runs wrote before there were images"
    with pytest.raises(ConfigError, match=r"no prompt of data\.train .* has images to show; .*line 2: the rendered"):
        prompts(*bad).next()


def test_an_image_that_cannot_be_read_now_is_waited_for(
    tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    rows = [{"prompt": "<image>", "images": [f"{number}.png"]} for number in range(3)]
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(16, 16))
    raw = load(write(tmp_path / "p.jsonl", *rows))
    prompts = PromptSequence(raw, PromptRenderer(encoder(tmp_path / "model"), 64), seed=0, shuffle=False)
    (tmp_path / "1.png").rename(tmp_path / "away.png")
    settings = make_settings(algorithm={"groups_per_batch": 3})
    policy, admitted = admission_policy(settings, PromptBytes(0)), list[str]()
    ledger = SimpleNamespace(admit_all=lambda found: admitted.extend(each.group.prompt.uid for each in found))
    position, threads = RunPosition(published_step=0), StoreThreads()

    async def admit() -> None:
        intake = Intake(
            settings,
            cast(Any, ledger),
            threads,
            prompts,
            policy,
            RunBoard(),
            Assembly(policy),
            lambda: 0,
            cast(Any, SimpleNamespace(position=position, backlog=(), retained_bytes=0)),
        )
        running = asyncio.create_task(intake.run())
        await until(lambda: "1.png cannot be read: No such file" in intake.trouble)
        assert admitted == ["1"], "those before it are not lost"
        (tmp_path / "away.png").rename(tmp_path / "1.png")
        await until(lambda: admitted == ["1", "2", "3"])
        await until(lambda: intake.trouble == "")
        running.cancel()

    asyncio.run(admit())
    threads.close()
    assert prompts.cursor.num_unshown == 0


def test_a_held_out_set_keeps_no_files_and_opens_none(
    tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    (tmp_path / "a.png").write_bytes(picture(36, 20)[:200])  # whole as far as its head: all that is looked at
    write(
        tmp_path / "held.jsonl",
        {"prompt": "say", "ground_truth": "1"},
        {"prompt": "<image>", "ground_truth": "1", "images": ["a.png"]},
    )
    settings = make_settings(
        data={"train": "p.jsonl", "images_field": "images"},
        evaluation={"sets": {"held": {"path": str(tmp_path / "held.jsonl")}}},
    )
    (held_out,) = load_sets(settings, PromptRenderer(encoder(tmp_path / "model"), 64))
    assert [list(prompt.images) for prompt in held_out.prompts] == [[], []]
    assert {place: [file.path for file in files] for place, files in held_out.images.items()} == {
        1: [tmp_path / "a.png"]
    }


def test_the_probe_leaves_out_the_tokens_of_images(tmp_path: Path, make_settings: Callable[..., RunSettings]) -> None:
    (tmp_path / "a.png").write_bytes(picture(36, 20))
    path = write(tmp_path / "p.jsonl", {"prompt": "see <image>", "images": ["a.png"]})
    prompts = PromptSequence(load(path), PromptRenderer(encoder(tmp_path / "model"), 64), seed=0, shuffle=False)
    probe = make_probe(make_settings(), prompts, TOKENS)
    ids = np.frombuffer(probe.token_ids.data, "<i4").tolist()
    assert START in ids
    assert PAD not in ids


def test_a_run_of_text_looks_for_no_image_processor(tmp_path: Path, make_settings: Callable[..., RunSettings]) -> None:
    write_tokenizer(tmp_path)
    assert PromptEncoder.of(make_settings(), ChatTokenizer(tmp_path)).visual_tokens is None


def test_images_are_a_column_of_their_bytes() -> None:
    files = [b"\x89PNG", b""]
    column = np.frombuffer(trajectory_pb2.Images(files=files).SerializeToString(), np.uint8)
    assert list(trajectory_pb2.Images.FromString(column.tobytes()).files) == files
    assert trajectory_pb2.Images().ByteSize() == 0


def test_check_tells_what_prompts_show_and_names_the_line_of_a_broken_file(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    write_seeing(tmp_path / "model", {"eos_token_id": 2, "architectures": ["Qwen2_5_VLForConditionalGeneration"]})
    for name, file in (("a.png", picture(36, 20)), ("b.png", b"x" * 500)):
        (tmp_path / name).write_bytes(file)

    def told(*names: str) -> str:
        rows = [{"prompt": "<image>?", "images": [name], "ground_truth": "4"} for name in names]
        write(tmp_path / "train.jsonl", *rows)
        out = io.StringIO()
        check(load_settings(config, ["data.images_field=images", "data.max_prompt_tokens=64"]), out)
        return out.getvalue()

    whole = told("a.png", "a.png")
    assert "they show 2 images (data.images_field), those of one prompt up to 8 of its tokens and 0.0 MiB" in whole
    assert "images 0.0 MiB in each of its rows, in the mean" in whole
    assert "<|vision_start|><|image_pad|><|vision_end|>?" in whole, "the first prompt as the template shows it"
    mixed = told("b.png", "a.png")
    assert "NOTE data.train: of the first 2 prompts 1 cannot be shown and will be left out; the first: " in mixed
    assert "train.jsonl, line 1: an image cannot be read (UnidentifiedImageError" in mixed
    assert "data.train: none of the 1 prompts of " in told("b.png")
    write_seeing(tmp_path / "model", {"model_type": "qwen3"})
    assert "data.images_field: model.path" in told("a.png")


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("MPO", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("GIF", "image/gif"),
        ("BMP", "image/bmp"),
        ("TIFF", "image/tiff"),
        ("JPEG2000", "image/jp2"),
        ("AVIF", "image/avif"),
        ("PPM", "image/x-portable-anymap"),
    ],
)
def test_a_file_is_opened_and_named_by_what_it_holds(kind: str, named: str) -> None:
    file = io.BytesIO()
    first, second = (Image.open(io.BytesIO(picture(8, 9, seed))) for seed in range(2))
    first.save(file, kind, **{"save_all": True, "append_images": [second]} if kind == "MPO" else {})
    assert Image.open(file).format == kind
    assert media_type(file.getvalue()) == named
    assert open_image(file.getvalue()).size == (8, 9)
    with pytest.raises(InvalidInputError, match="an image cannot be read"):
        media_type(b"hello")


def test_a_row_s_messages_show_its_images_as_openai_s_clients_send_them() -> None:
    said = (Message("system", "look"), Message("user", "<image>or <image>?"), Message("user", "<image>"))
    images = (Shown(b"a"), Shown(b"b", "image/jpeg"), Shown(b"c"))

    def shown(kind: str, data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}

    texts = [{"type": "text", "text": text} for text in ("or ", "?")]
    assert Task("u", said, images=images).chat_messages() == [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [shown("png", "YQ=="), texts[0], shown("jpeg", "Yg=="), texts[1]]},
        {"role": "user", "content": [shown("png", "Yw==")]},
    ]
    assert Task("u", said).chat_messages()[1] == {"role": "user", "content": "<image>or <image>?"}


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is here")
def test_a_rollout_that_sees_is_refused_where_torchvision_is_not(
    tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    model = {"path": str(write_seeing(tmp_path / "model"))}
    with pytest.raises(ConfigError, match="is a model of text and images, whose processor in vLLM needs torchvision"):
        check_engine(make_settings(model=model))


@pytest.mark.parametrize("name", ["mm_processor_cache_gb", "mm_processor_kwargs", "mm_device_do_normalize"])
def test_an_argument_that_would_change_what_is_seen_is_refused(
    make_settings: Callable[..., RunSettings], name: str
) -> None:
    with pytest.raises(ValidationError, match=f"{name}: "):
        make_settings(rollout={"engine": {name: 1}})
