"""Sections of the reward: scorers, the components that use them, the service."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import Address, ConfigPath, NonNegativeInt, Pattern, Section, ServiceSection


class ExactMatchScorer(Section):
    """1 when the stripped response equals the ground truth, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    """The scorer that this section chooses."""
    ignore_case: bool = False
    """Compare case-folded."""


class PatternScorer(Section):
    """A scorer by a regular expression.

    - `regex`: 1 when the pattern's last match in the response (group 1 if it has one) equals the ground truth, else 0.
    - `format`: 1 when the whole response matches the pattern, dot matching newlines, else 0.
    """

    kind: Literal["regex", "format"]
    """The scorer that this section chooses."""
    pattern: Pattern
    """Python regular expression."""


class AnswerScorer(Section):
    r"""A scorer of the final answer, with nothing to set.

    - `boxed`: 1 when the last \boxed{...} equals the ground truth, else 0.
    - `math`: 1 when math-verify finds response and ground truth equal, else 0.
    """

    kind: Literal["boxed", "math"]
    """The scorer that this section chooses."""


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
    """Your own function: `def score(item: rolecall.reward.Item) -> float | rolecall.reward.Score`."""

    kind: Literal["function"] = "function"
    """The scorer that this section chooses."""
    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`, importable where the reward service runs; `reward.search_path` is on its path."""
    min: float | None = None
    """Least value it returns; absent: unbounded. A value outside the range is an error, never trained on."""
    max: float | None = None
    """Greatest value it returns; absent: unbounded."""
    components: tuple[str, ...] = ()
    """Names of the components in every Score it returns."""
    token_rewards: bool = False
    """Whether every Score it returns has token_rewards."""


class ExternalScorer(Section):
    """A scorer behind another RewardService."""

    kind: Literal["external"] = "external"
    """The scorer that this section chooses."""
    address: Address
    """gRPC target."""
    tls: bool = False
    """Use TLS with the system's roots, or `ca_file`."""
    ca_file: ConfigPath | None = None
    """Roots to trust instead."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token; needs TLS."""

    @model_validator(mode="after")
    def _token_needs_tls(self) -> Self:
        if (self.bearer_token_file or self.ca_file) and not self.tls:
            raise ValueError("bearer_token_file and ca_file need tls: true; a token is never sent in the clear")
        return self


ScorerSection: TypeAlias = Annotated[
    ExactMatchScorer | PatternScorer | AnswerScorer | JsonScorer | LengthScorer | FunctionScorer | ExternalScorer,
    Field(discriminator="kind"),
]


class RewardComponent(Section):
    """One named part of the reward."""

    scorer: ScorerSection
    """What computes it."""
    weight: float = 1.0
    """Factor in the sum; 0 only reports it."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one item (or one call of an external scorer)."""
    max_attempts: PositiveInt = 3
    """Tries per item when a failure is retryable."""


class RewardSection(ServiceSection):
    """The reward service. With an `address`, any RewardService: ours or yours."""

    components: dict[str, RewardComponent] = {}
    """Named parts; the reward is their weighted sum."""
    num_workers: PositiveInt = 2
    """Killable worker processes of the local service."""
    search_path: ConfigPath = Path(".")
    """Folder where the modules of `function` scorers are found; absent: the configuration file's folder."""
    solved_at: float = 1.0
    """A response counts as accurate when its reward is at least this."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one Score call of the controller."""
    max_attempts: PositiveInt = 3
    """Tries of a Score call, and of an item whose error is retryable, before the group is dropped."""
    max_failed_groups: NonNegativeInt = 32
    """Budget of groups dropped because they could not be scored, of any controller.failure_window groups; one more
    stops the run.
    """
    tls: bool = False
    """Call the `address` with TLS, checked against the system's roots, or `ca_file`."""
    ca_file: ConfigPath | None = None
    """PEM roots to trust instead; needs tls."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token for the `address`; needs tls."""

    @model_validator(mode="after")
    def _some_scorer(self) -> Self:
        if self.address is None and not self.components:
            raise ValueError(
                "reward needs components (or the address of a RewardService); add e.g. components: {correct: "
                "{scorer: {kind: exact_match}}}"
            )
        if self.tls and self.address is None:
            raise ValueError(
                "tls needs address: it is how somebody else's reward service is called; our own takes rpc.tls"
            )
        if (self.bearer_token_file or self.ca_file) and not self.tls:
            raise ValueError("bearer_token_file and ca_file need tls: true; a token is never sent in the clear")
        return self
