"""What of a store a run's rows may take."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.columns import COLUMNS, row_bytes
from rolecall.data.dataset import RawPrompt
from rolecall.data.images.files import ImageFile
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.settings.services import STORE_SHARE
from rolecall.store.budget import PromptBytes, StoreBudget, batch_bytes
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from services.controller.groups.prompts import PromptRenderer
from tests.tiny_tokenizer import write_tokenizer


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_the_store_must_hold_the_batches_in_flight_and_one_that_no_checkpoint_covers_yet(
    make_settings: Callable[..., RunSettings], max_staleness: int
) -> None:
    """At staleness S batches k .. k + S are in flight while the rows of k - 1 wait for a checkpoint: S + 2."""
    algorithm = {"groups_per_batch": 2, "max_staleness": max_staleness}
    num_batches = max_staleness + 2
    enough = int(
        num_batches * StoreBudget.of(make_settings(algorithm=algorithm), PromptBytes(0)).batch_bytes / STORE_SHARE
    )
    assert (
        StoreBudget.of(make_settings(algorithm=algorithm, store={"max_bytes": enough + 4}), PromptBytes(0)).num_batches
        == num_batches
    )
    with pytest.raises(ConfigError, match=f"cannot hold {num_batches} batches"):
        StoreBudget.of(make_settings(algorithm=algorithm, store={"max_bytes": enough - 4}), PromptBytes(0))


@pytest.mark.parametrize("num_tokens", [1, 1000])
def test_a_row_is_counted_with_every_column_of_the_schema_its_text_and_its_overhead(num_tokens: int) -> None:
    per_token = sum(
        np.dtype(column.dtype).itemsize * (3 if len(column.shape) == 2 else 1)
        for column in COLUMNS.values()
        if column.per_token
    )
    # the text takes about 4 bytes a token, keys and meta 2 KiB a row
    counted = row_bytes(num_tokens, list(COLUMNS.values()), dict.fromkeys(COLUMNS, 3))
    assert counted == num_tokens * (per_token + 4) + 2048


def test_a_group_at_its_longest_holds_the_largest_prompt(make_settings: Callable[..., RunSettings]) -> None:
    """Once in its first row, and once more in the stream while it is being committed; a trained one in its row
    alone.
    """
    settings = make_settings(algorithm={"groups_per_batch": 4})
    without, with_it = StoreBudget.of(settings, PromptBytes(0)), StoreBudget.of(settings, PromptBytes(10_000))
    assert (with_it.group_bytes - without.group_bytes, with_it.batch_bytes - without.batch_bytes) == (20_000, 80_000)
    batch = TrainBatch(rows=[RowRef(num_tokens=128)] * 8, gids=[1, 2])
    assert batch_bytes(settings, batch, PromptBytes(10_000)) - batch_bytes(settings, batch, PromptBytes(0)) == 20_000


def test_a_trained_batch_is_counted_row_by_row_and_at_once(make_settings: Callable[..., RunSettings]) -> None:
    """At once, for the controller counts it on its event loop: row by row the columns of the run are listed 20,000
    times.
    """
    settings, lengths = make_settings(), range(1, 20_001)
    batch = TrainBatch(rows=[RowRef(num_tokens=length) for length in lengths])
    called: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.update([frame.f_code.co_name] if event == "call" else []))
    try:
        counted = batch_bytes(settings, batch, PromptBytes(0))
    finally:
        sys.setprofile(before)
    assert called["row_bytes"] == 1
    assert counted == sum(row_bytes(length, settings.columns, {}) for length in (1, 10_000, 10_001, 20_000)) * 5000


def test_prompts_too_large_for_the_store_are_refused_and_named(make_settings: Callable[..., RunSettings]) -> None:
    """A megabyte of tests for each prompt: what the responses take would fit."""
    settings = make_settings(algorithm={"groups_per_batch": 64}, store={"max_bytes": 128 * 2**20})
    StoreBudget.of(settings, PromptBytes(1000))
    with pytest.raises(ConfigError, match=r"twice the largest prompt of 1000000 included.*data\.train"):
        StoreBudget.of(settings, PromptBytes(1_000_000))
    rows = [
        RawPrompt(str(size), (("user", "x" * size),), "", {}, f"train.jsonl, line {size}") for size in (9, 10**6, 7)
    ]
    with pytest.raises(ConfigError, match=r"\(train\.jsonl, line 1000000\) included"):
        StoreBudget.of(settings, PromptBytes.largest(rows, 64))


def test_one_large_image_is_counted_once_a_batch(make_settings: Callable[..., RunSettings]) -> None:
    """In every row of one group, and in the stream; small ones beside it as what they are."""
    settings = make_settings(algorithm={"groups_per_batch": 4}, sampling={"num_responses": 2})
    sizes = [92, 9_992, 92, 92, 192, 92]
    prompts = [
        RawPrompt(str(number), (("user", "?"),), "", {}, images=(ImageFile(size),)) for number, size in enumerate(sizes)
    ]
    counted = PromptBytes.largest(prompts, 4)
    assert counted.images == (10_000 + 200 + 100 + 100) / 4
    assert PromptBytes.largest(prompts[:2], 4).images == (10_000 + 100) / 2, "each is there twice"
    without = StoreBudget.of(settings, PromptBytes(counted.text))
    assert StoreBudget.of(settings, counted).batch_bytes - without.batch_bytes == 3 * 10_400
    batch = TrainBatch(rows=[RowRef(num_tokens=128)] * 8, gids=[1, 2, 3, 4])
    held = [batch_bytes(settings, batch, each) for each in (counted, PromptBytes(counted.text))]
    assert held[0] - held[1] == 2 * 10_400
    large = PromptBytes(0, 100 * 2**20)
    with pytest.raises(
        ConfigError, match=r"images of 104857600 \(data\.images_field\).*sampling\.num_responses, the file"
    ):
        StoreBudget.of(settings, large)


def test_every_row_has_room_for_what_its_environment_may_show(make_settings: Callable[..., RunSettings]) -> None:
    shown = {"address": "127.0.0.1:1", "max_image_bytes": 1000}
    section = {"algorithm": {"groups_per_batch": 4}, "sampling": {"num_responses": 2}}
    settings, without = (
        make_settings(**section, environments={"game": {**shown, "max_image_bytes": size}}) for size in (1000, None)
    )
    budgets = [StoreBudget.of(each, PromptBytes(10)).batch_bytes for each in (settings, without)]
    columns = {column.name for column in settings.columns} - {column.name for column in without.columns}
    assert columns == {"images"}
    assert budgets[0] - budgets[1] >= 4 * 2 * 1000
    large = make_settings(**section, environments={"game": {**shown, "max_image_bytes": 2**30}})
    with pytest.raises(ConfigError, match=r"environments\.\*\.max_image_bytes 1073741824.*, environments\.\*\.max_im"):
        StoreBudget.of(large, PromptBytes(10))


def test_a_trained_row_is_counted_with_what_its_environment_showed(make_settings: Callable[..., RunSettings]) -> None:
    """Counted by their bound, rows of text would ask for checkpoints that nobody asked for."""
    settings = make_settings(environments={"game": {"address": "127.0.0.1:1", "max_image_bytes": 2_000_000}})
    batch, text = (
        TrainBatch(rows=[RowRef(num_tokens=128, shown_image_bytes=size)] * 8, gids=[1, 2]) for size in (5000, 0)
    )
    counted, of_text = (batch_bytes(settings, each, PromptBytes(10)) for each in (batch, text))
    assert counted - of_text == 8 * 5000
    assert of_text < 8 * 128 * 1024


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"tests": "x" * 100_000},
        {"tests": [{"in": [1, 2.5, None, True], "out": "é" * 300}] * 200, "level": 3},
        {"deep": {"er": {"and": {"deeper": list(range(5000))}}}, "ключ": ["значение"]},
    ],
)
def test_a_prompt_takes_no_more_than_is_counted_for_it(tmp_path: Path, metadata: dict[str, Any]) -> None:
    write_tokenizer(tmp_path)
    raw = RawPrompt("17", (("system", "be short"), ("user", "1 + 1 =")), "2", metadata)
    prompt = PromptRenderer(PromptEncoder(ChatTokenizer(tmp_path)), 1000).render(raw, 3)
    assert prompt is not None
    prompt.ClearField("token_ids")
    assert prompt.ByteSize() <= raw.num_bytes <= 2 * prompt.ByteSize() + 200
