"""Prompts: bad rows are named by line and field, the order is deterministic, the cursor resumes it, over-long prompts
are counted.
"""

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.curriculum import is_visited
from rolecall.data import row_files
from rolecall.data.dataset import RawPrompt, load_prompts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from rolecall.settings import CurriculumSection, DataSection, EnvironmentSection, RewardSection
from rolecall.store.position import SuccessRate
from services.controller.groups.prompts import Cursor, PromptRenderer, PromptSequence
from tests.tiny_tokenizer import write_tokenizer

ELSEWHERE = RewardSection(address="scorer:1")


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the module that a test wrote."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine_rows", None)


def data_section(path: Path, **fields: object) -> DataSection:
    return DataSection.model_validate({"train": path, **fields})


def write(path: Path, *rows: object) -> Path:
    path.write_bytes(
        b"".join(
            (row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()) + b"\n"
            for row in rows
        )
    )
    return path


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            "{oops",
            "line 2: not JSON (Expecting property name enclosed in double quotes at column 2); one JSON object a "
            "line is needed",
        ),
        ('{"prompt": "hi"', "line 2: not JSON (Expecting ',' delimiter at column 16); one JSON"),
        (b'{"prompt": "\xff"}', "line 2: not UTF-8 text"),
        (b'{"prompt": "\\ud800"}', "line 2: not UTF-8 text"),
        ("[1]", "line 2: a list, not an object with fields; write {...} with the prompt in a field"),
        ({"text": "hi"}, "line 2: no field 'prompt'"),
        (
            {"prompt": 7},
            "line 2, field 'prompt': a int, neither text nor a list of messages; write text or [{role: text, "
            "content: text}, ...]",
        ),
        ({"prompt": None}, "line 2, field 'prompt': null, neither text nor"),
        ({"prompt": []}, "line 2, field 'prompt': an empty list, neither text nor"),
        ({"prompt": "  "}, "line 2, field 'prompt': the prompt is empty"),
        (
            {"prompt": [{"role": "user"}]},
            "line 2, field 'prompt': a message is not {role: text, content: text}: {'role': 'user'}; mend it",
        ),
        ({"prompt": [{"role": "user", "content": 3}]}, "line 2, field 'prompt': a message is not"),
        (
            {"prompt": [{"role": "user", "content": " "}]},
            "line 2, field 'prompt': the prompt is empty; write one or remove the line",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
            "line 2, field 'prompt': a message has tool_calls, which",
        ),
        (
            {"prompt": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
            "line 2, field 'prompt': a message has tool_calls, which",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}]},
            "line 2, field 'prompt': a message has reasoning_content, which",
        ),
        ({"prompt": "hi", "x": math.nan}, "line 2, field 'x': a number that no message holds"),
        ({"prompt": "hi", "x": 10**400}, "line 2, field 'x': a number that no message holds"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: the field 'prompt' is there twice; remove one"),
        ('{"prompt": "a", "x": [{"y": 1, "z": 2, "y": 3}]}', "line 2: the field 'y' is there twice; remove one"),
        ({"prompt": "hi", "ground_truth": 5}, "line 2, field 'ground_truth': a int, not a string"),
        ({"prompt": "hi", "uid": [1]}, "line 2, field 'uid': a list, not text or a whole number"),
        ({"prompt": "hi", "uid": "a"}, "p.jsonl, line 2 share the uid 'a'"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(tmp_path: Path, row: object, complaint: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good", "uid": "a"}, row)
    with pytest.raises(ConfigError, match=r"p\.jsonl") as caught:
        load_prompts(path, data_section(path), ELSEWHERE)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("row", "how"), [({"prompt": "hi"}, "missing"), ({"prompt": "hi", "ground_truth": ""}, "empty")]
)
@pytest.mark.parametrize(
    "kind", [{"kind": "exact_match"}, {"kind": "regex", "pattern": "x"}, {"kind": "boxed"}, {"kind": "math"}]
)
def test_a_missing_ground_truth_is_named_before_anything_is_sampled(
    tmp_path: Path, row: object, how: str, kind: dict[str, str]
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good", "ground_truth": "4"}, row)
    reward = RewardSection.model_validate(
        {"components": {"short": {"scorer": {"kind": "length", "max_tokens": 9}}, "right": {"scorer": kind}}}
    )
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, data_section(path), reward)
    told = "and reward.components.right compares with it; write it in every line, or set data.ground_truth_field"
    assert str(caught.value) == f"{path}, line 2, field 'ground_truth': {how}, {told}"
    assert len(load_prompts(path, data_section(path), ELSEWHERE)) == 2


def test_a_prompt_has_the_one_environment_that_takes_it_and_two_are_refused_by_its_line(tmp_path: Path) -> None:
    environments = {
        name: EnvironmentSection.model_validate({"address": "h:1", "when": when})
        for name, when in (("game", {"task": ["game", "both"]}), ("tools", {"task": ["tools", "both"]}))
    }
    rows = [{"prompt": "a", "task": task} for task in ("game", "maths", "tools")]
    path = write(tmp_path / "p.jsonl", *rows, {"prompt": "b"})
    prompts = load_prompts(path, data_section(path), ELSEWHERE, environments=environments)
    assert [prompt.environment for prompt in prompts] == ["game", "", "tools", ""]
    write_tokenizer(tmp_path / "tokenizer")
    renderer = PromptRenderer(PromptEncoder(ChatTokenizer(tmp_path / "tokenizer")), 48)
    rendered = [renderer.render(prompt, 0) for prompt in prompts]
    assert [prompt.environment for prompt in rendered if prompt is not None] == ["game", "", "tools", ""]
    write(path, *rows, {"prompt": "b", "task": "both"})
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, data_section(path), ELSEWHERE, environments=environments)
    assert str(caught.value) == (
        f"{path}, line 4: the environments game and tools take the prompt (task: 'both'), which can be played in one; "
        "mend the line, or narrow environments.game.when or environments.tools.when"
    )


def test_a_prompt_that_nobody_plays_has_no_reward_of_an_environment(tmp_path: Path) -> None:
    environments = {"game": EnvironmentSection.model_validate({"address": "h:1", "when": {"task": "game"}})}
    reward = RewardSection.model_validate({"components": {"won": {"scorer": {"kind": "environment"}}}})
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "task": "game"}, {"prompt": "b", "task": "maths"})
    with pytest.raises(ConfigError, match=r"line 2: no component .* \(environment: none\); .* that is to play it"):
        load_prompts(path, data_section(path), reward, environments=environments)


