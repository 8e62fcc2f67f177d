"""The scorers of published data sets, against cases worked by hand from the published normalisation."""

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rolecall.errors import BadGroundTruthError
from rolecall.scoring.scores import Item, Score
from rolecall.settings.reward.presets import INSTRUCTIONS
from services.reward.catalog import LocalScorer, bind
from services.reward.scorers.dapo_math import dapo_answer, dapo_match
from services.reward.scorers.hendrycks_math import hendrycks_match, normalized_math
from services.reward.scorers.ifeval import CHECKS, followed, followed_loosely
from services.reward.scorers.minerva_math import minerva_answer, minerva_match, minerva_normalized
from services.reward.scorers.multiple_choice import choice_answer, choice_match
from services.reward.scorers.numbers import gsm8k_answer, gsm8k_match, last_number, numeric_match
from services.reward.scorers.qa import normalized, qa_answer, qa_exact_match, qa_f1

SECTION: TypeAdapter[LocalScorer] = TypeAdapter(LocalScorer)


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1.0, 1.0),
        ("#### 1,234", "He has 1,234.\n#### 1,234", 1.0, 1.0),
        ("#### 1234.", "1,234", 1.0, 1.0),
        ("#### -5", "-5", 1.0, 1.0),
        ("So the answer is $72.", "72", 0.0, 1.0),
        ("#### 7\nNo wait: #### 8", "7", 1.0, 0.0),  # the first mark, but the last number
        ("#### 7.0", "7", 0.0, 0.0),  # texts, not numbers: numeric compares those
        ("####7", "7", 0.0, 1.0),
        ("seven", "7", 0.0, 0.0),
        ("#### .", "7", 0.0, 0.0),
    ],
)
def test_gsm8k_reads_the_number_after_the_mark(response: str, truth: str, strict: float, flexible: float) -> None:
    assert gsm8k_match(response, truth) == strict
    assert gsm8k_match(response, truth, flexible=True) == flexible


def test_gsm8k_answers_without_commas_and_none_without_a_number() -> None:
    assert gsm8k_answer("#### 1,234,567") == "1234567"
    assert gsm8k_answer("12 apples and 13 pears", flexible=True) == "13"
    assert gsm8k_answer("no number", flexible=True) is None


@pytest.mark.parametrize(
    ("response", "truth", "tolerance", "expected"),
    [
        ("it is 7.50", "7.5", 0.0, 1.0),
        (r"\boxed{1,000} of 2", "1000", 0.0, 1.0),
        ("5-3", "3", 0.0, 1.0),  # a minus after a digit subtracts
        ("x = -3", "-3", 0.0, 1.0),
        ("1e3", "1000", 0.0, 1.0),
        ("99", "100", 0.01, 1.0),
        ("98.9", "100", 0.01, 0.0),
        (".5", "0.5", 0.0, 1.0),
        ("none", "0", 0.0, 0.0),
    ],
)
def test_numeric_compares_the_last_number(response: str, truth: str, tolerance: float, expected: float) -> None:
    assert numeric_match(response, truth, tolerance=tolerance) == expected


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"\frac{3}{4}", "0.75"),
        (r"\boxed{\frac{3}{4}}", "0.75"),
        (r"so $\dfrac{3}{4}$.", "0.75"),
        (r"-\tfrac{3}{4}", "-0.75"),
        (r"\frac{-3}{4}", "-0.75"),
        (r"-\frac{-3}{4}", "0.75"),
        (r"x-\frac{3}{4}", "0.75"),  # it subtracts
        (r"\frac {.5} { 1,000 }", "0.0005"),
        (r"2\frac{3}{4}", "2.75"),
        (r"-$1,002 \frac{1}{2}$", "-1002.5"),
        (r"2.5\frac{1}{2}", "0.5"),  # a product, as are the next
        (r"2^3\frac{1}{2}", "0.5"),
        (r"2\frac{-1}{2}", "-0.5"),
        (r"2\cdot\frac{1}{2}", "0.5"),
        (r"\frac{3}{4} = 0.75, not 5", "5"),
        # no fraction of two numbers: the last number, as without any
        (r"\frac{3}{0}", "0"),
        (r"\frac{\pi}{4}", "4"),
        (r"\frac{3}{x}", "3"),
        (r"\frac{3}{2x}", "2"),
        (r"\frac34", "34"),
        (r"\sqrt{3}{4}", "4"),
        ("3/4", "4"),
        ("1 3/4", "4"),
        ("-3", "-3"),
        ("$1,234.50.", "1234.50"),
    ],
)
def test_a_fraction_of_latex_is_one_number(response: str, value: str) -> None:
    assert last_number(response) == Decimal(value)


