"""Programs against tests: what is read from a response and a row, and what passes. The sandbox here runs nothing; the
real ones are in tests/integration/test_code_sandbox.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.data.code_tests import CodeTest, read_tests
from rolecall.data.dataset import load_prompts
from rolecall.errors import ConfigError, ScorerUnavailableError
from rolecall.sandbox import Ran
from rolecall.scoring.scores import Item
from rolecall.settings import CodeScorer, DataSection, LanguageSection, RewardComponent, RewardSection
from rolecall.v1 import reward_pb2
from services.reward.scorers import code
from services.reward.scorers.code import CodeJudge, program_of, same_output, same_result

DOUBLE = "double"
IN_AND_OUT = [CodeTest(stdin="2", stdout="4"), CodeTest(stdin="3", stdout="6"), CodeTest(stdin="4", stdout="9")]


class Played:
    """A sandbox that plays programs: "double" doubles what it reads, "exit" ends at once, "stuck" takes all its time,
    "broken" does not compile, "away" finds no sandbox; a test that is code is reached by all others.
    """

    def __init__(self) -> None:
        self.ran: list[Sequence[str]] = []

    def check(self, commands: Sequence[str]) -> None:
        self.commands = list(commands)

    def run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, seconds: float, max_bytes: int
    ) -> Ran:
        self.ran.append(command)
        source = next(iter(files.values())).decode()
        program, _, rest = source.partition("\n")
        if "compiler" in command:
            return Ran(int(program == "broken"), source.encode(), 0.5)
        match program:
            case "away":
                raise ScorerUnavailableError("no sandbox")
            case "stuck":
                return Ran(None, b"", seconds)
            case "exit":
                return Ran(0, b"", 0.1)
        if rest:
            return Ran(0, b"said before " + rest.rpartition("print ")[2].encode(), 0.1)
        return Ran(0, str(2 * int(stdin)).encode(), 0.1)


def judge(**keys: Any) -> tuple[CodeJudge, Played]:
    sandbox = Played()
    language = keys.pop("language", LanguageSection(file="main", run=("interpreter", "main"), end="print {token}"))
    return CodeJudge(CodeScorer(language=language, **keys), sandbox), sandbox


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\na\n```\nno, better:\n```py\nb\n```", "b\n"),
        ("```python\ncut off", "```python\ncut off"),
        ("1. So:\n   ```python\n   if x:\n     y = '```'\n   ```", "if x:\n  y = '```'\n"),
        ("````md\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\n" * 20_000, "```python\n" * 20_000),
        ("use `f(x)` or ```f(x)```", "use `f(x)` or ```f(x)```"),
        ("```python\r\nprint(1)\r\n```", "print(1)\n"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_or_all_of_the_response(response: str, program: str) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("output", "expected", "equal"),
    [
        ("4\n", "4", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\r\n2\r\n", "1\n2\n", True),
        ("12", "1 2", False),
        ("\n4", "4", False),
        ("4\n5", "4", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_without_the_ends_of_lines(output: str, expected: str, equal: bool) -> None:
    assert same_output(output, expected) == equal


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        ("[0, 1]", "[0, 1]", True),
        ("[0, 1]", "[1, 0]", False),
        ("[0, 1, 2]", "[0, 1]", False),
        ("[0]", "[0, 1]", False),
        ("[[1], [2, 3]]", "[[1, 2], [3]]", False),
        ("[[1, 2, 3]]", "[1, 2, 3]", False),
        ("3", "[3]", False),
        ("[3]", "3", False),
        ("[[3]]", "[3]", False),
        ("[]", "0", False),
        ("[]", "{}", False),
        ('{"a": [1], "b": 2}', '{"b": 2, "a": [1]}', True),
        ('{"a": [1]}', '{"a": [1], "b": 2}', False),
        ('{"a": true}', '{"a": 1}', False),
        ('"3"', "3", False),
        ("3", '"3"', False),
        ('"3.0"', "3.0", False),
        ('"ab"', '["a", "b"]', False),
        ("true", "true", True),
        ("true", "1", False),
        ("1", "true", False),
        ("true", "1.0", False),
        ("false", "0", False),
        ("[[true]]", "[[1]]", False),
        ("null", "false", False),
        ("null", "0", False),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3.000001", "3", False),
        ("NaN", "NaN", False),
        ("1.0", "NaN", False),
        ("NaN", "1.0", False),
        ("Infinity", "Infinity", True),
        ("1e300", "Infinity", False),
        ("", "null", False),
        ("null and more", "null", False),
        ("[" * 100_000, "1", False),
        ("9" * 10_000, "1", False),
        ("9" * 1_000, "1.5", False),
    ],
)
def test_results_are_compared_as_values(result: str, expected: str, equal: bool) -> None:
    assert same_result(result, CodeTest(stdout=expected, function="f")) == equal


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        (0.1 + 0.2, 0.3, True),
        ([[1 / 3]], [[0.33333]], True),
        (-2 / 3, -0.66667, True),
        (0.3334, 0.33333, False),
        (0, 1e-6, False),
        (2e-6, 1e-6, False),
        (1e-6, 0.0, False),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (1234567.88, 1234567.89, False),
        (1234567890.12, 1234567890.13, False),
        (123456, 123456.4, False),
        (sum([0.1] * 10**6), 100000.0, True),
        (1e300, 1.0000000000001e300, True),
        (1.1e300, 1e300, False),
    ],
)
def test_floats_may_differ_as_rounding_makes_them(result: object, expected: object, equal: bool) -> None:
    assert same_result(json.dumps(result), CodeTest(stdout=json.dumps(expected), function="f")) == equal


@pytest.mark.parametrize(
    ("result", "outputs", "equal"),
    [
        ("5", [[5]], True),
        ("5", [[5], [6]], True),
        ("[5]", [[5], [6]], True),
        ("[1, 2]", [[[1, 2]]], True),
        ("5", ["[5]", "[6]"], True),
        ("5", [[5], [6, 7]], False),
        ("5", [[5], []], False),
        ("5", [[5], 6], False),
        ("5", ["[5]", "6"], False),
        ("5", [[[5]]], False),
        ("[[5]]", [[5]], False),
        ("true", [[1]], False),
        ('"5"', [[5]], False),
        ("0", [[]], False),
    ],
)
def test_the_element_passes_for_its_list_where_all_outputs_are_lists_of_one_element(
    result: str, outputs: list[object], equal: bool
) -> None:
    inputs: list[object] = ["1" if isinstance(each, str) else [1] for each in outputs]
    test, *_ = read_tests({"fn_name": "f", "inputs": inputs, "outputs": outputs})
    assert same_result(result, test) == equal


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        (["assert f(1) == 2"], [CodeTest(code="assert f(1) == 2")]),
        ([{"input": "1", "output": "2"}, {"output": "3"}], [CodeTest("1", "2"), CodeTest("", "3")]),
        ({"inputs": ["1"], "outputs": ["2"]}, [CodeTest("1", "2")]),
        ('{"inputs": ["1"], "outputs": ["2"]}', [CodeTest("1", "2")]),
        ('[{"input": "1", "output": "2", "testtype": "stdin"}]', [CodeTest("1", "2")]),
        ({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [2]}, [CodeTest('[1, "a"]', "2", function="f")]),
        ({"fn_name": "f", "inputs": ['1\n"a"\n'], "outputs": ["2"]}, [CodeTest('[1, "a"]', "2", function="f")]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, [CodeTest("[1]", "[2]", function="f", wrapped=True)]),
        ({"fn_name": None, "inputs": ["1"], "outputs": ["2"]}, [CodeTest("1", "2")]),
    ],
)
def test_tests_are_read_as_data_sets_write_them(value: object, tests: list[CodeTest]) -> None:
    assert read_tests(value) == tests


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "no list of tests"),
        ([], "no list of tests"),
        ("assert f(1)", "text that is not JSON"),
        ([1], "neither code nor texts"),
        ([" "], "neither code nor texts"),
        ([{"input": "1"}], "neither code nor texts"),
        ([{"input": 1, "output": "2"}], "neither code nor texts"),
        ({"inputs": ["1"], "outputs": []}, "of one length"),
        ({"inputs": [[1]], "outputs": [], "fn_name": "f"}, "of one length"),
        ({"inputs": [], "outputs": [], "fn_name": "f"}, "no list of tests"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "class"}, "no function's name"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "os.remove"}, "'os.remove' .*no function's name"),
        ({"inputs": [1], "outputs": [2], "fn_name": "f"}, "no list of arguments: 1"),
        ({"inputs": ["1\nx"], "outputs": ["2"], "fn_name": "f"}, "not JSON: 1"),
        ({"inputs": ["1"], "outputs": [2], "fn_name": "f"}, "not JSON: 1"),
    ],
)
def test_what_is_no_test_is_named(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tests(value)


def test_all_tests_must_pass_or_their_share_counts() -> None:
    whole, sandbox = judge()
    assert whole.score(DOUBLE, IN_AND_OUT[:2]) == 1.0
    assert whole.score(DOUBLE, IN_AND_OUT[::-1]) == 0.0
    assert len(sandbox.ran) == 3, "a program that has failed one test is not run again"
    assert judge(partial=True)[0].score(DOUBLE, IN_AND_OUT) == pytest.approx(2 / 3)


def test_a_program_that_exits_early_passes_no_test_that_is_code() -> None:
    tests = [CodeTest(code="assert True")]
    assert judge()[0].score("anything", tests) == 1.0
    assert judge()[0].score("exit", tests) == 0.0


def test_what_is_compiled_once_serves_all_tests_of_input_and_output() -> None:
    compiled = LanguageSection(file="main.cc", compile=("compiler", "main.cc"), run=("./main",))
    scorer, sandbox = judge(language=compiled)
    assert sandbox.commands == ["compiler"]
    assert scorer.score(DOUBLE, IN_AND_OUT[:2]) == 1.0
    assert ["compiler" in command for command in sandbox.ran] == [True, False, False]
    assert judge(language=compiled, partial=True)[0].score("broken", IN_AND_OUT) == 0.0


def test_tests_share_the_time_of_a_program() -> None:
    scorer, sandbox = judge(partial=True, timeout_s=8.0)
    assert scorer.score("stuck", IN_AND_OUT) == 0.0
    assert len(sandbox.ran) == 1


def test_a_sandbox_that_does_not_start_gives_no_score_and_none_is_remembered() -> None:
    scorer, sandbox = judge()
    for _ in range(2):
        with pytest.raises(ScorerUnavailableError, match="no sandbox"):
            scorer.score("away", IN_AND_OUT)
    assert len(sandbox.ran) == 2


def test_a_program_is_run_once_for_the_same_tests() -> None:
    scorer, sandbox = judge(partial=True)
    first = scorer.score(DOUBLE, IN_AND_OUT)
    assert scorer.score(DOUBLE, IN_AND_OUT) == first
    assert len(sandbox.ran) == 3
    scorer.score(DOUBLE, IN_AND_OUT[:1])
    assert len(sandbox.ran) == 4


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_REMEMBERED", 2)
    scorer, sandbox = judge()
    for stdin in ("1", "2", "1", "3", "1", "2"):
        scorer.score(DOUBLE, [CodeTest(stdin, "0")])
    assert len(sandbox.ran) == 4, "2 was longest not asked for when 3 came"


def test_an_item_has_more_time_than_its_program() -> None:
    scorer = {"kind": "code", "timeout_s": 8.0}
    with pytest.raises(ValueError, match=r"8 s are over before the program's tests are"):
        RewardComponent.model_validate({"scorer": scorer, "timeout_s": 8.0})
    RewardComponent.model_validate({"scorer": scorer})


@pytest.mark.parametrize(
    ("row", "language", "words"),
    [
        ('"tests": ["assert f(1)"]', None, ""),
        ('"uid": "1"', None, "no list of tests"),
        ('"tests": ["assert f(1)"]', {"file": "a.cc", "run": ["./a"]}, r"needs scorer\.language\.end"),
        ('"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}', None, ""),
        (
            '"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}',
            {"file": "a.cc", "run": ["./a"]},
            r"need scorer\.language\.call",
        ),
    ],
)
def test_rows_without_tests_are_found_before_the_run(
    tmp_path: Path, row: str, language: dict[str, object] | None, words: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "write f", {row}}}\n')
    scorer = {"kind": "code"} | ({} if language is None else {"language": language})
    reward = RewardSection.model_validate({"components": {"tests": {"scorer": scorer}}}, context={"base": tmp_path})
    load: Callable[[], object] = lambda: load_prompts(file, DataSection(train=file), reward)  # noqa: E731
    if words:
        with pytest.raises(ConfigError, match=f"line 1, field 'tests': .*{words}"):
            load()
    else:
        load()


def test_calls_of_a_row_are_made_with_the_numbers_that_were_written(tmp_path: Path) -> None:
    """A message knows one kind of number, float64."""
    path = tmp_path / "train.jsonl"
    tests = {"fn_name": "f", "inputs": [[3, 1.0], [10**18 + 1, 0.5]], "outputs": [3.0, 2]}
    path.write_text(json.dumps({"prompt": "Write f.", "tests": tests}))
    reward = RewardSection.model_validate({"components": {"passes": {"scorer": {"kind": "code"}}}})
    (row,) = load_prompts(path, DataSection(train=path), reward)
    item = reward_pb2.ScoreItem()
    item.metadata.update(dict(row.metadata))
    first, second = read_tests(Item.from_proto(item).metadata["tests"])
    assert (first.stdin, first.stdout) == ("[3, 1.0]", "3.0")
    assert (second.stdin, second.stdout) == ("[1000000000000000001, 0.5]", "2")