def test_a_prompt_that_no_component_applies_to_is_named_before_anything_is_sampled(tmp_path: Path) -> None:
    qa = {"scorer": {"kind": "exact_match"}, "when": {"source": ["qa", "trivia"]}}
    code = {"scorer": {"kind": "json"}, "when": {"source": "code"}}
    reward = RewardSection.model_validate({"components": {"qa": qa, "code": code}})
    good = [{"prompt": "a", "source": "qa", "ground_truth": ["4", "four"]}, {"prompt": "b", "source": "code"}]
    path = write(tmp_path / "p.jsonl", *good, {"prompt": "hi", "source": "maths"})
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, data_section(path), reward)
    told = "no component of the reward applies to the prompt (source: 'maths')"
    assert str(caught.value) == f"{path}, line 3: {told}; mend the line, or widen a when of reward.components"
    several, none = load_prompts(write(path, *good), data_section(path), reward)
    assert (several.ground_truth, several.other_ground_truths) == ("4", ("four",))
    assert (none.ground_truth, none.other_ground_truths) == ("", ())


@pytest.mark.parametrize(
    ("truth", "complaint"),
    [
        (["4", 5], "line 1, field 'ground_truth': a int, not a string; write it as text, or several right answers"),
        (["4", ""], "line 1, field 'ground_truth': an empty text among several answers; remove it"),
        ([None], "line 1, field 'ground_truth': null, not a string"),
        ([], "line 1, field 'ground_truth': empty, and reward.components.right compares with it"),
    ],
)
def test_a_list_of_answers_that_is_none_is_named(tmp_path: Path, truth: object, complaint: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "hi", "ground_truth": truth})
    reward = RewardSection.model_validate({"components": {"right": {"scorer": {"kind": "exact_match"}}}})
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, data_section(path), reward)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "no list of instructions, which kind ifeval checks"),
        ({"instruction_id_list": ["startend:quotation", "made:up"]}, "kind ifeval has no check of ['made:up']"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, "kwargs has not one entry per instruction"),
    ],
)
def test_instructions_that_nobody_checks_are_named_before_anything_is_sampled(
    tmp_path: Path, fields: dict[str, object], told: str
) -> None:
    reward = RewardSection.model_validate({"components": {"follows": {"scorer": {"kind": "ifeval"}}}})
    good = {"prompt": "hi", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    path = write(tmp_path / "p.jsonl", good, {"prompt": "hi", **fields})
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, data_section(path), reward)
    assert f"line 2, field 'instruction_id_list': {told}" in str(caught.value)


