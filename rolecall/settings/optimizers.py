"""Sections of optimizers: the actor's, and the critic's, which follows it."""

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rolecall.settings.section import NonNegativeFloat, NonNegativeInt, Section

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""A decay of AdamW's."""


class OptimizerSection(Section):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon (momentum 0.95) on the layers' matrices at the same rate, with half of AdamW's memory there, and
    AdamW on everything else.
    """
    learning_rate: PositiveFloat = 1e-6
    """Peak."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of AdamW's moments."""
    eps: PositiveFloat = 1e-8
    """AdamW: denominator's floor."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay, on matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    offload: bool = False
    """Keep the moments in host memory: parameters and activations get their place, and every step moves them to the
    device and back, over FSDP2 those of a few parameters at a time, over Megatron-Core all of them.
    """
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Decay after warm-up, to min_learning_rate at the run's end: none, linear, half a cosine, or none until a linear
    one over the last decay_steps (wsd).
    """
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps of wsd's decay; wsd needs it, the other schedules have none."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Rate that decay ends at; schedule constant has no decay, and takes none."""

    @property
    def fault(self) -> str | None:
        """The complaint about its schedule; None: there is none."""
        if (self.schedule == "wsd") != (self.decay_steps is not None):
            return (
                f"schedule {self.schedule} and decay_steps {self.decay_steps} do not fit; decay_steps is given with "
                "schedule wsd and only then"
            )
        if self.schedule == "constant" and self.min_learning_rate:
            return (
                f"min_learning_rate {self.min_learning_rate:g} is where a decay ends, and schedule constant has none; "
                "remove it (0 where a recipe has it), or name another schedule"
            )
        if self.min_learning_rate > self.learning_rate:
            return (
                f"min_learning_rate {self.min_learning_rate:g} is above learning_rate {self.learning_rate:g}, the "
                "peak; lower it"
            )
        return None

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> Self:
        if self.fault is not None:
            raise ValueError(self.fault)
        return self


class CriticOptimizerSection(OptimizerSection):
    """The critic's optimizer and its schedule. What is absent follows the actor's: rates in proportion to the peaks,
    steps in proportion to the updates.
    """

    learning_rate: PositiveFloat = 1e-5
    """Peak; ten times the actor's default, for the value head starts from nothing."""

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> Self:
        """Leaves the check to whoever knows the actor's (RunSettings), for this may be a part of a schedule."""
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what is absent, which goes on to follow the actor's in a file that is written of it. The rate
        follows nothing.
        """
        shown = self.model_fields_set | {"learning_rate"}
        return {name: value for name, value in dump(self).items() if name in shown}

    def beside(self, actor: OptimizerSection, updates: float) -> OptimizerSection:
        """The whole optimizer. `updates`: the critic's for each of the actor's."""
        given = {name: value for name, value in self if name in self.model_fields_set}
        schedule, end = given.get("schedule", actor.schedule), actor.min_learning_rate
        decays_late = schedule == "wsd" and actor.decay_steps is not None
        followed = {
            "learning_rate": self.learning_rate,
            # the quotient first: it is at most 1, so that no rounding takes this above the peak
            "min_learning_rate": 0.0 if schedule == "constant" else end / actor.learning_rate * self.learning_rate,
            "warmup_steps": int(actor.warmup_steps * updates),
            "decay_steps": max(1, int((actor.decay_steps or 0) * updates)) if decays_late else None,
        }
        return actor.model_copy(update=followed | given)
