"""The critic on its ranks: a trainer by the steps of steps.py."""

from rolecall.identity import adapters_to_begin_with
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.training.step.role_ranks import TrainerRanks
from rolecall.training.step.start import start_store_context
from services.critic import config
from services.critic.steps import ValueSteps


def build(settings: RunSettings, connection: Connection, hooks: ProcessHooks) -> TrainerRanks:
    """Starts the critic on this rank, its model loaded; a collective. ConfigError."""
    section = config.section(settings)
    context = start_store_context(
        settings,
        section,
        connection,
        path=config.model_path(settings),
        head="value",
        optimizer=settings.critic_optimizer,
        lora=adapters_to_begin_with(settings, section.lora),
        total_steps=config.num_optimizer_steps(settings),
        hooks=hooks,
    )
    return TrainerRanks(context, ValueSteps(settings))