def test_what_is_no_parquet_and_what_is_no_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("prompt\n")
    with pytest.raises(ConfigError, match=r"p\.parquet is not parquet .*; write it anew, or name JSON lines \.jsonl"):
        load_prompts(tmp_path / "p.parquet", data_section(tmp_path), ELSEWHERE)
    with pytest.raises(ConfigError, match=r"is a folder; give data\.train"):
        load_prompts(tmp_path, data_section(tmp_path), ELSEWHERE)


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.arrow", "p.csv"])
def test_a_file_of_another_kind_is_named_with_those_that_are_read(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"\x1f\x8b\xff")
    with pytest.raises(ConfigError, match=r"is named \.(gz|arrow|csv), and JSON lines and \.parquet are read"):
        load_prompts(path, data_section(path), ELSEWHERE)


def test_whole_numbers_that_would_be_rounded_are_left_out_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "hi", "x": [2**53 + 1], "y": 1}, {"prompt": "ho", "x": 12345678901234567890, "y": 2}]
    path = write(tmp_path / "p.jsonl", *rows)
    prompts = load_prompts(path, data_section(path), ELSEWHERE)
    assert [prompt.metadata for prompt in prompts] == [{"y": 1}, {"y": 2}]
    (record,) = caplog.records
    assert record.message.startswith(f"field 'x' of {path}: whole numbers that a float64 rounds")


def test_kinds_are_read_whatever_the_case_of_their_names(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "hi"}]), tmp_path / "p.PARQUET")
    for name in ("p.JSONL", "gsm8k.train", "p"):
        write(tmp_path / name, {"prompt": "hi"})
    for name in ("p.PARQUET", "p.JSONL", "gsm8k.train", "p"):
        (prompt,) = load_prompts(tmp_path / name, data_section(tmp_path), ELSEWHERE)
        assert prompt.messages == (("user", "hi"),)


def test_what_a_message_holds_as_it_is_and_what_an_environment_reads_passes(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    plain: dict[str, object] = {"role": "user", "content": "hi", "tool_calls": [], "reasoning_content": None}
    path = write(tmp_path / "p.jsonl", {"prompt": [plain], "tools": tools, "x": [2**53, -(2**60), 0.5, True]})
    (prompt,) = load_prompts(path, data_section(path), ELSEWHERE)
    assert prompt.metadata == {"tools": tools, "x": [2**53, -(2**60), 0.5, True]}


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}x"
    )
    path = write(tmp_path / "p.jsonl", {"prompt": "good"})
    (prompt,) = load_prompts(path, data_section(path, system_prompt="be brief"), ELSEWHERE)
    with pytest.raises(
        ConfigError,
        match=r"p\.jsonl, line 1: the chat template cannot render the turns system, user \(no system turn\); mend",
    ):
        PromptRenderer(PromptEncoder(ChatTokenizer(tmp_path / "tokenizer")), 48).render(prompt, 0)


def test_a_missing_or_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl", data_section(tmp_path), ELSEWHERE)
    with pytest.raises(ConfigError, match="holds no rows"):
        load_prompts(write(tmp_path / "empty.jsonl", ""), data_section(tmp_path), ELSEWHERE)


