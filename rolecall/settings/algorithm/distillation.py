"""The section of on-policy distillation: what teaches a policy on its own samples, and how."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import NonNegativeFloat, Section


class DistillationSection(Section):
    """A teacher, which is an instance under `references`, beside the task's reward or instead of it."""

    teacher: str | None = None
    """Instance that teaches prompts whose `field` names no other; absent: every prompt must name one."""
    field: str | None = None
    """Field of the data set whose text says which of `teachers` teaches a prompt; absent: `teacher` teaches all."""
    teachers: dict[str, str] = {}
    """Instance by text of `field`."""
    placement: Literal["advantage", "loss"] = "advantage"
    """`advantage`: every sampled token's advantage is lowered by log(policy / teacher) of that token (only without
    top_k), so policy_loss, its clip and the correction apply; the policy is the trainer's old one: a forward pass of
    the actor over every batch, unless correction.proximal is `bypass`. `loss`: a term beside the policy loss.
    """
    top_k: PositiveInt | None = None
    """Absent: the KL of the policy to the teacher (reverse), estimated from the sampled token. Set: the KL of the
    teacher to the policy (forward), over so many ids to which the teacher gives the highest probability, and one more
    outcome, all the others together; each id costs 8 bytes per token in the store.
    """
    max_log_ratio: PositiveFloat | None = 10.0
    """Bound in nats of a sampled token's log(policy / teacher), on both sides: a token that the teacher thinks all but
    impossible then pulls no harder than this, and still pulls. 10, a factor of 22,000, is what verl's recipes hold the
    loss at; null: no bound. Without top_k alone, whose gradient on a logit is a difference of probabilities.
    """
    coef: PositiveFloat = 1.0
    """Weight of the divergence."""
    task_coef: NonNegativeFloat = 0.0
    """The task's advantages are multiplied by it; 0: rewards are only shown."""

    @property
    def instances(self) -> frozenset[str]:
        """Every teacher."""
        return frozenset([*self.teachers.values(), *([self.teacher] if self.teacher is not None else [])])

    def teacher_of(self, value: object) -> str | None:
        """The instance that teaches a prompt whose `field` holds `value` (None: it has none); None when there is no
        such teacher.
        """
        return self.teachers.get(value, self.teacher) if isinstance(value, str) else self.teacher

    @model_validator(mode="after")
    def _every_prompt_can_have_a_teacher(self) -> Self:
        if self.teacher is None and not self.teachers:
            raise ValueError(
                "no teacher: name an instance under references in teacher, or several in teachers with the field "
                "that chooses"
            )
        if bool(self.teachers) != (self.field is not None):
            raise ValueError(
                "teachers and field go together: field names the data set's field, teachers the instance by its "
                "text; set both or remove both"
            )
        return self

    @model_validator(mode="after")
    def _ranking_is_a_loss(self) -> Self:
        if self.top_k is not None and self.placement == "advantage":
            raise ValueError("top_k: the forward KL over several ids is a loss; set placement: loss, or remove top_k")
        if self.top_k is not None and self.max_log_ratio != type(self).model_fields["max_log_ratio"].default:
            raise ValueError(
                "max_log_ratio: it bounds sampled tokens, and with top_k they are not compared: no token's gradient "
                "exceeds 1 there; remove one of the two"
            )
        return self