@pytest.mark.parametrize("truth", [r"\frac{4}{3}", r"1\frac{1}{3}", r"\frac{8}{6}", r"\frac{0.4}{0.3}"])
def test_a_fraction_is_right_however_it_is_written(truth: str) -> None:
    assert numeric_match(r"\frac{4}{3}", truth) == 1.0
    assert numeric_match("3", truth) == 0.0
    assert numeric_match("1.3333", truth, tolerance=1e-4) == 1.0


@pytest.mark.parametrize("again", ["1", "1,", "1,111", "1 ", "-", r"\frac{", r"\frac{1}", r"1\frac{1}{", r"\frac{ "])
def test_a_fraction_that_never_ends_takes_no_minutes(again: str) -> None:
    assert last_number(again * 60_000 + "7") is not None


@pytest.mark.parametrize("again", ["1+", "\\text{", "1 ", "$ "])
def test_an_answer_that_never_ends_is_wrong_and_takes_no_minutes(again: str) -> None:
    assert minerva_match("The final answer is " + again * 60_000, "7") == 0.0


def test_numeric_refuses_a_ground_truth_without_a_number() -> None:
    with pytest.raises(BadGroundTruthError, match="holds no number"):
        numeric_match("7", "seven")
    assert last_number("seven") is None


def test_squads_normalisation_removes_case_punctuation_and_articles() -> None:
    assert normalized("The  U.S.A., and an Apple!") == "usa and apple"
    assert normalized("a an the") == ""
    assert normalized("theatre") == "theatre"


@pytest.mark.parametrize(
    ("response", "truth", "exact", "f1"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1.0, 1.0),
        ("tower", "Eiffel Tower", 0.0, 2 / 3),  # precision 1, recall 1/2
        ("the big red house", "a red house", 0.0, 0.8),  # 2 common, 3 found, 2 wanted: 4/5
        ("red red", "red", 0.0, 2 / 3),  # counted with repetition
        ("Paris", "London", 0.0, 0.0),
        ("", "the", 1.0, 1.0),  # both are empty
        ("", "London", 0.0, 0.0),
    ],
)
def test_qa_compares_words(response: str, truth: str, exact: float, f1: float) -> None:
    assert qa_exact_match(qa_answer(response), truth) == exact
    assert qa_f1(qa_answer(response), truth) == pytest.approx(f1)


def test_qa_reads_the_last_match_of_a_pattern_and_nothing_without_one() -> None:
    pattern = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
    assert qa_answer("<answer>no</answer> <answer>The\nend.</answer>", pattern) == "end"
    assert qa_answer("The end", pattern) is None
    assert qa_f1(None, "the") == qa_exact_match(None, "the") == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"2\sqrt{3}", r"2\sqrt{3}"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (".25", "0.25"),
        ("x = 5", "5"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"10\text{ cm}", "10"),
        (r"90^\circ", "90"),
        (r"50\%", "50"),
        (r"\$1,\!000", "1,000"),
        ("a+b=c", "a+b=c"),
    ],
)
def test_maths_normalisation(answer: str, expected: str) -> None:
    assert normalized_math(answer) == expected


def test_hendrycks_math_compares_boxes() -> None:
    assert hendrycks_match(r"so \boxed{\dfrac{3}{4}}.", r"\frac34") == 1.0
    assert hendrycks_match(r"so \boxed{\dfrac{3}{4}}.", r"We get $\boxed{3/4}$") == 1.0
    assert hendrycks_match("3/4", "3/4") == 0.0
    assert hendrycks_match(r"\boxed{0.75}", "3/4") == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The answer is (C).", "C"),
        ("The answer is A? No, the answer is B.", "B"),
        ("the answer is **D**", "D"),
        ("Answer: B\nbecause A is wrong", "B"),
        ("**Answer:** (C)", "C"),
        (r"answer is A, so \boxed{C}", "C"),
        (r"\boxed{\text{(D)}}", "D"),
        (r"\boxed{Cat}", None),
        ("A or B? I take D", "D"),
        ("The answer is Apple", None),
        ("E", None),
        ("", None),
    ],
)
def test_a_letter_is_read_from_what_a_response_settles_on(response: str, expected: str | None) -> None:
    assert choice_answer(response, "ABCD") == expected


