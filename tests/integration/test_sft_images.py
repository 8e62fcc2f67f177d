"""Images in examples of `rolecall sft`: what is computed of them, against plain transformers; who reads which, and
when; and the command itself, which learns what only the images say.
"""

import json
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rolecall.commands.cli import main
from rolecall.data import sft_examples
from rolecall.errors import CheckpointMismatchError, ConfigError, StorageUnavailableError
from rolecall.settings import LoraSection, SftRunSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.images import ImageReader
from rolecall.training.packing.pack import local_counts
from rolecall.training.sft import minibatches as sft_minibatches
from rolecall.training.sft.checkpoints import SftCheckpoints
from tests import forks
from tests.integration.fsdp_oracle import assert_same_weights
from tests.integration.fsdp_ranks import make_engine
from tests.integration.sft_ranks import (
    SECTION,
    context_of,
    examples_of,
    minibatches_of,
    read_on_rank,
    rows_of,
    train_on_rank,
)
from tests.integration.test_sft import exported, metrics_of, sft, write_config
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import OTHER_WIDE, SQUARE, TALL, WIDE, oracle_logprobs, oracle_model, rounding

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.timeout(400)]

FAMILIES: tuple[VisionFamily, ...] = get_args(VisionFamily)
BROKEN = 6
"""The example whose image is broken behind its head."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_vision(root / family, family) for family in FAMILIES}


def asked(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def write_examples(folder: Path) -> Path:
    """Examples with one image, with several over many turns, and with none; the last one's is broken behind its
    head.
    """
    files = {"wide": WIDE, "other": OTHER_WIDE, "square": SQUARE, "tall": TALL, "broken": WIDE[:400]}
    for name, file in files.items():
        (folder / f"{name}.png").write_bytes(file)
    talk = [
        asked("<image>what?"),
        asked("wide", "assistant"),
        asked("<image> and <image>", "tool"),
        asked("more", "assistant"),
    ]
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>a", "images": ["wide.png"], "response": "yes"},
        {"prompt": "<image>a", "images": ["other.png"], "response": "no"},
        {"prompt": "no image", "response": "none"},
        {"prompt": talk, "images": ["wide.png", "square.png", "tall.png"]},
        {"prompt": "<image>b", "images": ["wide.png"], "response": "yes"},
        {"prompt": "none, too", "response": "text"},
        {"prompt": "<image>c", "images": ["broken.png"], "response": "lost"},
    ]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- what is computed -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_agree_with_transformers_one_example_at_a_time(
    paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    path, numbers = paths[family], list(range(BROKEN))
    examples = examples_of(path, write_examples(tmp_path))
    engine = make_engine(path, optimizer=SECTION)
    (made,) = minibatches_of(engine, path, examples).of([numbers])
    microbatches, rows = made.minibatch.microbatches, rows_of(examples, numbers)
    assert len(microbatches) > 1, "the examples are packed into several"
    assert made.minibatch.counts == local_counts(rows)
    oracle = oracle_model(path)
    logprobs = torch.stack([oracle_logprobs(oracle, path, row, temperature=1.0).sum() for row in rows])
    total = 0.0
    for outputs in engine.forward(microbatches):
        assert isinstance(outputs, TokenOutputs)
        total += float(outputs.logprobs_N.sum())
    assert total == pytest.approx(float(logprobs.detach().sum()), rel=1e-5)
    engine.forward_backward(microbatches, SftObjective(made.minibatch.counts))
    (-logprobs.sum() / made.minibatch.counts.num_tokens).backward()  # type: ignore[no-untyped-call]
    expected = dict(oracle.named_parameters())
    for name, parameter in engine._model.hf.named_parameters():
        assert parameter.grad is not None
        gradient = expected[name].grad
        assert gradient is not None
        bound = rounding(name) * float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=bound)
        if "visual" in name and "bias" not in name:
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("options", [{"freeze_vision_tower": True}, {"lora": LoraSection(rank=2, alpha=4.0)}])
def test_a_tower_that_is_to_stay_stays_and_so_it_does_beneath_adapters(
    paths: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    path = paths["qwen2_5_vl"]
    engine = make_engine(path, optimizer=SECTION, **options)
    (made,) = minibatches_of(engine, path, examples_of(path, write_examples(tmp_path))).of([[0, 3]])
    before = {name: each.detach().clone() for name, each in engine._model.hf.named_parameters()}
    engine.forward_backward(made.minibatch.microbatches, SftObjective(made.minibatch.counts))
    engine.step()
    moved = {name for name, each in engine._model.hf.named_parameters() if not torch.equal(each, before[name])}
    assert moved
    assert not any("visual" in name for name in moved)


def test_two_ranks_train_like_one_also_where_one_has_no_image_and_where_one_has_a_broken_one(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    job = {
        "model": str(paths["qwen3_vl"]),
        "train": str(write_examples(tmp_path)),
        "batches": [[0, 1, 2, 3], [4, 2, 5], [2, 5], [0, BROKEN, 5], [BROKEN]],
        "options": {},
    }
    found = []
    for world_size in (1, 2):
        out = tmp_path / str(world_size)
        out.mkdir()
        more = {"world_size": world_size, "out": str(out), "rendezvous": str(out / "rendezvous")}
        forks.run_ranks(out, world_size, train_on_rank, job | more)
        found.append([load_file(out / f"rank-{rank}.safetensors") for rank in range(world_size)])
    ((one,), (first, second)) = found
    for each in (one, first, second):
        assert each["unshown"].tolist() == [0, 0, 0, 1, 1]
    assert {int(each.pop("empty")) for each in (first, second)} != {int(one.pop("empty"))}, "a rank had no image"
    torch.testing.assert_close(first.pop("norms"), one.pop("norms"), rtol=1e-5, atol=1e-7)
    assert_same_weights(first, one, atol=2e-5)


@pytest.mark.parametrize(
    ("seen", "complaint"),
    [
        (WIDE, ""),
        (bytes(len(WIDE)), r"data\.train: ranks read .*\(to rank 1 \S+train\.jsonl, line 8: an image cannot be read"),
        (SQUARE, r"data\.train: ranks read other examples \(to rank 0 the image \S+late\.png has \d+ bytes\); give"),
    ],
)
def test_ranks_that_read_other_examples_end_before_they_train_on_other_rows(
    paths: dict[str, Path], tmp_path: Path, seen: bytes, complaint: str
) -> None:
    train = write_examples(tmp_path)
    with train.open("a") as file:
        file.write(json.dumps({"prompt": "<image>d", "images": ["late.png"], "response": "yes"}) + "\n")
    job = {"model": str(paths["qwen3_vl"]), "train": str(train), "late": (WIDE, seen), "world_size": 2}
    forks.run_ranks(tmp_path, 2, read_on_rank, job | {"out": str(tmp_path), "rendezvous": str(tmp_path / "meet")})
    for rank in range(2):
        found = (tmp_path / f"rank-{rank}").read_text()
        assert re.match(complaint, found) if complaint else not found


# --- who reads which, and when ----------------------------------------------------------------------


class Told(ImageReader):
    """A reader of images that tells how many it has read."""

    num_read = 0

    def read(self, files: Iterable[bytes]) -> Iterator[Any]:
        for image in super().read(files):
            self.num_read += 1
            yield image


def test_the_images_of_the_next_minibatch_are_read_while_one_is_computed_and_no_more(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path = paths["qwen3_vl"]
    reader = Told(path, torch.float32)
    made = minibatches_of(make_engine(path), path, examples_of(path, write_examples(tmp_path)), reader)
    steps = made.of([[0], [3], [1]])
    first = weakref.ref(next(steps))
    assert first() is None, "it is kept by nobody but who computes it"
    deadline = time.monotonic() + 60
    while reader.num_read < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert reader.num_read == 4, "the first's image and the next one's three"
    next(steps)
    assert len(list(steps)) == 1
    assert reader.num_read == 5


def padded(file: bytes) -> bytes:
    """The same image in a file of a length that others have, too."""
    return file + bytes(max(len(WIDE), len(SQUARE)) - len(file))


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        (padded(WIDE) + b"x", r"line 1: the image \S+wide\.png has \d+ bytes and had \d+ when the run began"),
        (b"", r"line 1: the image \S+wide\.png has 0 bytes"),
        (
            padded(SQUARE),
            r"line 1: its images \(\S+wide\.png\) are not those that it began with: they take other tokens",
        ),
    ],
)
def test_an_image_that_is_another_than_at_the_start_ends_the_run_by_name(
    paths: dict[str, Path], tmp_path: Path, now: bytes, complaint: str
) -> None:
    path, train = paths["qwen3_vl"], write_examples(tmp_path)
    (tmp_path / "wide.png").write_bytes(padded(WIDE))
    examples = examples_of(path, train)
    (tmp_path / "wide.png").write_bytes(now)
    with pytest.raises(ConfigError, match=complaint):
        next(minibatches_of(make_engine(path), path, examples).of([[2, 0]]))


def test_an_image_whose_disk_is_away_is_waited_for_and_not_for_ever(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = paths["qwen3_vl"]
    monkeypatch.setattr(sft_examples, "RETRY_S", 0.01)
    examples = examples_of(path, write_examples(tmp_path))
    away = tmp_path / "away.png"
    (tmp_path / "wide.png").rename(away)
    back = threading.Timer(0.5, lambda: away.rename(tmp_path / "wide.png"))
    back.start()
    (made,) = minibatches_of(make_engine(path), path, examples).of([[0]])
    back.join()
    assert made.num_unshown == 0
    monkeypatch.setattr(sft_examples, "AWAY_S", 0.1)
    (tmp_path / "wide.png").unlink()
    with pytest.raises(StorageUnavailableError, match=r"wide\.png cannot be read"):
        next(minibatches_of(make_engine(path), path, examples).of([[0]]))


def test_a_read_that_does_not_return_is_told_and_not_waited_for_for_ever(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, image = paths["qwen3_vl"], tmp_path / "wide.png"
    monkeypatch.setattr(sft_examples, "AWAY_S", 0.0)
    monkeypatch.setattr(sft_minibatches, "AWAY_S", 1)
    monkeypatch.setattr(sft_minibatches, "TOLD_S", 1)
    examples = examples_of(path, write_examples(tmp_path))
    image.unlink()
    os.mkfifo(image)  # opening it returns once somebody writes
    try:
        with pytest.raises(StorageUnavailableError, match=r"wide\.png cannot be read: no answer for 3 s"):
            next(minibatches_of(make_engine(path), path, examples).of([[0]]))
    finally:
        image.write_bytes(b"")
    assert "wide.png is being read for 1 s" in caplog.text


def test_a_checkpoint_names_the_image_that_is_another_or_what_else_makes_other_tokens(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path, train = paths["qwen3_vl"], write_examples(tmp_path)
    run = SftRunSection(name="warm", dir=tmp_path / "run", num_steps=1)
    context = context_of(make_engine(path))
    examples = examples_of(path, train)
    checkpoints = SftCheckpoints(run, context, examples)
    checkpoints.save(1)
    checkpoints.wait_until_written()
    assert SftCheckpoints(run, context, examples_of(path, train)).restore() == 1
    written = train.read_text()
    train.write_text(written.replace('"none"', '"nothing"'))
    with pytest.raises(CheckpointMismatchError, match=r"other tokens; .* tokenizer and function of data\.preprocess"):
        SftCheckpoints(run, context, examples_of(path, train)).restore()
    train.write_text(written)
    (tmp_path / "square.png").write_bytes(SQUARE + b"x")
    with pytest.raises(CheckpointMismatchError, match=r"files of 1 images, the first \S+square\.png; put them"):
        SftCheckpoints(run, context, examples_of(path, train)).restore()


# --- the command ------------------------------------------------------------------------------------

NUM_STEPS = 12
COLORS = {"R": (225, 45, 45), "Y": (250, 235, 60), "G": (40, 165, 75), "B": (45, 90, 225)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of one color, whose name is the answer; one picture is broken at its head, and one behind it. Held-out
    ones are bytes of a parquet file, and those two are among them, too.
    """
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    rows = []
    for number in range(80):
        letter = rng.choice("".join(COLORS))
        shade = tuple(min(255, max(0, value + rng.randint(-20, 20))) for value in COLORS[letter])
        Image.new("RGB", (16, 16), shade).save(folder / f"{number}.png")
        rows.append({"prompt": "<image>color?", "images": [f"{number}.png"], "response": letter})
    for number, num_bytes in ((0, 10), (1, 400)):
        (folder / f"{number}.png").write_bytes(WIDE[:num_bytes])
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:64]))
    held = [
        {**row, "images": [{"bytes": (folder / row["images"][0]).read_bytes(), "path": None}]}
        for row in rows[:2] + rows[64:]
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(held), folder / "heldout.parquet")
    return folder


