"""The trainers by what they are asked to compute: what their back end has, columns of the loss, weights that travel."""

from rolecall.columns import Plugin, reference_column
from rolecall.settings.algorithm.losses import CustomLoss
from rolecall.settings.run_sections import RunSections
from rolecall.settings.trainers import check_adapters, check_backend, check_dtype


def check_weights(settings: RunSections) -> None:
    """ValueError where weights.deltas is set for adapters, or weights.merge_adapters without, or not for experts."""
    if settings.weights.merge_adapters and settings.actor.lora is None:
        raise ValueError("weights.merge_adapters: the actor has no adapters; leave it out, or set actor.lora")
    if settings.published_adapters is not None and settings.published_adapters.experts:
        raise ValueError(
            "actor.lora.experts: rollouts are sent no adapters of experts, but the model with them added; set "
            "weights.merge_adapters: true"
        )
    if settings.weights.deltas and settings.published_adapters is not None:
        raise ValueError(
            "weights.deltas: adapters are small and all of them change, so they travel whole; leave weights.deltas "
            "or actor.lora out, or set weights.merge_adapters"
        )


def check_backends(settings: RunSections) -> None:
    """ValueError where the training back end does not have what a trainer asks of it."""
    check_dtype(settings.actor, settings.model.dtype)
    if settings.critic is not None:
        check_backend(settings.actor, settings.critic.parallel, "critic.parallel")
        check_adapters(settings.actor, settings.critic.lora, settings.critic.parallel, "critic.parallel")
        if settings.critic.optimizer.kind != "adamw" and settings.actor.backend == "megatron":
            raise ValueError(
                f"critic.optimizer.kind {settings.critic.optimizer.kind} is not there with actor.backend megatron; set "
                "adamw, or use backend fsdp"
            )
    for name, section in settings.references.items():
        check_backend(settings.actor, section.parallel, f"references.{name}.parallel")


def check_loss(settings: RunSections) -> None:
    """ValueError where a loss of the user reads columns that no row of the run has."""
    loss, kl = settings.algorithm.policy_loss, settings.algorithm.kl
    if isinstance(loss, CustomLoss):
        there = {column.name for column in settings.columns if Plugin.LOSS in column.plugins}
        there |= {reference_column(kl.reference)} if kl is not None else set()
        absent = sorted(set(loss.columns) - there)
        if absent:
            raise ValueError(
                f"algorithm.policy_loss.columns {absent} are not in the rows of this run; there are {sorted(there)}"
            )