def test_several_files_are_one_set_whose_later_rows_say_their_file(tmp_path: Path) -> None:
    math = write(tmp_path / "math.jsonl", {"prompt": "1 + 1"}, {"prompt": "1 + 2"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "code"}]), tmp_path / "code.parquet")
    tree = {"train": ["math.jsonl", "code.parquet"]}
    section = DataSection.model_validate(tree, context={"base": tmp_path})
    prompts = load_prompts(section.train, section, ELSEWHERE)
    assert [(each.uid, each.messages[-1][1]) for each in prompts] == [("1", "1 + 1"), ("2", "1 + 2"), ("2:1", "code")]
    assert prompts[2].where == f"{tmp_path}/code.parquet, line 1"
    assert section.model_dump(mode="json")["train"] == [str(math), str(tmp_path / "code.parquet")]
    assert data_section(math).model_dump(mode="json")["train"] == str(math)
    twice = write(math, {"prompt": "a", "uid": "2:1"}), write(tmp_path / "again.jsonl", {"prompt": "b"})
    with pytest.raises(ConfigError, match=r"math\.jsonl, line 1 and .*again\.jsonl, line 1 share the uid '2:1'"):
        load_prompts(twice, section, ELSEWHERE)
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no rows"):
        load_prompts((math, write(tmp_path / "empty.jsonl", "")), section, ELSEWHERE)
    with pytest.raises(ValidationError, match="it names no file; name one, or several in their order"):
        DataSection(train=())


@given(num_rows=st.integers(1, 40), fewer=st.integers(1, 45), more=st.integers(1, 45), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_as_many_rows_as_are_wanted_are_drawn_in_their_order_and_fewer_are_among_more(
    tmp_path: Path, num_rows: int, fewer: int, more: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, num_rows - 1))
    rows = [{"prompt": f"row {i}"} for i in range(num_rows)]
    files = [write(tmp_path / "b.jsonl", *rows[cut:])] if cut else []
    files = [write(tmp_path / "a.jsonl", *(rows[:cut] or rows)), *files]

    def drawn(most: int | None) -> list[str]:
        found = load_prompts(tuple(files), data_section(files[0]), ELSEWHERE, max_prompts=most)
        return [prompt.messages[0][1] for prompt in found]

    everything = drawn(None)
    fewer, more = sorted((fewer, more))
    few, many = drawn(fewer), drawn(more)
    assert (len(few), len(many)) == (min(fewer, num_rows), min(more, num_rows))
    assert set(few) <= set(many)
    assert many == [row for row in everything if row in many]


def test_rows_are_drawn_evenly_from_all_files_keep_their_ids_and_the_others_are_not_looked_at(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *({"prompt": "a"} for _ in range(500)))
    second = write(tmp_path / "b.jsonl", *({"prompt": "b"} for _ in range(499)), {"text": "no prompt"})
    prompts = load_prompts((first, second), data_section(first), ELSEWHERE, max_prompts=200)
    texts = [prompt.messages[0][1] for prompt in prompts]
    assert texts.count("a") == pytest.approx(100, abs=25)
    assert texts == sorted(texts)
    assert all(prompt.where.endswith(f"line {prompt.uid.rpartition(':')[2]}") for prompt in prompts)
    with pytest.raises(ConfigError, match="line 500: no field 'prompt'"):
        load_prompts((first, second), data_section(first), ELSEWHERE, max_prompts=1000)


