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


def test_a_training_outlives_a_reader_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    settings = SftSettings.model_validate(
        {
            "run": {"name": "test", "dir": tmp_path / "run", "num_steps": 2},
            "model": {"path": tmp_path},
            "data": {"train": tmp_path / "train.jsonl", "batch_size": 1},
            "trackers": {"tensorboard": False},
        }
    )
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
