"""The report of `rolecall sft`: training goes on whoever looks on."""

import io
import os
import sys
from pathlib import Path

import pytest

from rolecall.data.sft_examples import TokenizedExamples
from rolecall.settings import SftSettings
from rolecall.trackers import End
from rolecall.training.sft.report import SftReport


def settings_in(folder: Path, length: str = "num_steps") -> SftSettings:
    (folder / "run").mkdir(exist_ok=True)
    return SftSettings.model_validate(
        {
            "run": {"name": "test", "dir": folder / "run", length: 2},
            "model": {"path": folder},
            "data": {"train": folder / "train.jsonl", "batch_size": 1},
            "trackers": {"tensorboard": False},
        }
    )


def test_a_training_without_a_step_left_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length, step, told in (
        ("num_steps", 1, "from step 1\n"),
        ("num_steps", 3, "from step 3, which is all; a larger run.num_steps goes on\n"),
        ("num_epochs", 3, "from step 3, which is all; a larger run.num_epochs goes on\n"),
    ):
        report = SftReport(settings_in(tmp_path, length), 2, 2)
        report.begin(step, TokenizedExamples((), 0, ""))
        report.close(End.DONE)
        assert told in capsys.readouterr().out


def test_a_training_outlives_a_reader_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)
    read, write = os.pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(write, "w")))
    monkeypatch.setattr(sys, "stdout", stream)
    report = SftReport(settings, 2, 2)
    os.close(read)
    report.begin(0, TokenizedExamples((), 0, ""))
    for step in (1, 2):
        report.log(step, {"eval/loss": 1.0})
    report.close(End.DONE)
    stream.close()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
