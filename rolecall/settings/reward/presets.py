"""Sections of the scorers that published data sets are scored with."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from rolecall.settings.section import NonNegativeFloat, Section

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


class NumberScorer(Section):
    r"""A scorer by the number that the response settles on: 1 when it is the ground truth's, else 0.

    - `gsm8k`: the one after "#### ", compared as text (GSM8K).
    - `numeric`: the last one of the last \boxed{...}, or of the response where there is no box. A \frac{3}{4} of
      numbers is one, and so is 2\frac{3}{4}.
    """

    kind: Literal["gsm8k", "numeric"]
    """The scorer that this section chooses."""
    flexible: bool = False
    """Read the last number of the response, whatever stands before it; of gsm8k alone."""
    tolerance: NonNegativeFloat = 0.0
    """Greatest difference, as a share of the ground truth; of numeric alone."""

    @model_validator(mode="after")
    def _options_are_its_own(self) -> Self:
        if (self.kind == "numeric" and self.flexible) or (self.kind == "gsm8k" and self.tolerance):
            raise ValueError(f"{'tolerance' if self.tolerance else 'flexible'}: {self.kind} has none; remove it")
        return self


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


PresetScorer: TypeAlias = NumberScorer | ChoiceScorer | InstructionScorer
"""A scorer of published data sets that has a section of its own."""