def write_job(folder: Path, model: Path, data: Path, **more: Any) -> Path:
    sections: dict[str, Any] = {
        "run": {"name": "warm", "dir": "run", "num_steps": NUM_STEPS, "checkpoint_every_steps": 4},
        "data": {"train": str(data / "train.jsonl"), "images_field": "images", "max_tokens": 60, "batch_size": 16},
        "evaluation": {"path": str(data / "heldout.parquet"), "every_steps": 4},
        "actor": {"num_threads": 1, "token_budget": 400, "optimizer": {"learning_rate": 2e-3}},
    }
    return write_config(folder, model, data, **sections | more)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("model") / "seeing", "qwen3_vl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, seeing: Path, data: Path) -> tuple[Path, str]:
    """A `rolecall sft` on one rank that nothing disturbed: its configuration and what it said."""
    config = write_job(tmp_path_factory.mktemp("whole") / "job", seeing, data)
    return config, sft(config)


def test_it_learns_what_only_images_say(whole: tuple[Path, str], seeing: Path) -> None:
    config, said = whole
    assert "63 examples, 1 left out (images that cannot be shown), 12 steps" in said
    assert "data.train: 1 of the first examples cannot be shown and will be left out; the first: " in said
    heldout = metrics_of(config, "eval/loss")
    assert heldout[NUM_STEPS] < 0.5 * np.log(len(COLORS)) / 2 < heldout[0], "half of what is best without looking"
    assert sum(metrics_of(config, "sft/unshown").values()) == NUM_STEPS // 4, "once an epoch"
    assert metrics_of(config, "eval/unshown") == dict.fromkeys((0, 4, 8, 12), 2.0)
    log = (config.parent / "run" / "logs" / "sft.log").read_text()
    assert "line 1: an image cannot be read" in log
    assert "line 2: an image cannot be read" in log
    sample = json.loads((config.parent / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].count("<|image_pad|>") == 1
    assert not list((config.parent / "run").glob("*.images")), "put away for as long as it lives"
    before, after = load_file(seeing / "model.safetensors"), exported(config)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "visual" in name)