def test_multiple_choice_refuses_a_ground_truth_that_is_no_letter() -> None:
    assert choice_match("Answer: C", " (c) ", "ABCD") == 1.0
    with pytest.raises(BadGroundTruthError, match="is no letter of ABCD"):
        choice_match("Answer: C", "E", "ABCD")


IFEVAL: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "Moon"]}, "The moon and the Sun", "The moon"),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2.0, "relation": "at least"}, "Ha ha", "ha"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a Cat."),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "less than"}, "Aab", "AaA"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One 1.5. Two!", "One 1.5."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***", "a\n***\n***\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
        "First\n\n'So, yes",
        "So\n\nFirst",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\np. s. more", "Bye"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*this*", "* *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "SECTION 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Ode>>", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because", "Because"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'so "the END."', "the end. Or not"),
    ("startend:quotation", {}, '"quoted"', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "BIG and RED",
        "BIG and red",
    ),
    ("change_case:english_capital", {}, "ALL 1", "All"),
    ("change_case:english_lowercase", {}, "all 1", "All"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("name", "given", "good", "bad"), IFEVAL, ids=lambda value: value if ":" in str(value) else "")
def test_an_instruction_is_checked(name: str, given: dict[str, Any], good: str, bad: str) -> None:
    padded = {**given, "another": None}  # the data set writes null where an instruction takes no argument
    assert followed(good, [name], [padded]) == [True]
    assert followed(bad, [name], [padded]) == [False]
    assert followed(" ", [name], [padded]) == [False]


@given(st.text("[]<>\n a", max_size=40), st.integers(0, 4))
def test_brackets_are_counted_as_patterns_find_them(text: str, num: int) -> None:
    by_pattern = len(re.findall(r"\[.*?\]", text)) >= num
    assert CHECKS["detectable_content:number_placeholders"](text, num_placeholders=num) == by_pattern
    by_pattern = any(title.strip() for title in re.findall(r"<<([^\n]+?)>>", text))
    assert CHECKS["detectable_format:title"](text) == by_pattern


def test_endless_brackets_are_looked_through_once() -> None:
    assert not CHECKS["detectable_content:number_placeholders"]("[" * 1_000_000, num_placeholders=1)
    assert CHECKS["detectable_format:title"]("<<a>> " + "<" * 1_000_000)


def test_every_instruction_of_the_settings_has_a_check_and_a_case() -> None:
    assert CHECKS.keys() == INSTRUCTIONS == {case[0] for case in IFEVAL}


def test_loosely_a_first_line_and_asterisks_are_forgiven() -> None:
    names = ["change_case:english_lowercase", "startend:quotation"]
    given: list[dict[str, Any]] = [{}, {}]
    text = 'Sure, here it is:\n*"all lower"*'
    assert followed(text, names, given) == [False, False]
    assert followed_loosely(text, names, given) == [True, True]


@pytest.mark.parametrize(
    ("instructions", "arguments", "told"),
    [
        (["language:response_language"], [{}], "is not among those that kind ifeval checks"),
        (["keywords:existence"], [{}], "has other arguments than it needs"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "exactly"}], "neither 'at least' nor"),
    ],
)
def test_an_instruction_that_cannot_be_checked_is_bad_data(
    instructions: list[str], arguments: list[dict[str, Any]], told: str
) -> None:
    with pytest.raises(BadGroundTruthError, match=told):
        followed("text", instructions, arguments)


@pytest.mark.parametrize(
    ("section", "item", "value", "answer"),
    [
        ({"kind": "gsm8k"}, Item("i", "#### 3", "2", ("3",)), 1.0, "3"),
        ({"kind": "numeric"}, Item("i", "3.00", "2", ("3",)), 1.0, "3"),
        ({"kind": "qa_f1"}, Item("i", "the red house", "blue", ("a red car",)), 0.5, "red house"),
        ({"kind": "qa_exact_match", "pattern": "A: (.*)"}, Item("i", "A: Red!", "blue", ("red",)), 1.0, "red"),
        ({"kind": "multiple_choice"}, Item("i", "Answer: C", "A", ("C",)), 1.0, "C"),
    ],
)
def test_a_preset_scores_by_the_nearest_of_several_answers(
    section: dict[str, Any], item: Item, value: float, answer: str
) -> None:
    assert bind(SECTION.validate_python(section))(item) == Score(value, answer=answer)


