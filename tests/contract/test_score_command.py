"""`rolecall score`: a file of responses through the run's own dispatcher, worker processes and checks."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from rolecall.data.images.files import ImageFile
from rolecall.data.images.tokens import run_lengths
from rolecall.reward import Scorer, description, one_by_one
from rolecall.scoring.scores import Score
from rolecall.settings import load_settings
from services.reward.score import items_of, main, scored
from tests.contract.reward_peers import serving
from tests.pictures import PAD, picture, write_seeing
from tests.twins.launched import write_light_config

PARTS = {
    "right": {"scorer": {"kind": "exact_match"}, "when": {"source": "sums"}},
    "json": {"scorer": {"kind": "json"}, "when": {"source": "code"}, "weight": 0.5},
    "short": {"scorer": {"kind": "length", "max_tokens": 4}, "weight": 0.0},
}
ROWS = [
    {"uid": "a", "prompt": "2 + 2", "ground_truth": ["4", "four"], "source": "sums", "response": ["four", "5"]},
    {"uid": "b", "prompt": "json!", "source": "code", "response": "{}"},
]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    config = write_light_config(tmp_path)
    tree = yaml.safe_load(config.read_text())
    tree["reward"]["components"] = PARTS
    config.write_text(yaml.safe_dump(tree))
    return config


def test_accuracy_is_that_of_a_run_where_weights_have_no_exact_sum(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(run_file.read_text())
    scorer = {"kind": "exact_match"}
    tree["reward"] |= {"components": {"a": {"scorer": scorer, "weight": 0.7}, "b": {"scorer": scorer, "weight": 0.1}}}
    tree["reward"]["solved_at"] = 0.8
    run_file.write_text(yaml.safe_dump(tree))
    rows = write_rows(run_file.parent, {"uid": "a", "prompt": "2 + 2", "ground_truth": "4", "response": "4"})
    assert main([str(rows), "--config", str(run_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"]["reward"]["accuracy"] == 1.0


def write_rows(folder: Path, *rows: object) -> Path:
    path = folder / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_responses_is_scored_as_a_run_would(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(run_file.parent, *ROWS)
    assert main([str(rows), "--config", str(run_file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    # Byte tokens and the end: "four" has 5 of 4, "5" and its end 2, "{}" and its end 3.
    assert answer["scores"] == [
        {"id": "a/0", "reward": 1.0, "components": {"right": 1.0, "short": -1.0}, "answer": "four"},
        {"id": "a/1", "reward": 0.0, "components": {"right": 0.0, "short": -0.5}, "answer": "5"},
        {"id": "b/0", "reward": 0.5, "components": {"json": 1.0, "short": -0.75}, "answer": None},
    ]
    assert answer["table"]["right"] == {"responses": 2, "mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}
    assert answer["table"]["json"]["responses"] == 1
    assert answer["table"]["reward"]["accuracy"] == pytest.approx(1 / 3)
    assert main([str(rows), "--config", str(run_file)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["component", "responses", "mean", "std", "min", "max"]
    assert [line.split()[0] for line in said[1:5]] == ["reward", "json", "right", "short"]
    assert said[3].split() == ["right", "2", "0.5", "0.5", "0", "1"]
    assert said[5].startswith("3 responses in ")


def test_a_terminal_that_lacks_a_letter_is_shown_its_escape_and_a_reader_that_leaves_gets_no_traceback(
    run_file: Path,
) -> None:
    tree = yaml.safe_load(run_file.read_text())
    tree["reward"]["components"] = {"\u7b54": {"scorer": {"kind": "exact_match"}}}
    run_file.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "rolecall", "score", str(write_rows(run_file.parent, ROWS[0]))]
    command += ["--config", str(run_file)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"\\u7b54" in shown.stdout
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_responses_to_images_are_scored_wherever_the_images_are(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(run_file.read_text())
    write_seeing(run_file.parent / "seeing")
    tree["model"]["path"], tree["data"]["images_field"] = "seeing", "images"
    tree["reward"]["components"] = {"right": {"scorer": {"kind": "exact_match"}}}
    run_file.write_text(yaml.safe_dump(tree))
    row = {"prompt": "<image>what?", "ground_truth": "5", "response": "5"}
    away, broken = row | {"images": ["away.png"]}, row | {"images": [{"bytes": b"no image", "path": None}]}
    rows = write_rows(run_file.parent, away)
    parquet = run_file.parent / "responses.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([broken]), parquet)
    for file in (rows, parquet):
        assert main([str(file), "--config", str(run_file), "--json"]) == 0
        assert [score["reward"] for score in json.loads(capsys.readouterr().out)["scores"]] == [1.0]
    (item,) = items_of(load_settings(run_file), rows, "response")
    assert run_lengths(np.frombuffer(item.prompt_token_ids, "<i4").tolist(), PAD) == [1]
    assert (item.messages[0].content, dict(item.metadata)) == ("<image>what?", {})


def test_a_scorer_that_reads_images_is_given_those_of_the_file(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(run_file.read_text())
    write_seeing(run_file.parent / "seeing")
    tree["model"]["path"], tree["data"]["images_field"] = "seeing", "images"
    (run_file.parent / "sees.py").write_text("def size(item):\n    return float(sum(map(len, item.images)))\n")
    mine = {"scorer": {"kind": "function", "target": "sees:size", "images": True}}
    tree["reward"]["components"] = {"mine": mine}
    run_file.write_text(yaml.safe_dump(tree))
    (run_file.parent / "a.png").write_bytes(picture(8, 8))
    row = {"prompt": "<image>what?", "response": ["5", "6"], "images": ["a.png"]}
    rows = write_rows(run_file.parent, row, {"prompt": "what?", "response": "5"})
    assert main([str(rows), "--config", str(run_file), "--json"]) == 0
    size = float(len(picture(8, 8)))
    assert [score["reward"] for score in json.loads(capsys.readouterr().out)["scores"]] == [size, size, 0.0]


async def test_an_image_that_cannot_be_read_costs_its_prompt_alone_its_scores(run_file: Path) -> None:
    tree = yaml.safe_load(run_file.read_text())
    write_seeing(run_file.parent / "seeing")
    tree["model"]["path"], tree["data"]["images_field"] = "seeing", "images"
    (run_file.parent / "sees.py").write_text("def size(item):\n    return float(sum(map(len, item.images)))\n")
    mine = {"scorer": {"kind": "function", "target": "sees:size", "images": True}}
    tree["reward"]["components"] = {"mine": mine}
    run_file.write_text(yaml.safe_dump(tree))
    row = {"prompt": "<image>what?", "response": ["5", "6"], "images": ["a.png"]}
    rows = write_rows(run_file.parent, *({**row, "uid": uid} for uid in "abc"))
    settings, threads = load_settings(run_file), set[threading.Thread]()

    class Noted(ImageFile):
        def read(self) -> bytes:
            threads.add(threading.current_thread())
            return super().read()

    gone, changed = run_file.parent / "gone.png", run_file.parent / "changed.png"
    changed.write_bytes(b"no more")
    images = {"a": (Noted(7, gone),), "b": (Noted(4, data=b"here"),), "c": (Noted(4, changed),)}
    found = await scored(settings, items_of(settings, rows, "response"), lambda: images)
    assert [outcome.value if isinstance(outcome, Score) else outcome.code for outcome in found] == [
        *["STORAGE_UNAVAILABLE"] * 2, 4.0, 4.0, *["INVALID_INPUT"] * 2
    ]  # fmt: skip
    assert threading.main_thread() not in threads


def test_the_truths_of_a_data_set_may_be_scored_as_its_responses(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(run_file.parent, ROWS[0])
    assert main([str(rows), "--config", str(run_file), "--json", "--response-field", "ground_truth"]) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)["scores"]] == [1.0, 1.0]
    assert main([str(rows), "--config", str(run_file), "--json", "--response-field", "prompt"]) == 0
    assert [row["answer"] for row in json.loads(capsys.readouterr().out)["scores"]] == ["2 + 2"]


def test_responses_are_those_of_the_file_whatever_a_users_function_makes_of_its_rows(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(run_file.read_text())
    tree["data"]["preprocess"] = {"function": "rows_to_score:row"}
    tree["reward"]["components"] = {"right": {"scorer": {"kind": "exact_match"}}}
    run_file.write_text(yaml.safe_dump(tree))
    (run_file.parent / "rows_to_score.py").write_text(
        "def row(fields):\n"
        "    truth = fields['answer']\n"
        "    return None if truth is None else {'prompt': fields['question'], 'ground_truth': truth}\n"
    )
    asked = [{"question": "2 + 2", "answer": truth, "response": "4"} for truth in ("5", None, "4")]
    assert main([str(write_rows(run_file.parent, *asked)), "--config", str(run_file), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert [(row["id"], row["reward"]) for row in scores] == [("1/0", 0.0), ("3/0", 1.0)]


def test_a_response_without_a_score_is_told_and_ends_with_1(
    run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(item):\n    return 1 / len(item.response_text)\n")
    mine = "reward.components={mine: {scorer: {kind: function, target: 'mine:score'}}}"
    rows = write_rows(tmp_path, {"prompt": "2 + 2", "response": ["four", ""]})
    code = main([str(rows), "--config", str(run_file), *("--" + mine).split("=", 1)])
    assert code == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("no score: 1 x SCORER_EXCEPTION, the first: ")
    assert "division by zero" in told


def test_a_function_is_tried_with_the_options_of_the_run(
    run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(item, *, scale):\n    return scale * len(item.response_text)\n")
    mine = "{mine: {scorer: {kind: function, target: 'mine:score', options: {scale: 2}}}}"
    rows = write_rows(tmp_path, {"prompt": "2 + 2", "response": ["four", "4"]})
    assert main([str(rows), "--config", str(run_file), "--json", "--reward.components", mine]) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)["scores"]] == [8.0, 2.0]


async def test_the_service_at_an_address_is_asked_instead(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = description("half", (0, 1), ("response_text",), {}, token_rewards=False, max_items=0)
    rows = write_rows(run_file.parent, *ROWS)
    async with serving(Scorer(spec, one_by_one(lambda item: 0.5, spec))) as address:
        arguments = [str(rows), "--config", str(run_file), "--reward.address", address, "--json"]
        assert await asyncio.to_thread(main, arguments) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)["scores"]] == [0.5] * 3


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "2 + 2", "source": "code"}, "field 'response': no response; write text or a list of texts"),
        ({"prompt": "2 + 2", "source": "sums", "response": "4"}, "field 'ground_truth': missing"),
        ({"prompt": "2 + 2", "response": "4", "source": "sums", "ground_truth": "4", "uid": []}, "a list, not text"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(
    run_file: Path, row: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_rows(run_file.parent, row)), "--config", str(run_file)]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_as_what_it_is(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_file.parent / "none.jsonl"), "--config", str(run_file)]) == 2
    assert "FILE: " in capsys.readouterr().err
