"""Sections of the reward: scorers, the components that use them, the service."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import Address, ConfigPath, NonNegativeInt, Pattern, Roots, Section, ServiceSection


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
    r"""A scorer that compares the answer with the ground truth: 1 when they are equal, else 0.

    - `exact_match`: the answer is the stripped response.
    - `boxed`: the answer is what the last \boxed{...} holds.
    - `math`: math-verify finds the answer, and whether it is equal.
    """

    kind: Literal["exact_match", "boxed", "math"] = "exact_match"
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
    ca_file: Roots | None = None
    """PEM roots to trust, or `system`; absent: TLS, with the system's, only where there is a bearer token."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token, which is never sent without TLS."""

    @property
    def tls(self) -> bool:
        """Whether it is called with TLS."""
        return self.ca_file is not None or self.bearer_token_file is not None


ScorerSection: TypeAlias = Annotated[
    AnswerScorer | PatternScorer | JsonScorer | LengthScorer | FunctionScorer | ExternalScorer,
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
    ca_file: Roots | None = None
    """PEM roots to trust at the `address` of somebody else's service, or `system`; absent: as the roles among
    themselves, or with a bearer token the system's.
    """
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token for the `address`, which is never sent without TLS."""

    @property
    def tls(self) -> bool:
        """Whether the address is called as somebody else's service, with TLS."""
        return self.ca_file is not None or self.bearer_token_file is not None

    @model_validator(mode="after")
    def _some_scorer(self) -> Self:
        if self.address is None and not self.components:
            raise ValueError(
                "reward needs components (or the address of a RewardService); add e.g. components: {correct: "
                "{scorer: {kind: exact_match}}}"
            )
        if self.tls and self.address is None:
            raise ValueError(
                "ca_file and bearer_token_file need address: they are how somebody else's reward service is called; "
                "our own takes rpc.tls"
            )
        return self
