"""The scripts as text: what is shipped is what is called, and every refusal has an error."""

import re
from importlib.resources import files

import pytest

from rolecall import errors
from rolecall.store import scripts
from rolecall.store.position import RunPosition, decode_position, rows_of_garbage
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef, TrainBatch

FOLDER = files("rolecall.store") / "scripts"
NAMES = sorted(item.name.removesuffix(".lua") for item in FOLDER.iterdir() if item.name != "common.lua")


@pytest.mark.parametrize("name", NAMES)
def test_every_script_says_what_it_does_and_what_its_arguments_are(name: str) -> None:
    shebang, comment, *_ = (FOLDER / f"{name}.lua").read_text().splitlines()
    assert re.fullmatch(r"#!lua( flags=[a-z,-]+)?", shebang)
    assert comment.startswith("-- ")
    assert (
        "ARGV" in "\n".join(line for line in (FOLDER / f"{name}.lua").read_text().splitlines() if line.startswith("--"))
        or "KEYS" in comment
    )


def test_only_what_brings_new_work_in_is_refused_by_a_full_store() -> None:
    refused = {name for name in NAMES if "allow-oom" not in scripts.source(name).splitlines()[0]}
    assert refused == {"admit", "stage"}


def test_every_refusal_of_a_script_is_an_error_of_ours() -> None:
    verdicts = {
        verdict
        for name in [*NAMES, "common"]
        for verdict in re.findall(r"\{'([A-Z_]+)'", (FOLDER / f"{name}.lua").read_text())
    }
    assert verdicts - {"OK", "DONE", "ELSEWHERE"} == set(scripts.REFUSALS)


def test_a_refusal_is_raised_with_what_the_script_said() -> None:
    assert scripts.check([b"OK", 3], "run").fresh
    assert not scripts.check([b"DONE"], "run").fresh
    with pytest.raises(errors.FencedError, match="run demo: controller 1 was replaced by 2"):
        scripts.check([b"FENCED", b"controller 1 was replaced by 2"], "demo")


def test_a_store_that_was_never_locked_is_the_first_position() -> None:
    assert decode_position({}) == RunPosition()


def test_a_position_is_decoded_from_the_fields_of_the_run() -> None:
    position = decode_position(
        {
            b"ctl": b"2",
            b"step": b"7",
            b"cursor": b"\xff",
            b"dropped:late": b"3",
            b"dropped:poison": b"1",
            b"holder": b"x",
            b"beat": b"9",
        }
    )
    assert position == RunPosition(ctl=2, step=7, cursor=b"\xff", dropped={"late": 3, "poison": 1})
    assert position.num_dropped == 4


def test_garbage_names_the_rows_of_batches_and_of_groups() -> None:
    first, second = RowRef(id="0/0", token="a-1"), RowRef(id="1/0", token="a-1", shard=1)
    notes = {
        b"batch:3": TrainBatch(rows=[first]).SerializeToString(),
        b"group:1": CommittedGroup(rows=[second]).SerializeToString(),
    }
    garbage = rows_of_garbage(notes)
    assert (garbage.rows, garbage.notes) == ((first, second), ("batch:3", "group:1"))
