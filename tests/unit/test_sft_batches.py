"""Which examples a step of `rolecall sft` takes, and how long it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.settings import SftSettings, load_sft_settings
from rolecall.training.sft.__main__ import START_TIMEOUT_S, TOKENIZED_BYTES_PER_S, start_timeout_s
from rolecall.training.sft.train import Batches


@given(num_examples=st.integers(1, 40), batch_size=st.integers(1, 12), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_takes_every_example_once(num_examples: int, batch_size: int, seed: int, shuffle: bool) -> None:
    batches = Batches(num_examples, batch_size, seed=seed, shuffle=shuffle)
    for epoch in range(3):
        taken = [batches.of_step(epoch * batches.num_per_epoch + index) for index in range(batches.num_per_epoch)]
        assert sorted(index for batch in taken for index in batch) == list(range(num_examples))
        assert all(len(batch) == batch_size for batch in taken[:-1])


@given(step=st.integers(0, 60), seed=st.integers(0, 99))
def test_a_step_takes_the_same_whatever_was_asked_before(step: int, seed: int) -> None:
    walked, jumped = (Batches(23, 4, seed=seed, shuffle=True) for _ in range(2))
    for earlier in range(step):
        walked.of_step(earlier)
    assert walked.of_step(step) == jumped.of_step(step)


def test_epochs_differ_in_order_unless_the_files_order_is_kept() -> None:
    shuffled, kept = (Batches(50, 50, seed=0, shuffle=shuffle) for shuffle in (True, False))
    assert shuffled.of_step(0) != shuffled.of_step(1)
    assert kept.of_step(0) == kept.of_step(7) == list(range(50))


def tree(tmp_path: Path, **run: Any) -> dict[str, Any]:
    return {
        "run": {"name": "warm", "dir": str(tmp_path / "run"), **run},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "train.jsonl"), "batch_size": 2},
    }


def test_the_length_is_given_in_steps_or_in_epochs(tmp_path: Path) -> None:
    assert SftSettings.model_validate(tree(tmp_path, num_epochs=2)).run.checkpoints == str(
        tmp_path / "run" / "checkpoints"
    )
    for run in ({}, {"num_epochs": 2, "num_steps": 4}):
        with pytest.raises(ValueError, match=r"one of run\.num_steps and run\.num_epochs"):
            SftSettings.model_validate(tree(tmp_path, **run))


def test_a_length_on_the_command_line_goes_before_the_other_in_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "sft.yaml").write_text(json.dumps(tree(tmp_path, num_epochs=2)))
    run = load_sft_settings(file, ["run.num_steps=4"]).run
    assert (run.num_steps, run.num_epochs) == (4, None)


def test_a_decay_that_does_not_fit_is_told_at_once_where_the_steps_are_known(tmp_path: Path) -> None:
    optimizer = {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 2}
    for num_steps in (5, 4):
        settings = tree(tmp_path, num_steps=num_steps) | {"actor": {"optimizer": optimizer}}
        if num_steps < 5:
            with pytest.raises(ValueError, match=r"actor\.optimizer\.warmup_steps \+ decay_steps = 5 exceed the 4"):
                SftSettings.model_validate(settings)
        else:
            SftSettings.model_validate(settings)
    in_epochs = SftSettings.model_validate(tree(tmp_path, num_epochs=1) | {"actor": {"optimizer": optimizer}})
    with pytest.raises(ValueError, match="exceed the 4 optimizer steps"):
        in_epochs.check_schedule(4)


def test_ranks_wait_longer_for_each_other_where_there_is_more_to_tokenize(tmp_path: Path) -> None:
    settings = SftSettings.model_validate(
        {**tree(tmp_path, num_steps=1), "evaluation": {"path": str(tmp_path / "held")}}
    )
    assert start_timeout_s(settings) == START_TIMEOUT_S  # who reads the files complains of one that is not there
    for name, num_bytes in (("train.jsonl", 10**9), ("held", 10**8)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(num_bytes)
    assert start_timeout_s(settings) == START_TIMEOUT_S + 1.1e9 / TOKENIZED_BYTES_PER_S
