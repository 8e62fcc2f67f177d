"""Prompts: bad rows are named by line and field, the order is deterministic, the cursor resumes it, over-long prompts are counted."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rolecall.errors import ConfigError
from rolecall.settings import DataSection
from rolecall.tokenizer import ChatTokenizer
from services.controller.prompts import Cursor, PromptRenderer, PromptSequence, RawPrompt, load_prompts
from tests.tiny_models import write_tokenizer


def data_section(path: Path, **fields: object) -> DataSection:
    return DataSection.model_validate({"train": path, **fields})


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: a list"),
        ({"text": "hi"}, "line 2: no field 'prompt'"),
        ({"prompt": 7}, "line 2, field 'prompt'"),
        ({"prompt": "  "}, "line 2, field 'prompt': the prompt is empty"),
        ({"prompt": [{"role": "user"}]}, "line 2, field 'prompt': a message is not"),
        ({"prompt": "hi", "ground_truth": 5}, "line 2, field 'ground_truth': a int, not a string"),
        ({"prompt": "hi", "uid": "a"}, "rows 1 and 2 share the uid 'a'"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(tmp_path: Path, row: object, complaint: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good", "uid": "a"}, row)
    with pytest.raises(ConfigError, match=r"p\.jsonl") as caught:
        load_prompts(path, data_section(path))
    assert complaint in str(caught.value)


def test_a_missing_or_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl", data_section(tmp_path))
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", ""), data_section(tmp_path))


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "one", "ground_truth": "1", "level": 3}, {"prompt": "two", "ground_truth": "2", "level": 4}]
    jsonl = write(tmp_path / "p.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    section = data_section(jsonl, system_prompt="be brief")
    prompts = load_prompts(jsonl, section)
    assert prompts == load_prompts(tmp_path / "p.parquet", section)
    assert prompts[0] == RawPrompt("1", (("system", "be brief"), ("user", "one")), "1", {"level": 3})


@pytest.fixture
def renderer(tmp_path: Path) -> PromptRenderer:
    write_tokenizer(tmp_path / "tokenizer")
    return PromptRenderer(ChatTokenizer(tmp_path / "tokenizer"), max_prompt_tokens=48)


def sequence(renderer: PromptRenderer, texts: list[str], cursor: Cursor = Cursor(), shuffle: bool = True) -> PromptSequence:
    prompts = [RawPrompt(str(i), (("user", text),), "", {}) for i, text in enumerate(texts)]
    result = PromptSequence(prompts, renderer, seed=3, shuffle=shuffle)
    result.move_to(cursor)
    return result


def test_a_restored_cursor_continues_the_same_sequence_across_epochs(renderer: PromptRenderer) -> None:
    texts = [str(i) for i in range(5)]
    whole = sequence(renderer, texts)
    uids = [(whole.next().uid, whole.cursor) for _ in range(12)]
    assert sorted(uid for uid, _ in uids[:5]) == sorted(uid for uid, _ in uids[5:10]) == ["0", "1", "2", "3", "4"]
    assert [uid for uid, _ in uids[:5]] != [uid for uid, _ in uids[5:10]]
    resumed = sequence(renderer, texts, Cursor.decode(uids[6][1].encode()))
    assert [resumed.next().uid for _ in range(5)] == [uid for uid, _ in uids[7:]]


def test_over_long_prompts_are_refused_and_counted_never_truncated(renderer: PromptRenderer) -> None:
    prompts = sequence(renderer, ["1", "1 2 3 4 5 6 7 8 9 " * 10, "2"], shuffle=False)
    assert [prompts.next().uid for _ in range(3)] == ["0", "2", "0"]
    assert prompts.cursor.num_too_long == 1
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        sequence(renderer, ["1 2 3 4 5 6 7 8 9 " * 10]).next()
