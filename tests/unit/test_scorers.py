"""The built-in scorers against tables worked by hand, and against properties where a table would be too short."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rolecall.errors import BadGroundTruthError, ConfigError
from rolecall.scoring.scores import Item, Score
from rolecall.settings import COMPARING as COMPARING_KINDS
from rolecall.settings import ExternalScorer, FunctionScorer, ScorerSection
from services.reward import catalog
from services.reward.scorers.boxed import boxed_match, last_boxed
from services.reward.scorers.exact_match import exact_match
from services.reward.scorers.format import matches_format
from services.reward.scorers.json_ import is_json
from services.reward.scorers.length import length_cost
from services.reward.scorers.math import math_equal
from services.reward.scorers.regex import regex_match

SECTION: TypeAdapter[ScorerSection] = TypeAdapter(ScorerSection)
LOCAL_KINDS: list[dict[str, object]] = [
    {"kind": "exact_match"},
    {"kind": "regex", "pattern": r"(\d+)"},
    {"kind": "boxed"},
    {"kind": "hendrycks_math"},
    {"kind": "minerva_math"},
    {"kind": "dapo_math"},
    {"kind": "math"},
    {"kind": "gsm8k", "flexible": True},
    {"kind": "numeric"},
    {"kind": "qa_exact_match"},
    {"kind": "qa_f1"},
    {"kind": "json"},
    {"kind": "format", "pattern": ".*"},
    {"kind": "length", "max_tokens": 10},
]
COMPARING = [kind for kind in LOCAL_KINDS if kind["kind"] in COMPARING_KINDS]


@pytest.mark.parametrize(
    ("response", "truth", "ignore_case", "expected"),
    [
        ("12348", "12348", False, 1.0),
        ("  12348\n", "12348 ", False, 1.0),
        ("1234", "12348", False, 0.0),
        ("", "12348", False, 0.0),
        ("Paris", "paris", False, 0.0),
        ("Paris", "paris", True, 1.0),
        ("STRASSE", "straße", True, 1.0),
        ("a b", "a  b", False, 0.0),
    ],
)
def test_exact_match_compares_stripped_texts(response: str, truth: str, ignore_case: bool, expected: float) -> None:
    assert exact_match(response, truth, ignore_case=ignore_case) == expected


@pytest.mark.parametrize(
    ("pattern", "response", "truth", "expected"),
    [
        (r"####\s*(-?\d+)", "so 3 + 4 = 7\n#### 7", "7", 1.0),
        (r"####\s*(-?\d+)", "#### 7 no, #### 8", "7", 0.0),
        (r"####\s*(-?\d+)", "7", "7", 0.0),
        (r"\d+", "first 1, then 22", "22", 1.0),
        (r"(\d+)|none", "none", "none", 0.0),
        (r"<answer>(.*?)</answer>", "<answer> 42 </answer>", "42", 1.0),
    ],
)
def test_regex_compares_the_last_match(pattern: str, response: str, truth: str, expected: float) -> None:
    assert regex_match(response, truth, re.compile(pattern)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a \boxed{b} c}", "b"),
        ("42", None),
        ("\\boxed{1\\", None),
    ],
)
def test_the_last_complete_box_is_read_with_its_braces_balanced(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_a_box_is_found_in_one_pass() -> None:
    """Where each that is open were looked at to the end, this would take hours."""
    opened = "\\boxed{" * 200_000
    assert last_boxed(opened) is None
    assert last_boxed(opened + "7}") == "7"


@given(st.text(alphabet="ab{}", max_size=20))
def test_a_box_around_balanced_text_gives_the_text_back(text: str) -> None:
    depth, balanced = 0, True
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0:
        assert last_boxed(f"x \\boxed{{{text}}} y") == text


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{1, 2}", "1,2", 1.0),
        (r"\boxed{7}", r"\boxed{7}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 0.0),
        ("7", "7", 0.0),
    ],
)
def test_boxed_compares_texts_without_white_space(response: str, truth: str, expected: float) -> None:
    assert boxed_match(response, truth) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"The answer is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
        ("so it is 42.", "42", 1.0),
        ("41", "42", 0.0),
        ("", "42", 0.0),
        ("I do not know", "42", 0.0),
        (r"\boxed{\{1,2\}}", r"$\{2,1\}$", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),
        (r"\boxed{6-5i}", "6 - 5i", 1.0),
        (r"\boxed{5}", "6 - 5i", 0.0),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1.0),
        (r"\boxed{1}", "x^2 + 2x + 1", 0.0),
        (r"\boxed{\frac{7}{3}}", r"2\frac{1}{3}", 1.0),
        (r"\boxed{\frac{1}{3}}", r"2\frac{1}{3}", 0.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{2}", "(1, 2)", 0.0),
        (r"\boxed{5}", "x=5", 1.0),
        (r"\boxed{y = 2x+1}", "y=2x+1", 1.0),
        (r"\boxed{1}", "y=2x+1", 0.0),
        (r"\boxed{4, 3}", "3 or 4", 1.0),
        (r"\boxed{1234.5}", "1,234.5", 1.0),
        (r"\boxed{-1500}", "-1.5e3", 1.0),
        (r"\boxed{0.5}", "50%", 1.0),
        (r"\boxed{12\text{ cm}}", "12 cm", 1.0),
        (r"\boxed{60}", "60 km/h", 1.0),
        (r"\boxed{9.8}", "9.8 m/s^2", 1.0),
        ("The answer is 25.", "25 people", 1.0),
        (r"\boxed{\frac{3}{4}}", "3/4 cup", 1.0),
        (r"\boxed{20}", "£20", 1.0),
        (r"\boxed{1024}", "2**10", 1.0),
        (r"\boxed{2}", "2**10", 0.0),
        (r"\boxed{\text{Friday}}", "Monday", 0.0),
        (r"\boxed{\text{Monday}}", "Monday", 1.0),
    ],
)
def test_math_finds_equal_expressions(response: str, truth: str, expected: float) -> None:
    assert math_equal(response, truth)[0] == expected


def test_math_refuses_a_ground_truth_without_an_expression() -> None:
    with pytest.raises(BadGroundTruthError, match="finds no expression"):
        math_equal("42", "$$")


@pytest.mark.parametrize(
    ("response", "keys", "expected"),
    [
        ('{"a": 1}', (), 1.0),
        ('{"a": 1}', ("a",), 1.0),
        ('{"a": 1}', ("a", "b"), 0.0),
        ("[1, 2]", (), 1.0),
        ("[1, 2]", ("a",), 0.0),
        ("{a: 1}", (), 0.0),
        ("NaN", (), 0.0),
        ("", (), 0.0),
        ("[" * 100_000, (), 0.0),
    ],
)
def test_json_wants_standard_json_with_the_required_keys(response: str, keys: tuple[str, ...], expected: float) -> None:
    assert is_json(response, keys) == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_whatever_json_writes_is_json(value: object) -> None:
    assert is_json(json.dumps(value)) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("  <think></think><answer></answer>\n", 1.0),
        ("<think>a</think><answer>c</answer> and more", 0.0),
        ("<answer>c</answer>", 0.0),
    ],
)
def test_format_matches_the_whole_response(response: str, expected: float) -> None:
    assert matches_format(response, re.compile(r"<think>.*</think>\s*<answer>.*</answer>", re.DOTALL)) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (5, -0.5), (10, -1.0), (11, -1.0)])
def test_length_costs_a_share_of_max_tokens(tokens: int, expected: float) -> None:
    assert length_cost(tokens, 10) == expected


@given(tokens=st.integers(0, 10**6), max_tokens=st.integers(1, 10**5))
def test_the_length_cost_never_leaves_its_range_and_never_falls_with_fewer_tokens(tokens: int, max_tokens: int) -> None:
    assert -1.0 <= length_cost(tokens, max_tokens) <= 0.0
    assert length_cost(tokens + 1, max_tokens) <= length_cost(tokens, max_tokens)


@pytest.mark.parametrize("kind", COMPARING, ids=lambda kind: str(kind["kind"]))
def test_the_best_of_several_ground_truths_counts(kind: dict[str, object]) -> None:
    boxes = dict.fromkeys(("boxed", "hendrycks_math", "minerva_math", "math"), r"\boxed{7}")
    response = {**boxes, "dapo_math": "Answer: 7"}.get(str(kind["kind"]), "7")
    score = catalog.bind(SECTION.validate_python(kind))  # type: ignore[arg-type]
    for others, expected in ((("7",), 1.0), (("8",), 0.0)):
        found = score(Item("i", response_text=response, ground_truth="6", other_ground_truths=others))
        assert isinstance(found, Score)
        assert found.value == expected


@pytest.mark.parametrize("kind", LOCAL_KINDS, ids=lambda kind: str(kind["kind"]))
@given(response=st.text(max_size=40), tokens=st.integers(0, 20))
def test_every_built_in_stays_within_the_range_it_describes(
    kind: dict[str, object], response: str, tokens: int
) -> None:
    scorer = SECTION.validate_python(kind)
    spec = catalog.describe("x", scorer)  # type: ignore[arg-type]
    result = catalog.bind(scorer)(Item("i", response_text=response, ground_truth="7", num_response_tokens=tokens))  # type: ignore[arg-type]
    value = result.value if isinstance(result, Score) else result
    assert isinstance(value, float)
    assert spec.reward.min <= value <= spec.reward.max


@pytest.mark.parametrize(
    ("kind", "response", "expected"),
    [
        ({"kind": "exact_match"}, " Paris\n", "Paris"),
        ({"kind": "exact_match", "ignore_case": True}, "PARIS", "paris"),
        ({"kind": "regex", "pattern": r"####\s*(-?\d+)"}, "#### 7 no, #### 8", "8"),
        ({"kind": "regex", "pattern": r"####\s*(-?\d+)"}, "7", None),
        ({"kind": "regex", "pattern": r"(\d+)|none"}, "none", None),
        ({"kind": "boxed"}, r"\boxed{1} then \boxed{ 2, 3 }", "2,3"),
        ({"kind": "boxed"}, "2, 3", None),
        ({"kind": "math"}, r"so \boxed{\frac12}", "1/2"),
        ({"kind": "math"}, "half of it is 1/2", "1/2"),
        ({"kind": "math"}, "I do not know", None),
        ({"kind": "math"}, r"\boxed{\binom{20000}{10000}}", r"\binom{20000}{10000}"),
    ],
)
def test_a_comparing_scorer_names_the_answer_it_read(
    kind: dict[str, object], response: str, expected: str | None
) -> None:
    score = catalog.bind(SECTION.validate_python(kind))(Item("i", response_text=response, ground_truth="7"))  # type: ignore[arg-type]
    assert isinstance(score, Score)
    assert score.answer == expected


@pytest.mark.parametrize("kind", COMPARING, ids=lambda kind: str(kind["kind"]))
def test_a_missing_ground_truth_is_an_error_not_a_zero(kind: dict[str, object]) -> None:
    score = catalog.bind(SECTION.validate_python(kind))  # type: ignore[arg-type]
    with pytest.raises(BadGroundTruthError, match="no ground truth"):
        score(Item("7/0", response_text="42"))


def test_a_function_that_is_not_there_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        catalog.bind(FunctionScorer(target="json:nothing"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "regex", "pattern": "("}, "not a Python regular expression"),
        ({"kind": "function", "target": "no_colon"}, "'no_colon' is not module:function"),
    ],
)
def test_a_scorer_that_cannot_work_is_refused_with_the_configuration(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SECTION.validate_python(section)


def test_a_token_for_somebody_else_s_scorer_means_tls() -> None:
    assert ExternalScorer(address="h:1", bearer_token_file=Path("t")).tls
    assert not ExternalScorer(address="h:1").tls


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"kind": "regex"}, "pattern is missing: regex looks by"),
        ({"kind": "format"}, "pattern is missing: format looks by"),
        ({"kind": "numeric", "flexible": True}, "flexible: numeric has none"),
        ({"kind": "gsm8k", "tolerance": 0.1}, "tolerance: gsm8k has none"),
    ],
)
def test_a_scorer_without_what_it_needs_or_with_what_is_another_s_is_refused(
    section: dict[str, object], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        SECTION.validate_python(section)
