"""The values that the controller derives from the run's settings: the bounds of admission."""

from rolecall.settings import RunSettings
from rolecall.store.budget import PromptBytes, StoreBudget
from services.controller.groups.admission import AdmissionPolicy


def admission_policy(settings: RunSettings, prompt_bytes: PromptBytes) -> AdmissionPolicy:
    """ConfigError when the store cannot hold the batches that max_staleness allows, of prompts that take up to
    `prompt_bytes`.
    """
    budget, algorithm = StoreBudget.of(settings, prompt_bytes), settings.algorithm
    return AdmissionPolicy(
        algorithm.groups_per_batch,
        algorithm.max_staleness,
        settings.run.total_steps,
        budget.max_bytes,
        budget.group_bytes,
    )
