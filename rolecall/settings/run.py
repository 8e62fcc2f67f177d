"""The whole file, checked and filled in. The checks that need several sections are in checks/."""

from typing import Self

from pydantic import PrivateAttr, field_validator, model_validator

from rolecall.settings.checks import evaluation, placement, rewards, roles, sampler, sizes, trainers
from rolecall.settings.deadlines import Deadline, derive, filled_in
from rolecall.settings.rollout import EnvironmentSection
from rolecall.settings.run_sections import RunSections
from rolecall.settings.sizes.derived import DerivedSize, derive_sizes
from rolecall.settings.trainers import ReferenceSection


class RunSettings(RunSections):
    """The settings of a run: its whole file."""

    _derived_sizes: tuple[DerivedSize, ...] = PrivateAttr(())
    _derived_deadlines: tuple[Deadline, ...] = PrivateAttr(())

    @property
    def derived_sizes(self) -> tuple[DerivedSize, ...]:
        """Sizes that the file leaves out and that are not the defaults of their sections: derived from the rest."""
        return self._derived_sizes

    @property
    def derived_deadlines(self) -> tuple[Deadline, ...]:
        """Deadlines that the file leaves out: what the sections hold was derived from the rest."""
        return self._derived_deadlines

    def require_same_gpus(self) -> None:
        """ConfigError unless actor and rollouts that take shifts on GPUs have the same ones of each machine."""
        placement.require_same_gpus(self)

    @field_validator("environments")
    @classmethod
    def _stand_in_other_names(cls, environments: dict[str, EnvironmentSection]) -> dict[str, EnvironmentSection]:
        roles.check_environment_names(environments)
        return environments

    @field_validator("references")
    @classmethod
    def _are_called_as_nothing_else(cls, references: dict[str, ReferenceSection]) -> dict[str, ReferenceSection]:
        roles.check_names(references)
        return references

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        """Makes every check of several sections: what is told is what the first of them finds. Sets what sizes the file
        leaves out, rollout.sleep_mode where rollouts share GPUs with the trainers, and `offload` of the references
        there.
        """
        sections, self._derived_sizes = derive_sizes(self)
        vars(self).update(sections)  # not by attribute: to everybody else the file is frozen
        trainers.check_weights(self)
        roles.check_servers(self)
        roles.check_roles(self)
        evaluation.check_images(self)
        sampler.check_determinism(self)
        trainers.check_backends(self)
        roles.check_teachers(self)
        sizes.check_batches(self)
        rewards.check_advantage(self)
        rewards.check_gdpo(self)
        rewards.check_environments(self)
        evaluation.check_set_names(self)
        trainers.check_loss(self)
        sampler.check_correction(self)
        sampler.check_router_replay(self)
        rewards.check_shaping(self)
        sizes.check_trajectories(self)
        sizes.check_epochs(self)
        sizes.check_schedules(self)
        if placement.shares_devices(self):
            # not by attribute: to everybody else the file is frozen
            vars(self)["rollout"] = self.rollout.model_copy(update={"sleep_mode": True})
            vars(self)["references"] = placement.references_beside(self)
        placement.check_offload(self)
        placement.check_num_replicas(self)
        evaluation.check_times(self)
        return self

    @model_validator(mode="after")
    def _deadlines_are_derived(self) -> Self:
        self._derived_deadlines = derive(self)
        # not by attribute: to everybody else the file is frozen
        vars(self).update(filled_in(self, self._derived_deadlines))
        return self
