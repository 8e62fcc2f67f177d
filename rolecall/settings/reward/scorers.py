"""Sections of the scorers: the ways in which a component of the reward is computed."""

import json
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rolecall.settings.model_server import ModelServer
from rolecall.settings.reward.code import CodeScorer
from rolecall.settings.reward.presets import PresetScorer
from rolecall.settings.reward.rubric import Rubric, rubric_tree
from rolecall.settings.section import (
    FEW_CALLS,
    MANY_CALLS,
    Pattern,
    ScorerServer,
    Section,
    address_of,
    problems_of,
    spelled,
    url_of,
)


class PatternScorer(Section):
    """A scorer by a regular expression.

    - `regex`: 1 when the pattern's last match in the response (group 1 if it has one) equals the ground truth, else 0.
    - `format`: 1 when the whole response matches the pattern, dot matching newlines, else 0.
    - `qa_exact_match`: 1 when the pattern's last match, dot matching newlines, equals the ground truth that it is
      nearest to, both normalised as in SQuAD, else 0.
    - `qa_f1`: the F1 score of their words in its place.
    """

    kind: Literal["regex", "format", "qa_exact_match", "qa_f1"]
    """The scorer that this section chooses."""
    pattern: Pattern | None = None
    """Python regular expression; absent, for qa_exact_match and qa_f1: the whole response."""

    @model_validator(mode="after")
    def _has_its_pattern(self) -> Self:
        if self.pattern is None and self.kind in ("regex", "format"):
            raise ValueError(f"pattern is missing: {self.kind} looks by a regular expression; add it")
        return self


class AnswerScorer(Section):
    r"""A scorer that compares the answer with the ground truth: 1 when they are equal, else 0.

    - `exact_match`: the answer is the stripped response.
    - `boxed`: the answer is what the last \boxed{...} holds.
    - `hendrycks_math`: the same, after the normalisation of MATH.
    - `minerva_math`: the answer is what "final answer is ... I hope it is correct" says, else the box, after the
      normalisation of Minerva.
    - `dapo_math`: the answer is what the last line with "Answer:" says, as DAPO's prompts ask, after the same
      normalisation.
    - `math`: math-verify finds the answer, and whether it is equal.
    """

    kind: Literal["exact_match", "boxed", "hendrycks_math", "minerva_math", "dapo_math", "math"] = "exact_match"
    """The scorer that this section chooses."""
    ignore_case: bool = False
    """Compare case-folded; of exact_match alone."""

    @model_validator(mode="after")
    def _case_is_compared(self) -> Self:
        if self.ignore_case and self.kind != "exact_match":
            raise ValueError(f"ignore_case: {self.kind} has none; remove it, or use kind: exact_match")
        return self


class JsonScorer(Section):
    """1 when the response is JSON (and has the required keys), else 0."""

    kind: Literal["json"] = "json"
    """The scorer that this section chooses."""
    required_keys: tuple[str, ...] = ()
    """Keys that the top-level object must have."""


class LengthScorer(Section):
    """-num_response_tokens / max_tokens, no less than -1."""

    kind: Literal["length"] = "length"
    """The scorer that this section chooses."""
    max_tokens: PositiveInt
    """Length that counts -1."""


class FunctionScorer(Section):
    """A scorer that is not ours.

    - `function`: your own, `def score(item: rolecall.reward.Item) -> float | rolecall.reward.Score`, or of many items:
      `def score(items: Sequence[Item]) -> Sequence[float | Score]`. It may be `async def`, and is awaited then.
    - `environment`: what an environment gave the episode; its turns' rewards are token_rewards.
    """

    kind: Literal["function", "environment"] = "function"
    """The scorer that this section chooses."""
    target: Annotated[str, spelled(r"[\w.]+:\w+", "module:function, as in my_rewards:words")] | None = None
    """`module:function`, importable where the reward service runs; `reward.search_path` is on its path."""
    options: dict[str, Any] = {}
    """Keyword arguments of every call of the target."""
    min: float | None = None
    """Least value it returns; absent: unbounded. A value outside the range is an error, never trained on."""
    max: float | None = None
    """Greatest value it returns; absent: unbounded."""
    components: tuple[str, ...] = ()
    """Names of the components in every Score it returns."""
    token_rewards: bool = False
    """Whether every Score it returns has token_rewards."""
    images: bool = False
    """Whether its items have the files of the images that their messages show."""
    max_items: PositiveInt = 64
    """Most items of a batch, and of an async function of one item those that a worker process awaits at a time."""
    scope: Literal["item", "batch", "group"] = "item"
    """batch: it takes a list of up to max_items items and returns one score for each, in order. The component's
    timeout_s is then that of a call. A batch that is late or ends its process is cut in two until the item that does
    so is alone. group: the list is a whole group, the responses to one prompt that were sampled together, so that it
    may compare them. They are scored together or not at all.
    """

    @property
    def takes_many(self) -> bool:
        """Whether it is called with a list of items."""
        return self.scope != "item"

    @property
    def takes(self) -> str:
        """Names what it is called with, for people."""
        return "a list of items" if self.takes_many else "an item"

    @model_validator(mode="after")
    def _range_and_components_are_some(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} exceeds max {self.max:g}, so that no value is inside; correct them")
        if len(set(self.components)) < len(self.components) or "" in self.components:
            raise ValueError(f"components {list(self.components)}: each needs a name of its own; correct them")
        return self

    @model_validator(mode="after")
    def _options_reach_a_worker_as_they_are(self) -> Self:
        try:
            as_sent = json.loads(json.dumps(self.options, allow_nan=False))
        except (TypeError, ValueError):
            as_sent = None
        if as_sent != self.options:
            raise ValueError(
                "options: worker processes get them as JSON, which has text for keys, and neither dates nor numbers "
                "that are not finite; write those as text, or leave them to the function's default"
            )
        return self

    @model_validator(mode="after")
    def _function_is_named(self) -> Self:
        if (self.target is None) != (self.kind == "environment"):
            raise ValueError("target: a scorer of kind function needs one, and one of kind environment has none")
        if self.kind == "environment" and self.scope != "item":
            raise ValueError("scope: an environment gives each episode a reward by itself; remove it")
        if self.kind == "environment" and self.images:
            raise ValueError("images: an environment has given its reward already; remove it")
        if self.kind == "environment" and self.options:
            raise ValueError("options: they are of a target, and an environment has none; remove them")
        return self


