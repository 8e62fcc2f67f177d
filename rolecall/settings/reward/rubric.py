"""The document of a generative judge: what it is asked, and what its answers are worth. It has a file of its own, for
rubrics are written, compared and reused apart from runs.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml
from pydantic import PositiveInt, model_validator

from rolecall.settings.section import NonNegativeFloat, Section, absolute

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

OF_PROMPTS = frozenset({"prompt", "messages", "ground_truth", "ground_truths", "metadata"})
"""Variables of every template."""
OF_SCOPE = {"item": frozenset({"response"}), "group": frozenset({"first", "second"})}
"""Variables of a template beside those, by scope."""
MARKS = (range(0xE000, 0xF000), range(0xF000, 0xF900))
"""Characters for private use, in two ranges that differ in their first digits. Of them one stands for each image while
a template is filled in: a character has no case, and no cut leaves half of one.
"""
_ESCAPED = re.compile("[^\\x00-\\x7f\\ue000-\\uf8ff]+")
FIRST, SECOND, TIE = "first", "second", "tie"


@cache
def templates() -> "ImmutableSandboxedEnvironment":
    """Returns the environment that reads templates and fills them in: they are the user's, what is filled in is a
    model's.
    """
    from jinja2 import StrictUndefined  # 45 ms, which every process of a run would pay for
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.policies["json.dumps_function"] = _json
    return environment


def _json(value: object, **options: Any) -> str:
    """The JSON of `value` in ASCII, but for MARKS, which are left as they are."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text)


class Rubric(Section):
    """The questions that a judge is asked of responses, and the worth of its answers.

    The template is jinja2. It may use `prompt` (the last message of the user), `messages` (each `role`, `content`),
    `response`, `ground_truth`, `ground_truths`, `metadata`; with `scope: group` in place of `response` the two that are
    compared, `first` and `second`. `{{ response | tojson }}` keeps a response from spelling the judge's own special
    tokens.
    """

    template: str
    """Text of the one message that the judge is sent."""
    model: str = ""
    """Name of the judge's model, as its server knows it. A server that the run starts (scorer.server) answers to this
    name, and needs none.
    """
    verdicts: dict[str, float] = {}
    """What the judge may say, at least two, and what each is worth. With `scope: group` they are first, second, tie."""
    scope: Literal["item", "group"] = "item"
    """group: every two responses to a prompt are compared, in both orders; a response is worth the share of comparisons
    that it wins, a tie being half a win. Orders that disagree are a tie. A template that shows the conversation then
    compares no episodes of several turns, each of which has its own.
    """
    num_samples: PositiveInt = 1
    """Answers that are sampled for each question."""
    vote: Literal["majority", "mean"] = "majority"
    """What several answers make: the verdict of more than half of them, else none; or the mean of what they are worth,
    where more than half could be read.
    """
    answer: Literal["json", "choice"] = "json"
    """Form of an answer, which the server is asked to hold to. json: an object with `reason`, text, and `verdict`.
    choice: a verdict and nothing else, by the structured outputs of vLLM.
    """
    images: bool = False
    """Whether the judge is shown the images of the conversation, each where the template shows the text around it."""
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
    """Further fields of the request: how it is sampled, and what else the server knows."""
    prices: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Cost of a million tokens of questions, and of answers, in any currency; absent: tokens alone are counted."""

    @property
    def choices(self) -> dict[str, float]:
        """Every verdict, and what it is worth; of a comparison, to the first."""
        return {FIRST: 1.0, TIE: 0.5, SECOND: 0.0} if self.scope == "group" else self.verdicts

    @property
    def max_answer_tokens(self) -> int:
        """Tokens of the longest answer, by what the request says; 0: it says nothing of it."""
        given = [self.parameters.get(name) for name in ("max_tokens", "max_completion_tokens")]
        return max((each for each in given if isinstance(each, int)), default=0)

    @property
    def takes_large(self) -> bool:
        """Whether it takes whole groups, or images."""
        return self.scope == "group" or self.images

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template uses."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(templates().parse(self.template)))

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.scope == "group" and self.verdicts:
            raise ValueError("verdicts: of scope group they are first, second and tie; remove it")
        if self.scope == "item" and len(self.verdicts) < 2:
            raise ValueError("verdicts: say at least two that the judge may answer, e.g. {good: 1, bad: 0}")
        if self.images and self.variables.isdisjoint(("prompt", "messages")):
            raise ValueError("images: the template shows neither prompt nor messages, where they stand; add one")
        if self.num_samples > 1 and not self.parameters.get("temperature", 1.0):
            raise ValueError("num_samples: at parameters.temperature 0 all are one; give a temperature, or sample one")
        return self

    @model_validator(mode="after")
    def _template_is_one(self) -> Self:
        from jinja2 import TemplateSyntaxError

        try:
            used = self.variables
        except TemplateSyntaxError as error:
            raise ValueError(f"template: {error.message} in line {error.lineno}") from error
        known = OF_PROMPTS | OF_SCOPE[self.scope]
        if used - known:
            raise ValueError(f"template: there is no {', '.join(sorted(used - known))}; it may use {sorted(known)}")
        if OF_SCOPE[self.scope] - used:
            raise ValueError(
                f"template: it does not show {', '.join(sorted(OF_SCOPE[self.scope] - used))} to the judge"
            )
        return self


def rubric_tree(value: object, info: Any) -> object:
    """The keys of a rubric: of the file at the path `value`, or `value` itself."""
    if not isinstance(value, str | Path):
        return value
    path = Path(str(absolute(value, info)))
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8, or name another file") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name a file that holds a rubric") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
