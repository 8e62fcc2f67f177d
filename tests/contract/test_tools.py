"""Tools that come with the library, and the episode around them."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.environment import Action, Answer, Image, ImageMessage, Message, Opening, Task, Tool, ToolCall
from rolecall.environment.tools import ToolEpisode
from rolecall.environment.tools.calculator import Calculator, evaluated
from rolecall.environment.tools.episode import MAX_CHARS, shortened
from rolecall.environment.tools.python import Python
from rolecall.environment.tools.retrieval import Retrieval, read_documents, write_index
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import CodeScorer


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+2", "4"),
        (" (3 + 4) * 2 ", "14"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("7 // 2 - -1", "4"),
        ("-7 % 3", "2"),
        ("2**100", str(2**100)),
        ("2**-2", "0.25"),
        ("1**99999999999", "1"),
    ],
)
def test_a_calculator_is_exact(expression: str, value: str) -> None:
    assert evaluated(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1/0", "division by zero"),
        ("2**2**30", "the result is too large"),
        ("(2**4000)*(2**4000)", "the result is too large"),
        ("9**0.5", "exponents are whole numbers"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 +", "is no arithmetic expression"),
        ("(" * 190, "is no arithmetic expression"),
        ("1\x00", "is no arithmetic expression"),
        ("1" * 201, "at most 200 are read"),
        ("1e400", "is no arithmetic expression"),
        ("10**400/3", "too large"),
    ],
)
def test_a_calculator_says_what_it_does_not_compute(expression: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        evaluated(expression)


def played(*said_or_called: str | tuple[ToolCall, ...] | Action, tools: Any = (Calculator(),)) -> list[Answer]:
    episode = ToolEpisode(tools, lambda task, answer: float(answer == task.ground_truth))
    opening = episode.reset(Task("t", ground_truth="4"), 0)
    assert isinstance(opening, Opening)
    assert [tool.name for tool in opening.tools] == [tool.tool.name for tool in tools]
    return [episode.step(action_of(each)) for each in said_or_called]


def action_of(given: str | tuple[ToolCall, ...] | Action) -> Action:
    if isinstance(given, str):
        return Action(given)
    return given if isinstance(given, Action) else Action("", tool_calls=given)


def test_an_episode_calls_tools_until_it_is_answered() -> None:
    calls = (ToolCall("calculator", {"expression": "2+2"}), ToolCall("calculator", {"expression": "1/0"}))
    first, last = played(calls, "4")
    assert first.messages == [Message("tool", "4"), Message("tool", "error: division by zero")]
    assert not first.is_over
    assert (last.reward, last.is_over) == (1.0, True)
    assert played("5")[0].reward == 0.0
    assert played((ToolCall("none", {}),))[0].messages == [Message("tool", "error: there is no tool 'none'")]


def test_a_last_turn_that_was_cut_is_graded_and_no_end_of_its_own() -> None:
    (cut,) = played(Action("4", is_cut=True))
    assert (cut.reward, cut.is_over, cut.is_truncated) == (1.0, False, True)


def test_long_answers_lose_their_middle_and_say_so() -> None:
    assert shortened("a" * MAX_CHARS) == "a" * MAX_CHARS
    assert "[6 characters left out]" in shortened("a" * (MAX_CHARS + 6))


class Camera:
    """A tool that answers what it is given."""

    tool = Tool("camera", "Shows.", {"type": "object"})

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def call(self, arguments: Mapping[str, Any]) -> Any:
        return self._answers


def seen(answers: Any) -> Any:
    episode = ToolEpisode([Camera(answers)], lambda task, answer: 0.0)
    episode.reset(Task("t"), 0)
    messages = episode.step(action_of((ToolCall("camera", {}),))).messages
    assert isinstance(messages, list)
    return messages[0]


def test_a_tool_may_show_images() -> None:
    assert seen(["a", Image(b"seen"), "b"]) == ImageMessage("tool", ["a", Image(b"seen"), "b"])
    assert seen([]) == Message("tool", "")


@pytest.mark.parametrize("lengths", [(MAX_CHARS + 6,), (1000,) * 6, (0, 1, MAX_CHARS, 0, 9), (MAX_CHARS // 2,) * 3])
def test_the_texts_around_images_lose_their_middle_as_one(lengths: Sequence[int]) -> None:
    texts = ["abcdefghij"[number % 10] * length for number, length in enumerate(lengths)]
    shown = seen([part for text in texts for part in (text, Image(b"seen"))])
    assert isinstance(shown, ImageMessage)
    assert "".join(part for part in shown.parts if isinstance(part, str)) == shortened("".join(texts))
    assert [part for part in shown.parts if not isinstance(part, str)] == [Image(b"seen")] * len(lengths)


@pytest.mark.parametrize("answered", [{"temperature": 21}, ["a", 3], 21, None, {"a", "b"}])
def test_what_is_no_answer_of_a_tool_is_refused_by_the_tool_s_name(answered: Any) -> None:
    with pytest.raises(TypeError, match=r"the tool 'camera' answered .*; answer text, or a list of texts and Images"):
        seen(answered)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    rows = ['{"title": "Bees", "text": "Bees dance to tell where flowers are."}']
    rows.append('{"title": "Ants", "text": "Ants carry leaves, and \\"dance\\" never."}')
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    write_index(tmp_path / "index", read_documents(tmp_path / "corpus.jsonl"))
    return tmp_path / "index"


def test_documents_are_found_by_words_whatever_stands_in_a_query(index: Path) -> None:
    search = Retrieval(index)
    assert search.call({"query": "flowers"}) == "Bees\nBees dance to tell where flowers are."
    assert search.call({"query": "who dances?"}).count("dance") == 2, "by their stems"
    assert search.call({"query": '" OR NEAR( leaves* title:'}).startswith("Ants")
    assert search.call({"query": "whale"}) == "nothing was found"
    with pytest.raises(InvalidInputError, match="the query has no words"):
        search.call({"query": "?!"})


def test_what_is_no_index_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        write_index(index, [])
    with pytest.raises(ConfigError, match="is no index of documents"):
        Retrieval(tmp_path / "none")
    (tmp_path / "bad.jsonl").write_text('{"title": 1}')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1 is no object"):
        list(read_documents(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_programs_run_in_the_sandbox_and_say_what_went_wrong(sandbox: str) -> None:
    if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    python = Python(CodeScorer.model_validate({"sandbox": sandbox, "timeout_s": 20, "cpu_s": 2}))
    assert python.call({"code": "print(6 * 7)"}) == "42\n"
    failed = python.call({"code": "print(1)\n1 / 0"})
    assert failed.startswith("1\n")
    assert "ZeroDivisionError" in failed
    assert failed.endswith("[exit status 1]")
    assert "[ended: " in python.call({"code": "while True: print('a' * 1000)"})
