"""Sections of the reward: the components that use the scorers, the service."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import (
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolecall.settings.model_server import ModelServer
from rolecall.settings.reward.code import CodeScorer
from rolecall.settings.reward.scorers import ExternalScorer, FunctionScorer, ScorerSection
from rolecall.settings.section import (
    Conditions,
    ConfigPath,
    Named,
    NonNegativeInt,
    Roots,
    ScorerServer,
    Section,
    ServiceSection,
    holds,
)

TAKEN = frozenset({"mean", "std_in_group", "max", "min", "accuracy", "greedy", "kl"}) | frozenset(
    {"missing", "response_tokens", "truncated", "reward", "time_s", "standard_error", "source"}
)
"""Metrics of a batch's reward, or of an evaluation (docs/metrics.md)."""


def taken_names(names: Iterable[str]) -> list[str]:
    """Returns those of `names` that no component of the whole reward can have, for metrics are called so."""
    return sorted(name for name in names if name in TAKEN or re.fullmatch(r"(mean|pass|maj|best|worst)@[0-9]+", name))


JUDGE_TOKENS_PER_S = 20
"""Rate of one answer of a judge that answers as many questions at a time as it is asked."""


class RewardComponent(Section):
    """One named part of the reward."""

    scorer: ScorerSection
    """What computes it."""
    when: Conditions = {}
    """The prompts that it scores, by fields of the data set: each field holds the value, or one of the values; absent:
    all, of kind environment all that are played in one. To other prompts it does not apply: it is left out of their
    reward and of every mean, which is not to be 0.
    """
    weight: float = 1.0
    """Factor in the sum. 0 makes it a shadow: it is scored and reported and never part of the reward. An item that it
    does not score, tried once, lacks the component alone.
    """
    timeout_s: PositiveFloat = 10.0
    """Deadline of one item, or of one call of a scorer elsewhere; of code with an address, of one test's run there.
    Unless set, of a judge longer by a second for each 20 tokens of its longest answer (max_tokens of its rubric).
    """
    max_attempts: PositiveInt = 3
    """Tries per item when a failure is retryable."""

    @property
    def server(self) -> ScorerServer | None:
        """The server that scores, or that runs the programs; None: all is done in worker processes."""
        match self.scorer:
            case ExternalScorer():
                return self.scorer
            case CodeScorer():
                return self.scorer.server
            case _:
                return None

    @property
    def reads_images(self) -> bool:
        """Whether it is sent images; an external one says so itself, later."""
        match self.scorer:
            case FunctionScorer():
                return self.scorer.images
            case ExternalScorer():
                return self.scorer.rubric is not None and self.scorer.asked.images
            case _:
                return False

    @model_validator(mode="after")
    def _judges_come_to_the_end_of_their_answers(self) -> Self:
        if "timeout_s" not in self.model_fields_set and isinstance(self.scorer, ExternalScorer) and self.scorer.rubric:
            longest = self.scorer.asked.max_answer_tokens
            vars(self)["timeout_s"] = self.timeout_s + round(longest / JUDGE_TOKENS_PER_S)
        return self

    @model_validator(mode="after")
    def _programs_end_before_the_item(self) -> Self:
        if isinstance(self.scorer, CodeScorer) and self.timeout_s <= self.scorer.longest_s:
            raise ValueError(
                f"timeout_s: {self.timeout_s:g} s are over before the program's tests are, which have "
                f"{self.scorer.longest_s:g} s by scorer.timeout_s; make it longer, by a tenth of a second for each "
                "test, whose sandbox has to start"
            )
        return self

    @property
    def is_given(self) -> bool:
        """Whether it is what environments give, so that it applies to what is played in one alone."""
        return self.scorer.kind == "environment"

    def applies_to(self, metadata: Mapping[str, object], environment: str) -> bool:
        """Whether it scores a prompt with these fields that is played in `environment`; empty: in none."""
        return holds(self.when, metadata) and (environment != "" or not self.is_given)


def shadows_of(components: Mapping[str, RewardComponent]) -> frozenset[str]:
    """The components that are reported and never part of the reward; none where all weigh 0, for then nobody reads the
    reward.
    """
    shadows = frozenset(name for name, component in components.items() if component.weight == 0)
    return shadows if len(shadows) < len(components) else frozenset()