def test_millions_of_rows_are_told_of_while_they_are_read_and_share_the_names_of_their_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "TOLD_ROWS", 3)
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    rows = write(tmp_path / "p.jsonl", *({"prompt": said, "level": {"of the row": i}} for i in range(7)))
    told = list[str]()
    prompts = load_prompts(rows, data_section(rows), ELSEWHERE, tell=told.append)
    assert told == [f"the data, {num} rows so far, to {rows}, line {num}" for num in (3, 6)]
    names = [
        [*prompt.metadata, *prompt.metadata["level"], *(role for role, _ in prompt.messages)] for prompt in prompts
    ]
    assert all(name is shared for other in names for name, shared in zip(other, names[0], strict=True))


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "one", "ground_truth": "1", "level": 3}, {"prompt": "two", "ground_truth": "2", "level": 4}]
    jsonl = write(tmp_path / "p.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    section = data_section(jsonl, system_prompt="be brief")
    prompts = load_prompts(jsonl, section, ELSEWHERE)
    assert prompts == load_prompts(tmp_path / "p.parquet", section, ELSEWHERE)
    assert prompts[0] == RawPrompt("1", (("system", "be brief"), ("user", "one")), "1", {"level": 3})


@pytest.fixture
def renderer(tmp_path: Path) -> PromptRenderer:
    write_tokenizer(tmp_path / "tokenizer")
    return PromptRenderer(PromptEncoder(ChatTokenizer(tmp_path / "tokenizer")), max_prompt_tokens=48)


def sequence(
    renderer: PromptRenderer,
    texts: list[str],
    cursor: Cursor = Cursor(),
    shuffle: bool = True,
    seed: int = 3,
    curriculum: CurriculumSection | None = None,
    rates: dict[str, SuccessRate] | None = None,
) -> PromptSequence:
    prompts = [RawPrompt(str(i), (("user", text),), "", {}) for i, text in enumerate(texts)]
    return PromptSequence(
        prompts, renderer, seed=seed, shuffle=shuffle, curriculum=curriculum, cursor=cursor, rates=rates
    )


def test_a_restored_cursor_continues_the_same_sequence_across_epochs(renderer: PromptRenderer) -> None:
    texts = [str(i) for i in range(5)]
    whole = sequence(renderer, texts)
    uids = [(whole.next().uid, whole.cursor) for _ in range(12)]
    assert sorted(uid for uid, _ in uids[:5]) == sorted(uid for uid, _ in uids[5:10]) == ["0", "1", "2", "3", "4"]
    assert [uid for uid, _ in uids[:5]] != [uid for uid, _ in uids[5:10]]
    resumed = sequence(renderer, texts, Cursor.decode(uids[6][1].encode()))
    assert [resumed.next().uid for _ in range(5)] == [uid for uid, _ in uids[7:]]


def test_the_order_of_an_epoch_is_drawn_when_its_first_prompt_is_looked_at(renderer: PromptRenderer) -> None:
    texts = [str(i) for i in range(40)]
    prompts = sequence(renderer, texts, Cursor(epoch=7))
    assert not prompts._order
    expected = list(range(40))
    random.Random("3/7").shuffle(expected)
    assert [int(prompts.next().uid) for _ in texts] == expected


def test_a_place_in_other_prompts_is_refused_and_one_of_a_release_that_noted_none_goes_on(
    renderer: PromptRenderer,
) -> None:
    texts = [str(i) for i in range(6)]
    first = sequence(renderer, texts)
    for _ in range(4):
        first.next()
    noted = first.cursor
    assert Cursor.decode(noted.encode()) == noted
    assert sequence(renderer, ["another text", *texts[1:]], noted).next(), "rows are told by their uids"
    for others in (texts[:5], texts[:2], [*texts, "6"]):
        with pytest.raises(ConfigError, match=rf"data\.preprocess: .*\({len(others)} now\).*number 4 of epoch 0; put"):
            sequence(renderer, others, noted)
    of_before = Cursor.decode(b"[0, 4, 0, 0]")
    assert sequence(renderer, texts, of_before).next() == first.next()
    with pytest.raises(ConfigError, match=r"data\.preprocess"):
        sequence(renderer, texts[:2], of_before)


LONG = "1 2 3 4 5 6 7 8 9 " * 10
CURRICULUM = CurriculumSection(min_success_rate=0.3, max_success_rate=0.7, revisit_epochs=3)


@given(
    fits=st.lists(st.booleans(), min_size=1, max_size=6).filter(any),
    rates=st.lists(st.none() | st.floats(0, 1), min_size=6, max_size=6),
    seed=st.integers(0, 20),
    shuffle=st.booleans(),
    curriculum=st.sampled_from([None, CURRICULUM]),
    stop_at=st.integers(0, 20),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_cursor_a_resumed_sequence_is_the_same(
    renderer: PromptRenderer,
    fits: list[bool],
    rates: list[float | None],
    seed: int,
    shuffle: bool,
    curriculum: CurriculumSection | None,
    stop_at: int,
) -> None:
    texts = [str(i) if short else LONG for i, short in enumerate(fits)]
    known = {str(i): SuccessRate(i, rate) for i, rate in enumerate(rates) if rate is not None} if curriculum else {}
    whole = sequence(renderer, texts, shuffle=shuffle, seed=seed, curriculum=curriculum, rates=known)
    seen = [(prompt.uid, prompt.epoch, whole.cursor) for prompt in (whole.next() for _ in range(30))]
    cursor = seen[stop_at - 1][2] if stop_at else Cursor()
    resumed = sequence(
        renderer, texts, Cursor.decode(cursor.encode()), shuffle=shuffle, seed=seed, curriculum=curriculum, rates=known
    )
    assert [
        (prompt.uid, prompt.epoch, resumed.cursor) for prompt in (resumed.next() for _ in range(30 - stop_at))
    ] == seen[stop_at:]
    whole_epochs = {epoch for _, epoch, _ in seen} - {seen[-1][1]}
    for epoch in whole_epochs:
        visited = sorted(uid for uid, of_epoch, _ in seen if of_epoch == epoch)
        fitting = [str(i) for i, short in enumerate(fits) if short]
        assert visited == [
            uid
            for uid in fitting
            if curriculum is None or is_visited(curriculum, seed, epoch, uid, known[uid].rate if uid in known else None)
        ]


def test_a_visit_counts_once_and_a_prompt_outside_the_band_waits_for_its_turn(renderer: PromptRenderer) -> None:
    prompts = sequence(renderer, ["0", "1", "2", "3"], curriculum=CURRICULUM)
    assert prompts.visited("2", 7, 1.0) == SuccessRate(7, 1.0)
    assert prompts.visited("2", 7, 0.0) is None
    assert prompts.visited("2", 5, 0.0) is None, "an older group that was scored late"
    uids = [prompts.next().uid for _ in range(10)]
    assert uids.count("2") == 1
    assert all(uids.count(uid) == 3 for uid in ("0", "1", "3"))
    assert prompts.visited("2", 9, 0.0) == SuccessRate(9, 0.5)


def test_without_a_curriculum_no_rate_is_kept(renderer: PromptRenderer) -> None:
    prompts = sequence(renderer, ["0"])
    assert prompts.visited("0", 0, 1.0) is None
    assert prompts.visited("0", 1, 0.0) is None
    assert [prompts.next().epoch for _ in range(2)] == [0, 1], "it is in every epoch, whatever its rate"


def test_over_long_prompts_are_refused_and_counted_never_truncated(renderer: PromptRenderer) -> None:
    prompts = sequence(renderer, ["1", "1 2 3 4 5 6 7 8 9 " * 10, "2"], shuffle=False)
    assert [prompts.next().uid for _ in range(3)] == ["0", "2", "0"]
    assert prompts.cursor.num_too_long == 1
    for curriculum in (None, CURRICULUM):
        with pytest.raises(ConfigError, match="max_prompt_tokens"):
            sequence(renderer, [LONG], curriculum=curriculum).next()


MINE = """
import sys
import numpy as np

def row(fields, mark="####"):
    if fields["answer"] is None:
        return None
    return {"prompt": fields["question"], "ground_truth": fields["answer"].split(mark)[1].strip(), "level": 3}

def text(fields):
    return fields["question"]

def leave(fields):
    sys.exit(0)

def computed(fields):
    print("seen")
    return {"prompt": np.array([fields["question"]])[0], "level": np.int64(3), "parts": np.array([1.5, 2.0])}

def odd(fields):
    return {"prompt": "hi", "note": chr(0xD800)}

def keyed(fields):
    return {"prompt": "hi", "map": {(1, 2): 3}}
"""


def own_rows(folder: Path, *answers: object, function: str = "row", **options: object) -> list[RawPrompt]:
    (folder / "mine_rows.py").write_text(MINE)
    path = write(folder / "p.jsonl", *({"question": f"q{n}", "answer": answer} for n, answer in enumerate(answers)))
    preprocess = {"function": f"{folder}/mine_rows:{function}", "options": options}
    return load_prompts(path, data_section(path, preprocess=preprocess), ELSEWHERE)


def test_rows_are_read_as_the_users_function_returns_them(tmp_path: Path, own_modules: None) -> None:
    prompts = own_rows(tmp_path, "2 + 2 #### 4", None, "5 #### 5")
    assert [(each.uid, each.messages, each.ground_truth, each.metadata) for each in prompts] == [
        ("1", (("user", "q0"),), "4", {"level": 3}),
        ("3", (("user", "q2"),), "5", {"level": 3}),
    ]
    (prompt,) = own_rows(tmp_path, "2 + 2 = 4", mark="=")
    assert prompt.ground_truth == "4"


def test_a_function_for_rows_that_cannot_do_them_is_named_with_the_line(tmp_path: Path, own_modules: None) -> None:
    with pytest.raises(ConfigError, match=r"line 2: data\.preprocess\.function raised IndexError: list index"):
        own_rows(tmp_path, "#### 4", "4")
    with pytest.raises(ConfigError, match=r"line 1: data\.preprocess\.function returned a str, not fields by"):
        own_rows(tmp_path, "#### 4", function="text")
    with pytest.raises(ConfigError, match=r"line 1: data\.preprocess\.function raised SystemExit: 0; correct it"):
        own_rows(tmp_path, "#### 4", function="leave")
    with pytest.raises(ConfigError, match=r"line 1: what data\.preprocess\.function returned is not JSON \(.*surrog"):
        own_rows(tmp_path, "#### 4", function="odd")
    with pytest.raises(ConfigError, match=r"line 1: what data\.preprocess\.function returned is not JSON \(keys must"):
        own_rows(tmp_path, "#### 4", function="keyed")
    with pytest.raises(ConfigError, match=r"data\.preprocess\.function: it leaves out all 2 rows of .*p\.jsonl; corr"):
        own_rows(tmp_path, None, None)
    with pytest.raises(ConfigError, match=r"data\.preprocess\.function 'mine_rows:none': the module .* has no functi"):
        own_rows(tmp_path, "#### 4", function="none")
    with pytest.raises(ConfigError, match=r"data\.preprocess\.function 'mine_rows:row' cannot be called with a row an"):
        own_rows(tmp_path, "#### 4", split="main")


def test_what_a_users_function_computed_is_checked_as_scorers_get_it(
    tmp_path: Path, own_modules: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (prompt,) = own_rows(tmp_path, "#### 4", function="computed")
    assert (prompt.messages, prompt.metadata) == ((("user", "q0"),), {"level": 3, "parts": [1.5, 2.0]})
    assert type(prompt.metadata["level"]) is int
    assert capsys.readouterr() == ("", "seen\n"), "what it prints is no part of a command's answer"


def test_of_what_a_users_function_prints_for_all_rows_the_beginning_is_shown(
    tmp_path: Path, own_modules: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(own_rows(tmp_path, *range(3000), function="computed")) == 3000
    out, told = capsys.readouterr()
    assert (out, told.count("seen\n")) == ("", 819)
    assert told.endswith("\ns\n[what data.preprocess.function prints is cut here]\n")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import none_such_module", "ModuleNotFoundError: No module named 'none_such_module'"),
        ("def row(fields:", "SyntaxError: "),
        ("raise OSError('no net')", "OSError: no net"),
    ],
    ids=["import", "syntax", "raises"],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path, own_modules: None, source: str, said: str) -> None:
    (tmp_path / "mine_rows.py").write_text(source)
    path = write(tmp_path / "p.jsonl", {"prompt": "hi"})
    section = data_section(path, preprocess={"function": f"{tmp_path}/mine_rows:row"})
    with pytest.raises(ConfigError, match=r"data\.preprocess\.function 'mine_rows:row' cannot be imported") as refused:
        load_prompts(path, section, ELSEWHERE)
    assert said in refused.value.message
