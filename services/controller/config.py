"""What the controller derives from the run's settings: bounds of admission and where it keeps its files."""

from dataclasses import dataclass
from pathlib import Path

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.trajectory import row_bytes
from services.controller.admission import AdmissionPolicy

STORE_SHARE = 0.8
"""Part of store.max_bytes that rows may take; the rest is the ledger's, the server's buffers' and a rewrite of the append-only file's."""


@dataclass(frozen=True)
class ControllerConfig:
    """Derived once, checked at the start."""

    settings: RunSettings
    policy: AdmissionPolicy
    run_dir: Path

    @classmethod
    def of(cls, settings: RunSettings) -> "ControllerConfig":
        """ConfigError when the store cannot hold the batches that max_staleness allows."""
        algorithm = settings.algorithm
        tokens = settings.data.max_prompt_tokens + settings.sampling.max_tokens
        group_bytes = settings.sampling.num_responses * row_bytes(tokens, len(settings.references), critic=settings.critic is not None)
        max_bytes = int(settings.store.max_bytes * STORE_SHARE)
        needed = (algorithm.max_staleness + 2) * algorithm.groups_per_batch * group_bytes
        if needed > max_bytes:
            raise ConfigError(
                f"store.max_bytes {settings.store.max_bytes} cannot hold {algorithm.max_staleness + 2} batches of {algorithm.groups_per_batch} groups at their "
                f"longest ({needed} bytes, of which the store gives {STORE_SHARE:.0%}); raise it or lower sampling.max_tokens or groups_per_batch"
            )
        policy = AdmissionPolicy(algorithm.groups_per_batch, algorithm.max_staleness, settings.run.num_steps, max_bytes, group_bytes)
        return cls(settings, policy, settings.run.dir)