class ExternalScorer(ScorerServer):
    """A scorer elsewhere.

    - `external`: another RewardService, over gRPC.
    - `judge`: a language model that is asked about each response, behind an OpenAI-compatible server.
    - `openrlhf`: an HTTP server as OpenRLHF's remote reward models are.
    - `trl`: an HTTP server that takes what TRL's reward functions take, as JSON.
    - `kserve`: a model behind the Open Inference Protocol (KServe v2, Triton, MLServer), over HTTP or gRPC.
    """

    kind: Literal["external", "judge", "openrlhf", "trl", "kserve"] = "external"
    """The scorer that this section chooses."""
    address: str = ""
    """Where it is, unless it names a `server`. Of external a gRPC target; of the others an http:// or https:// URL: of
    a judge the one that ends in /v1, of kserve the model's, as in http://host:8080/v2/models/name, or
    grpc://host:8081/name.
    """
    server: str | None = None
    """Name under `reward.servers` of the server that a judge or an external scorer asks, in place of an address."""
    range: tuple[float, float] | None = None
    """Least and greatest value of openrlhf, trl and kserve, which do not say it themselves; absent: any finite number
    is believed.
    """
    rubric: Annotated[dict[str, Any], BeforeValidator(rubric_tree)] | None = None
    """What a judge is asked, and what its answers are worth: a YAML file, or what stands in one
    (rolecall/settings/reward/rubric.py).
    """

    @property
    def max_calls(self) -> int:
        """The bound on its calls under way."""
        return self.num_calls or (FEW_CALLS if self.kind == "external" else MANY_CALLS)

    @property
    def look_path(self) -> str:
        """The path below its URL at which an HTTP server says that it is there."""
        return "/models" if self.kind == "judge" else ""

    def at(self, name: str, server: ModelServer) -> Self:
        """Returns it with the address of `server`, its own, empty while that has none. A judge gets the name that the
        server has for its model, too.
        """
        address = server.address or ""
        if self.kind == "external":
            return self.model_copy(update={"address": address})
        rubric = {**(self.rubric or {}), "model": self.asked.model or name}
        return self.model_copy(update={"address": address and f"http://{address}/v1", "rubric": rubric})

    @model_validator(mode="after")
    def _reached_as_its_kind_is(self) -> Self:
        if (self.server is None) == (not self.address):
            has_servers = self.kind in ("judge", "external")
            raise ValueError(
                f"address: {self.kind} needs one{', or a server of the run' if has_servers else ''}; give where it is"
                if self.server is None
                else "server: it has the address; remove one of the two"
            )
        if self.server is not None:
            if self.kind not in ("judge", "external"):
                raise ValueError(
                    f"server: the run starts those of judges and external scorers alone; start that of {self.kind} and "
                    "give its address"
                )
            if self.tls:
                raise ValueError("server: the run calls it on loopback; remove ca_file and bearer_token_file")
        elif self.kind == "external":
            address_of(self.address)
        else:
            url_of(self.address, ("http", "https", "grpc", "grpcs") if self.kind == "kserve" else ("http", "https"))
            if self.tls and not self.address.startswith(("https://", "grpcs://")):
                raise ValueError("address: ca_file and bearer_token_file need https://; without TLS no token is sent")
        if (self.rubric is not None) != (self.kind == "judge"):
            raise ValueError(f"rubric: {'a judge needs one' if self.rubric is None else f'{self.kind} has none'}")
        if self.range is not None and (self.kind in ("external", "judge") or self.range[0] > self.range[1]):
            raise ValueError("range: it is [least, greatest], of openrlhf, trl and kserve alone; others say theirs")
        return self

    @model_validator(mode="after")
    def _rubric_is_one(self) -> Self:
        try:
            nameless = self.rubric is not None and not self.asked.model
        except ValidationError as error:
            raise ValueError(f"rubric: {problems_of(error)}") from error
        if nameless and self.server is None:
            raise ValueError("rubric: model is missing, by which the server at the address knows it; add it")
        return self

    @property
    def asked(self) -> Rubric:
        """The rubric by which a judge is asked."""
        return Rubric.model_validate(self.rubric)


ScorerSection: TypeAlias = Annotated[
    AnswerScorer
    | PatternScorer
    | JsonScorer
    | LengthScorer
    | PresetScorer
    | CodeScorer
    | FunctionScorer
    | ExternalScorer,
    Field(discriminator="kind"),
]


COMPARING = frozenset(
    {"exact_match", "regex", "boxed", "hendrycks_math", "minerva_math", "dapo_math", "math"}
    | {"gsm8k", "numeric", "qa_exact_match", "qa_f1", "multiple_choice"}
)
"""Kinds of scorers that fail on an item without a ground truth."""