class RewardSection(ServiceSection):
    """The reward service. With an `address`, any RewardService: ours or yours."""

    components: Named[RewardComponent] = {}
    """Named parts; the reward is the weighted sum of those that apply to the prompt."""
    servers: Named[ModelServer] = {}
    """Models that the run serves to its scorers, by the names that these give as `server`."""
    num_workers: PositiveInt = 2
    """Killable worker processes of the local service."""
    search_path: ConfigPath = Path(".")
    """Folder where the modules of `function` scorers are found; absent: the configuration file's folder."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that scorers get besides paths, caches and devices, such as that of an API key
    that one needs (rolecall/settings/environment.py).
    """
    solved_at: float = 1.0
    """A response counts as accurate when its reward is at least this, without what its tokens or turns earned."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one Score call of the controller."""
    max_attempts: PositiveInt = 3
    """Tries of a Score call, and of an item whose error is retryable, before the group is dropped."""
    max_failed_groups: NonNegativeInt = 32
    """Budget of groups dropped because they could not be scored, of any controller.failure_window groups; one more
    stops the run.
    """
    away_timeout_s: PositiveFloat | None = None
    """Longest time in which no group is scored because the scorer is away, before the run ends; absent: the run waits
    for it, says so, and admits nothing beyond the groups that wait with it.
    """
    ca_file: Roots | None = None
    """PEM roots to trust at the `address` of somebody else's service, or `system`; absent: as the roles among
    themselves, or with a bearer token the system's.
    """
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token for the `address`, read again when it changes; it is never sent without TLS."""

    @property
    def tls(self) -> bool:
        """Whether the address is called as somebody else's service, with TLS."""
        return self.ca_file is not None or self.bearer_token_file is not None

    @property
    def placed_components(self) -> dict[str, RewardComponent]:
        """The components, each scorer of a server with that server's address; empty while it has none."""
        return {
            name: component.model_copy(update={"scorer": scorer.at(scorer.server, self.servers[scorer.server])})
            if isinstance(scorer := component.scorer, ExternalScorer) and scorer.server is not None
            else component
            for name, component in self.components.items()
        }

    @property
    def may_have_token_rewards(self) -> bool:
        """Whether some scorer may give them; what one elsewhere gives is not known before it is asked."""
        scorers = [component.scorer for component in self.components.values()]
        given = (
            (isinstance(scorer, ExternalScorer) and scorer.kind == "external")
            or (isinstance(scorer, FunctionScorer) and scorer.token_rewards)
            for scorer in scorers
        )
        return not scorers or any(given)

    @model_validator(mode="after")
    def _names_are_free(self) -> Self:
        for name in taken_names(self.components):
            raise ValueError(
                f"components.{name}: reward/{name} or eval/SET/{name} is a metric of the whole reward; rename it"
            )
        if "" in self.components:
            raise ValueError("components: one has no name, by which it is reported; give it one")
        parts = [
            f"{name}/{part}"
            for name, component in self.components.items()
            if isinstance(component.scorer, FunctionScorer)
            for part in component.scorer.components
        ]
        for name, count in Counter([*self.components, *parts]).items():
            if count > 1:
                raise ValueError(
                    f"components: {name} is the name of two, for parts are reported as COMPONENT/PART; rename one"
                )
        return self

    @model_validator(mode="after")
    def _servers_are_named(self) -> Self:
        scorers = [component.scorer for component in self.components.values()]
        named = {scorer.server for scorer in scorers if isinstance(scorer, ExternalScorer)}
        for name, component in self.components.items():
            scorer = component.scorer
            if not isinstance(scorer, ExternalScorer) or scorer.server is None:
                continue
            if scorer.server not in self.servers:
                raise ValueError(
                    f"components.{name}.scorer.server {scorer.server!r} is not under servers ({sorted(self.servers)}); "
                    "add it"
                )
            key = "model" if scorer.kind == "judge" else "reward_model"
            if getattr(self.servers[scorer.server], key) is None:
                raise ValueError(
                    f"components.{name}.scorer.server: what {scorer.kind} asks is a server with a {key}, and "
                    f"servers.{scorer.server} has none; name another, or correct the kind"
                )
        for server in self.servers:
            if server not in named:
                raise ValueError(f"servers.{server} is named by no scorer; remove it, or name it as scorer.server")
        return self

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
