"""Programs against tests: what is read from a response and a row, and what passes. The sandbox here runs nothing; the
real ones are in tests/integration/test_code_sandbox.py.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.data.code_tests import CodeTest, read_tests
from rolecall.data.dataset import load_prompts
from rolecall.errors import ConfigError, ScorerUnavailableError
from rolecall.sandbox import Ran
from rolecall.settings import CodeScorer, DataSection, LanguageSection, RewardComponent, RewardSection
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
        ("3", "[3]", True),
        ("[3]", "3", False),
        ("[[3]]", "[3]", False),
        ('"3"', "3", False),
        ("true", "true", True),
        ("", "null", False),
        ("null and more", "null", False),
        ("[" * 100_000, "1", False),
        ("9" * 10_000, "1", False),
    ],
)
def test_results_are_compared_as_values(result: str, expected: str, equal: bool) -> None:
    assert same_result(result, expected) == equal


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        (["assert f(1) == 2"], [CodeTest(code="assert f(1) == 2")]),
        ([{"input": "1", "output": "2"}, {"output": "3"}], [CodeTest("1", "2"), CodeTest("", "3")]),
        ({"inputs": ["1"], "outputs": ["2"]}, [CodeTest("1", "2")]),
        ('{"inputs": ["1"], "outputs": ["2"]}', [CodeTest("1", "2")]),
        ('[{"input": "1", "output": "2", "testtype": "stdin"}]', [CodeTest("1", "2")]),
        ({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[2]]}, [CodeTest('[1, "a"]', "[2]", function="f")]),
        ({"fn_name": "f", "inputs": ['1\n"a"\n'], "outputs": ["[2]"]}, [CodeTest('[1, "a"]', "[2]", function="f")]),
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