def test_stopped_and_resumed_it_has_the_losses_of_one_that_was_not_bit_by_bit(
    whole: tuple[Path, str], seeing: Path, data: Path, tmp_path: Path
) -> None:
    config = write_job(tmp_path / "job", seeing, data)
    sft(config, f"--run.num_steps={NUM_STEPS - 4}")
    assert f"from step {NUM_STEPS - 4}" in sft(config, "--resume")
    for name in ("sft/loss", "sft/grad_norm", "eval/loss"):
        assert metrics_of(config, name) == metrics_of(whole[0], name), name


def test_one_that_fails_leaves_no_images_behind(
    seeing: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = [{"prompt": "<image>", "images": [{"bytes": WIDE[:400], "path": None}], "response": "R"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(held), tmp_path / "heldout.parquet")
    config = write_job(tmp_path / "job", seeing, data, evaluation={"path": str(tmp_path / "heldout.parquet")})
    assert main(["sft", str(config)]) == 2
    assert "evaluation.path: no example has images that can be shown" in capsys.readouterr().err
    assert not list((tmp_path / "job" / "run").glob("*.images"))


@pytest.mark.thorough("test_two_ranks_train_like_one_also_where_one_has_no_image_and_where_one_has_a_broken_one")
def test_two_ranks_have_the_losses_of_one(whole: tuple[Path, str], seeing: Path, data: Path, tmp_path: Path) -> None:
    config = write_job(tmp_path / "job", seeing, data)
    sft(config, "--actor.num_ranks", "2")
    assert metrics_of(config, "sft/unshown") == metrics_of(whole[0], "sft/unshown")
    for name in ("sft/loss", "eval/loss", "sft/grad_norm"):
        assert metrics_of(config, name) == pytest.approx(metrics_of(whole[0], name), rel=1e-3), name


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("--actor.num_ranks=2 --actor.parallel.tensor=2", "parallel.tensor and parallel.sequence to 1"),
        ("--actor.num_ranks=2 --actor.parallel.sequence=2", "parallel.tensor and parallel.sequence to 1"),
        ("--actor.backend=megatron", "actor.backend megatron"),
        ("--data.images_field=pictures", "the messages show 1 images"),
    ],
)
def test_what_is_not_there_with_images_is_refused_before_anything_starts(
    paths: dict[str, Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    override: str,
    complaint: str,
) -> None:
    assert main(["sft", str(write_job(tmp_path / "job", paths["qwen3_vl"], data)), *override.split()]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "job" / "run").exists()
