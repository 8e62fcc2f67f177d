"""The part of the run's configuration that the reward service takes."""

from dataclasses import dataclass
from pathlib import Path

from rolecall.errors import ConfigError
from rolecall.settings import CodeScorer, ExternalScorer, FunctionScorer, RewardComponent, RunSettings, shadows_of
from services.reward.catalog import LocalScorer


@dataclass(frozen=True)
class RewardSettings:
    """The reward section, sorted by who scores."""

    bind: str
    """`host:port` to listen on; port 0 takes a free one."""
    components: dict[str, RewardComponent]
    """Named parts, in the order of the file; at least one."""
    num_workers: int
    """Worker processes for the local ones."""
    search_path: Path
    """Folder where users' functions are found and run."""
    start_timeout_s: float
    """Longest wait for external scorers at the start."""
    environment: tuple[str, ...] = ()
    """Names of further environment variables for users' functions."""
    plays_all: bool = True
    """Whether an environment takes every prompt, so that kind `environment` applies wherever its `when` does."""
    filtered: str | None = None
    """The component that the run's filters read, or a part of it: whatever it weighs, an item is scored with it or not
    at all.
    """

    @property
    def shadows(self) -> frozenset[str]:
        """The components whose failures cost an item nothing but that component."""
        return shadows_of(self.components) - {(self.filtered or "").partition("/")[0]}

    @property
    def local(self) -> dict[str, LocalScorer]:
        """Scorers that run in worker processes, by component."""
        return {
            name: component.scorer
            for name, component in self.components.items()
            if component.server is None and not isinstance(component.scorer, ExternalScorer)
        }

    @property
    def external(self) -> dict[str, ExternalScorer | CodeScorer]:
        """Scorers that ask a server, by component."""
        return {
            name: component.scorer
            for name, component in self.components.items()
            if component.server is not None and isinstance(component.scorer, ExternalScorer | CodeScorer)
        }

    @property
    def takes_large(self) -> bool:
        """Whether a component takes whole groups, or images; an external one says so itself, later."""
        return any(
            (isinstance(scorer, FunctionScorer) and (scorer.scope == "group" or scorer.images))
            or (isinstance(scorer, ExternalScorer) and scorer.kind == "external")
            or (isinstance(scorer, ExternalScorer) and scorer.rubric is not None and scorer.asked.takes_large)
            for scorer in (component.scorer for component in self.components.values())
        )


def reward_settings(settings: RunSettings) -> RewardSettings:
    """The reward service's settings. ConfigError when the file leaves the service nothing to do."""
    section = settings.reward
    if not section.components:
        raise ConfigError(
            "reward.components is empty: the file only calls a RewardService at reward.address; add components to "
            "serve one here"
        )
    unplaced = [name for name, server in section.servers.items() if server.address is None]
    if unplaced:
        raise ConfigError(
            f"reward.servers.{unplaced[0]} has no address: `rolecall train` starts it, and nobody here; give it the "
            "address of one that you started (rolecall serve model-server or reward-model)"
        )
    return RewardSettings(
        bind=section.bind or section.address or "127.0.0.1:0",
        components=section.placed_components,
        num_workers=section.num_workers,
        search_path=section.search_path,
        start_timeout_s=settings.controller.start_timeout_s,
        environment=section.environment,
        plays_all=any(not environment.when for environment in settings.environments.values()),
        filtered=settings.algorithm.filters.component,
    )
