"""Sections of the scorers that published data sets are scored with."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from rolecall.settings.section import NonNegativeFloat, Pattern, Section

INSTRUCTIONS = frozenset(
    {
        "change_case:capital_word_frequency",
        "change_case:english_capital",
        "change_case:english_lowercase",
        "combination:repeat_prompt",
        "combination:two_responses",
        "detectable_content:number_placeholders",
        "detectable_content:postscript",
        "detectable_format:constrained_response",
        "detectable_format:json_format",
        "detectable_format:multiple_sections",
        "detectable_format:number_bullet_lists",
        "detectable_format:number_highlighted_sections",
        "detectable_format:title",
        "keywords:existence",
        "keywords:forbidden_words",
        "keywords:frequency",
        "keywords:letter_frequency",
        "length_constraints:nth_paragraph_first_word",
        "length_constraints:number_paragraphs",
        "length_constraints:number_sentences",
        "length_constraints:number_words",
        "punctuation:no_comma",
        "startend:end_checker",
        "startend:quotation",
    }
)
"""Instructions of IFEval that kind ifeval checks: all but language:response_language, which needs a language model."""
INSTRUCTIONS_FIELD = "instruction_id_list"
"""IFEval's field of a prompt's instructions; `kwargs` holds the arguments of each."""


class Gsm8kScorer(Section):
    """1 when the number after "#### " is the ground truth's, else 0 (GSM8K)."""

    kind: Literal["gsm8k"] = "gsm8k"
    """The scorer that this section chooses."""
    flexible: bool = False
    """Read the last number of the response, whatever stands before it."""


class NumericScorer(Section):
    r"""1 when the last number of the response (of its last \boxed{...}, where there is one) equals the ground truth's,
    else 0.
    """

    kind: Literal["numeric"] = "numeric"
    """The scorer that this section chooses."""
    tolerance: NonNegativeFloat = 0.0
    """Greatest difference, as a share of the ground truth."""


class QaScorer(Section):
    """The answer against the ground truth that it is nearest to, normalised as in SQuAD.

    - `qa_exact_match`: 1 when they are equal, else 0.
    - `qa_f1`: the F1 score of their words.
    """

    kind: Literal["qa_exact_match", "qa_f1"]
    """The scorer that this section chooses."""
    pattern: Pattern | None = None
    """Regular expression whose last match (group 1 if it has one), dot matching newlines, is the answer; absent: the
    whole response is.
    """


class ChoiceScorer(Section):
    """1 when the response settles on the ground truth's letter, else 0."""

    kind: Literal["multiple_choice"] = "multiple_choice"
    """The scorer that this section chooses."""
    choices: Annotated[str, Field(pattern=r"^[A-Z]+$")] = "ABCDEFGHIJ"
    """The letters that may be answered."""


class InstructionScorer(Section):
    """1 when the response follows every instruction in its prompt's fields `instruction_id_list` and `kwargs`, else 0
    (IFEval).
    """

    kind: Literal["ifeval"] = "ifeval"
    """The scorer that this section chooses."""
    loose: bool = False
    """Whether the response without its first line, its last line, both, or asterisks may do: IFEval's loose accuracy.
    """
    partial: bool = False
    """The share of instructions followed, in place of 1 or 0."""


PresetScorer: TypeAlias = Gsm8kScorer | NumericScorer | QaScorer | ChoiceScorer | InstructionScorer
"""A scorer of published data sets."""