def test_ifeval_scores_all_or_the_share_and_refuses_prompts_without_instructions() -> None:
    fields = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    item = Item("i", "no comma", metadata=fields)
    assert bind(SECTION.validate_python({"kind": "ifeval"}))(item) == 0.0
    assert bind(SECTION.validate_python({"kind": "ifeval", "partial": True}))(item) == 0.5
    with pytest.raises(BadGroundTruthError, match="has no instruction_id_list"):
        bind(SECTION.validate_python({"kind": "ifeval"}))(Item("i", "x"))


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 5", "5"),
        ("a = b = 7", "7"),
        ("12 dollars", "12"),
        (r"12\text{ dollars}", "12"),
        (r"\$12.50", "12.50"),
        ("100,000", "100000"),
        ("1,2", "12"),  # the paper's rule for whole numbers takes the comma of a pair, too
        ("(1, 2)", "(1,2)"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\frac123", r"\frac{1}{2}3"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"2\sqrt{3}", r"2\sqrt{3}"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        ("45 degrees", "45"),
        (r"The answer is $\pi$.", r"\pi"),
        (r"$3$", "3"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{(B)}", "(B)"),
        (r"\boxed{8}", "8"),
        (r"3\mbox{ cm}", "3"),
        (r"5\text{ and }x", "5,x"),
        (r"5, \mbox{and} x", "5,x"),
        (r"10^{\mathrm{th}}", "10^{}"),
        (r"1{,}000", "1000"),
        ("3 square units", "3"),
        ("a cat", "cat"),
    ],
)
def test_minervas_normalisation_follows_the_paper(answer: str, normal: str) -> None:
    assert minerva_normalized(answer) == normal


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5", 1.0),
        ("The final answer is 1,000. I hope it is correct.", r"\boxed{1000}", 1.0),
        ("The final answer is 4. I hope it is correct. No: the final answer is 5. I hope it is correct.", "5", 1.0),
        (r"so \boxed{x=\frac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{3} ... The final answer is 5. I hope it is correct.", "3", 0.0),
        ("The final answer is 0.5. I hope it is correct.", r"\frac{1}{2}", 0.0),
        ("The answer is 5.", "5", 0.0),
        ("Final Answer: The final answer is $5$. ", "5", 1.0),  # cut at the stop sequence "I hope it is correct"
        ("The final answer is 5.\nWe are done.", "5", 1.0),
        ("The final answer is 4? No. The final answer is 5. I hope it is correct.", "5", 1.0),
        (r"The final answer is: $$\boxed{5}$$", "5", 1.0),
        ("The final answer is\n$5$\n. I hope it is correct.", "5", 1.0),
    ],
)
def test_minerva_reads_what_the_response_calls_its_final_answer(response: str, truth: str, expected: float) -> None:
    assert minerva_match(response, truth) == expected


def test_minerva_without_a_final_answer_or_a_box_has_no_answer() -> None:
    assert minerva_answer("5") is None


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("So it is 34.\n\nAnswer: 34", "34", 1.0),
        ("Answer: 33\nNo.\nanswer : $34$", "34", 1.0),
        (r"Answer: $\boxed{34}$", "34", 1.0),
        (r"Answer: \frac12", r"\boxed{\frac{1}{2}}", 1.0),
        ("Answer: 1,000 dollars", "1000", 1.0),
        ("Answer: 34\nAnswer: 33", "34", 0.0),
        ("Answer: 34" + "x" * 300, "34", 0.0),  # too far from the end
        (r"\boxed{34}", "34", 0.0),
        ("Answer:", "", 0.0),
    ],
)
def test_dapo_reads_the_last_line_that_says_answer(response: str, truth: str, expected: float) -> None:
    assert dapo_match(response, truth) == expected


def test_dapo_without_such_a_line_has_no_answer() -> None:
    assert dapo_answer("34") is None
