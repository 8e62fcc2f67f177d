"""Where ranks stand and what they keep, as far as one process tells; with four ranks:
tests/integration/test_parallel.py.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.data.model.trainable import check_parallel
from rolecall.errors import ConfigError
from rolecall.settings import ActorSection, LayoutSection, ParallelSection
from rolecall.telemetry import Metrics
from rolecall.training.model.box import Box
from rolecall.training.model.sequence_parallel import SequenceShare
from rolecall.training.ranks.command_group import CommandGroup

SHAPE = (5, 4)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Parts of a tensor of SHAPE, empty ones too."""
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SHAPE]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


@given(boxes(), boxes())
def test_what_two_boxes_share_is_copied_from_one_into_the_other(held: Box, mine: Box) -> None:
    full = torch.arange(20).reshape(SHAPE)
    expected = torch.full(SHAPE, -1)
    inside = torch.zeros(SHAPE, dtype=torch.bool)
    inside[held.slices] = True
    expected[inside] = full[inside]
    local = torch.full(mine.shape, -1)
    common = held.within(mine)
    if common is not None:
        local[common.relative_to(mine.start).slices] = full[held.slices][common.relative_to(held.start).slices]
    assert torch.equal(local, expected[mine.slices])
    assert held.empty == (not inside.any())


def test_a_number_by_itself_is_a_box_without_dimensions() -> None:
    assert Box((), ()).within(Box((), ())) == Box((), ())
    assert not Box((), ()).empty


@given(st.integers(1, 40), st.integers(1, 6))
def test_runs_cover_every_token_once_and_are_equally_long(num_tokens: int, size: int) -> None:
    nobody = dist.ProcessGroup(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    shares = [SequenceShare(nobody, rank, size) for rank in range(size)]
    tokens_N = torch.arange(1, num_tokens + 1)
    runs = [share.own(tokens_N) for share in shares]
    assert len({run.shape for run in runs}) == 1
    assert torch.equal(torch.cat(runs)[:num_tokens], tokens_N)
    assert not torch.cat(runs)[num_tokens:].any()
    assert [list(share.run(num_tokens)) for share in shares] == [
        list(range(len(run) * rank, len(run) * (rank + 1))) for rank, run in enumerate(runs)
    ]


@pytest.mark.parametrize(
    ("parallel", "fields"),
    [
        ({"tensor": 3}, ["parallel.tensor 3", "num_attention_heads 8"]),
        ({"tensor": 4}, ["parallel.tensor 4", "num_key_value_heads 2"]),
        ({"sequence": 3}, ["parallel.sequence 3", "8 query and 2 key heads"]),
        ({"tensor": 2, "sequence": 8}, ["parallel.sequence 8", "4 query and 1 key heads", "over parallel.tensor 2"]),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused_by_both_names(
    tmp_path: Path, parallel: dict[str, int], fields: list[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 96})
    )
    with pytest.raises(ConfigError) as error:
        check_parallel(tmp_path, ParallelSection(**parallel))
    assert all(field in error.value.message for field in fields), error.value.message


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"sequence": 2}])
def test_recurrent_layers_are_not_shared(tmp_path: Path, parallel: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "model_type": "qwen3_next"}))
    check_parallel(tmp_path, ParallelSection())
    with pytest.raises(ConfigError, match=r"recurrent layers, which ranks do not share: set parallel\.tensor"):
        check_parallel(tmp_path, ParallelSection(**parallel))


def test_the_matrices_of_a_gpt_oss_are_not_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "model_type": "gpt_oss"}))
    check_parallel(tmp_path, ParallelSection(sequence=2))
    with pytest.raises(ConfigError, match=r"transformers has no plan to cut: set parallel\.tensor to 1"):
        check_parallel(tmp_path, ParallelSection(tensor=2))


def test_a_vocabulary_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "vocab_size": 97}))
    with pytest.raises(ConfigError, match=r"parallel\.tensor 2 does not divide the model's vocab_size 97"):
        check_parallel(tmp_path, ParallelSection(tensor=2))


@pytest.mark.parametrize("parallel", [{}, {"sequence": 2}, {"sequence": 8}, {"tensor": 2, "sequence": 4}])
def test_key_heads_may_divide_or_be_divided(tmp_path: Path, parallel: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 96})
    )
    check_parallel(tmp_path, ParallelSection(**parallel))


def test_a_number_of_ranks_that_cannot_be_laid_out_is_refused_in_the_settings() -> None:
    with pytest.raises(
        ValidationError,
        match=r"num_ranks is 6, not a multiple of parallel\.replicate x sequence x tensor x pipeline = 4",
    ):
        ActorSection(num_ranks=6, parallel=ParallelSection(sequence=2, tensor=2))
    assert ActorSection(num_ranks=8, parallel=ParallelSection(replicate=2, tensor=2)).num_shards == 4


def test_neighbouring_ranks_of_each_stage_form_a_slot_whose_first_speaks() -> None:
    groups = [CommandGroup(rank, 4, None, parallel=LayoutSection(tensor=2)) for rank in range(4)]
    assert [(group.slot, group.num_slots, group.is_slot_leader) for group in groups] == [
        (0, 2, True),
        (0, 2, False),
        (1, 2, True),
        (1, 2, False),
    ]
    staged = [CommandGroup(rank, 8, None, parallel=LayoutSection(tensor=2, pipeline=2)) for rank in range(8)]
    assert [group.slot for group in staged] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [group.rank for group in staged if group.is_slot_leader] == [0, 2]


def test_whose_numbers_are_counted_already_tells_only_the_extremes() -> None:
    metrics = Metrics()
    metrics.sum("tokens", 3)
    metrics.mean("loss", 1.0)
    metrics.max("peak", 5)
    metrics.min("least", 2)
    assert metrics.extremes().values() == {"least": 2.0, "peak": 5.0}
