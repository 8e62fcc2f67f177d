"""The whole file: all sections, and the checks that need more than one of them."""

import re
from typing import Any, Self

from pydantic import PrivateAttr, field_validator, model_validator

from rolecall.columns import COLUMNS, ROUTED_EXPERTS, TEACHER, Column, Given, Plugin, column, reference_column
from rolecall.settings.algorithm.advantages import (
    CustomAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    PassAtKAdvantage,
)
from rolecall.settings.algorithm.algorithm import AlgorithmSection
from rolecall.settings.algorithm.kl import ACTOR_BASE, KL_ERROR_BOUND
from rolecall.settings.algorithm.losses import CustomLoss
from rolecall.settings.data import DataSection, EvaluationSection, ModelSection, RunSection, SamplingSection
from rolecall.settings.deadlines import Deadline, derive, filled_in
from rolecall.settings.placement import check_devices
from rolecall.settings.reward import ExternalScorer, FunctionScorer, LengthScorer, RewardSection, shadows_of
from rolecall.settings.section import Section
from rolecall.settings.services import (
    ControllerSection,
    EnvironmentSection,
    LauncherSection,
    RolloutSection,
    RpcSection,
    StoreSection,
    TelemetrySection,
    TrackersSection,
    WeightBackend,
    WeightsSection,
)
from rolecall.settings.trainers import (
    ActorSection,
    CriticSection,
    OptimizerSection,
    ReferenceSection,
    TrainerSection,
    check_backend,
    check_dtype,
)

MAX_SET_NAME_CHARS = 200
"""Characters of a held-out set's name where sessions of an environment are named after it: those have up to 512."""

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,41}")
"""Names of references: `reference-<name>` is a host, with room for what Kubernetes adds, and `<name>/0` a replica."""
_OTHERS = re.compile(r"controller|actor|critic|reward|store|rollout(-.*)?")
"""Names of the run's other processes; the launcher, and files of several machines, know a process by its name alone."""


class RunSettings(Section):
    """The settings of a run: its whole file."""

    run: RunSection
    model: ModelSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    algorithm: AlgorithmSection
    controller: ControllerSection = ControllerSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection | None = None
    actor: ActorSection = ActorSection()
    critic: CriticSection | None = None
    references: dict[str, ReferenceSection] = {}
    reward: RewardSection
    weights: WeightsSection = WeightsSection()
    launcher: LauncherSection = LauncherSection()
    store: StoreSection = StoreSection()
    rpc: RpcSection = RpcSection()
    telemetry: TelemetrySection = TelemetrySection()
    trackers: TrackersSection = TrackersSection()

    _derived_deadlines: tuple[Deadline, ...] = PrivateAttr(())

    @property
    def derived_deadlines(self) -> tuple[Deadline, ...]:
        """Deadlines that the file leaves out: what the sections hold was derived from the rest."""
        return self._derived_deadlines

    @property
    def responses_per_group(self) -> int:
        """Responses that a rollout samples for one group: sampling.num_responses, and the greedy one where the
        estimator wants it.
        """
        return self.sampling.num_responses + self.algorithm.wants_greedy_response

    @property
    def num_policy_steps(self) -> int:
        """Steps of the run in which the policy learns: all but those of the critic's warm-up."""
        return max(0, self.run.total_steps - (self.critic.warmup_steps if self.critic else 0))

    @property
    def num_policy_updates(self) -> int:
        """Optimizer steps of the actor in the run."""
        return self.num_policy_steps * self.algorithm.num_minibatches * self.algorithm.num_epochs

    @property
    def critic_optimizer(self) -> OptimizerSection | None:
        """The critic's optimizer, what follows the actor's included; None where there is no critic."""
        if self.critic is None:
            return None
        of_actor = self.algorithm.num_minibatches
        return self.critic.optimizer.beside(self.actor.optimizer, (self.critic.num_minibatches or of_actor) / of_actor)

    @property
    def trained_by(self) -> tuple[tuple[str, OptimizerSection, int], ...]:
        """Each trainer's name, optimizer and optimizer steps in the run."""
        actor = ("actor", self.actor.optimizer, self.num_policy_updates)
        if self.critic is None or self.critic_optimizer is None:
            return (actor,)
        per_step = self.algorithm.num_epochs * (self.critic.num_minibatches or self.algorithm.num_minibatches)
        return actor, ("critic", self.critic_optimizer, self.run.total_steps * per_step)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that a row of this run may have in the store."""
        algorithm, kl, distillation = self.algorithm, self.algorithm.kl, self.algorithm.distillation
        holds = {
            Given.ALWAYS: True,
            Given.TOKEN_REWARDS: self._may_have_token_rewards,
            Given.CRITIC: self.critic is not None,
            Given.TEACHER: distillation is not None,
            Given.TEACHER_TOPK: distillation is not None and distillation.top_k is not None,
            Given.SAMPLED_ROUTING: self.actor.router_replay == "r3",
            Given.IMAGES: self.shows_images,
            Given.OLD_ROUTING: self.actor.router_replay == "r2",
        }
        needed = algorithm.advantage.needs
        found = [each for each in COLUMNS.values() if holds.get(each.given, each.name in needed)]
        if kl is not None and kl.reference in self.references:
            found.append(column(reference_column(kl.reference)))
        return tuple(found)

    @property
    def columns_trained_on(self) -> dict[str, str]:
        """Columns of a row that the actor's steps read beside those of every run: the setting that asks for each, by
        name.
        """
        asked = dict(self.algorithm.loss_columns)
        if self.actor.router_replay == "r3":
            asked[ROUTED_EXPERTS] = "actor.router_replay"
        held = {each.name for each in self.columns}  # not those of the actor's own base, which no row holds
        return {name: setting for name, setting in asked.items() if name in held}

    @property
    def shows_images(self) -> bool:
        """Whether the policy may be shown images: by its prompts, or by its environment."""
        return self.data.images_field is not None or self.max_environment_image_bytes > 0

    @property
    def max_environment_image_bytes(self) -> int:
        """Most bytes of images that the environment shows in an episode; 0: it shows none."""
        return 0 if self.environment is None else self.environment.max_image_bytes or 0

    @property
    def freezes_vision_tower(self) -> bool:
        """Whether a vision tower stays as it is: it learns nothing where no images are shown."""
        return self.model.freeze_vision_tower or not self.shows_images

    @property
    def takes_shifts(self) -> bool:
        """Whether rollouts sleep while the trainers work, and the trainers wait in host memory while they sample."""
        return bool(self.rollout.sleep_mode)

    def weight_backend(self, *, receivers_on_gpus: bool) -> WeightBackend:
        """The way of the weights to receivers that are, all of them, on GPUs or not. Not nccl on GPUs that are shared:
        it has one rank on each.
        """
        actor_on_gpus = bool(self.actor.devices) and not self.takes_shifts
        return self.weights.backend_between(actor_on_gpus=actor_on_gpus, receivers_on_gpus=receivers_on_gpus)

    @property
    def longest_trajectory(self) -> int:
        """Tokens of the longest prompt with the longest response, of training or of evaluation."""
        evaluated = (part.max_tokens or 0 for part in self.evaluation.sets.values())
        return self.data.max_prompt_tokens + max(self.sampling.max_tokens, *evaluated, 0)

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of a row that is trained: those of a prompt and a response, or of an episode's segments."""
        longest = self.data.max_prompt_tokens + self.sampling.max_tokens
        return (self.environment.max_row_tokens or longest) if self.environment is not None else longest

    @property
    def _adds_kl_to_rewards(self) -> bool:
        return self.algorithm.kl is not None and self.algorithm.kl.placement == "reward"

    @property
    def _may_have_token_rewards(self) -> bool:
        """Whether some scorer may give them; what one elsewhere gives is not known before it is asked."""
        scorers = [component.scorer for component in self.reward.components.values()]
        given = (
            (isinstance(scorer, ExternalScorer) and scorer.kind == "external")
            or (isinstance(scorer, FunctionScorer) and scorer.token_rewards)
            for scorer in scorers
        )
        return not scorers or any(given)

    @property
    def _what_is_below_0(self) -> str | None:
        """A component that is known to take rewards below 0, which no bound keeps there; None: there is none."""
        clip_min = self.algorithm.shaping.clip_min
        for name, component in self.reward.components.items() if clip_min is None or clip_min < 0 else ():
            scorer = component.scorer
            is_low = isinstance(scorer, LengthScorer) or (isinstance(scorer, FunctionScorer) and (scorer.min or 0) < 0)
            if component.weight < 0 or (component.weight > 0 and is_low):
                return name
        return None

    @field_validator("references", mode="before")
    @classmethod
    def _without_those_set_to_null(cls, references: Any) -> Any:
        """Leaves out references that are null, so that a file can leave out one of its recipe."""
        return (
            {name: section for name, section in references.items() if section is not None}
            if isinstance(references, dict)
            else references
        )

    @field_validator("references")
    @classmethod
    def _are_called_as_nothing_else(cls, references: dict[str, ReferenceSection]) -> dict[str, ReferenceSection]:
        for name in references:
            if not _REFERENCE.fullmatch(name):
                raise ValueError(
                    f"{name!r} names a process, a log and a host; give it up to 42 letters, digits, '.', '_' and '-', "
                    "with a letter or digit first (the model's directory goes under its path)"
                )
            if _OTHERS.fullmatch(name):
                raise ValueError(f"{name!r} is what another role of a run is called; give the instance another name")
        return references

    @model_validator(mode="after")
    def _deltas_are_of_whole_models(self) -> Self:
        if self.weights.deltas and self.actor.lora is not None:
            raise ValueError(
                "weights.deltas: adapters are small and all of them change, so they travel whole; leave weights.deltas "
                "or actor.lora out"
            )
        return self

    @model_validator(mode="after")
    def _roles_fit_the_algorithm(self) -> Self:
        advantage = self.algorithm.advantage
        if advantage.reads_values and self.critic is None:
            raise ValueError(
                f"algorithm.advantage {advantage.kind} reads values: add a critic section (critic: {{}} takes all "
                "defaults)"
            )
        if self.critic is not None and not advantage.reads_values:
            remedy = "name values in its columns" if isinstance(advantage, CustomAdvantage) else "use kind: gae"
            raise ValueError(
                f"critic: algorithm.advantage {advantage.kind} does not read values; remove the section (critic: "
                f"null where a recipe has it) or {remedy}"
            )
        kl = self.algorithm.kl
        if ACTOR_BASE in self.references:
            raise ValueError(
                f"references.{ACTOR_BASE}: this name means the actor's own model without its adapters; give the "
                "instance another one"
            )
        if kl is not None and kl.reference == ACTOR_BASE:
            if self.actor.lora is None:
                raise ValueError(
                    f"algorithm.kl.reference {ACTOR_BASE!r} is the actor without its adapters, and actor.lora is "
                    "not set; set it, or name an instance "
                    "under references"
                )
        elif kl is not None and kl.reference not in self.references:
            raise ValueError(
                f"algorithm.kl.reference {kl.reference!r} is not under references ({sorted(self.references)}); add it"
            )
        distillation = self.algorithm.distillation
        teachers = distillation.instances if distillation else frozenset()
        unused = sorted(set(self.references) - teachers - ({kl.reference} if kl else set()))
        if unused:
            raise ValueError(
                f"references {unused} are read by nothing; remove them (references.{unused[0]}: null where a recipe "
                "has it) or name them in "
                "algorithm.kl.reference or algorithm.distillation"
            )
        return self

    @model_validator(mode="after")
    def _held_out_images_are_there(self) -> Self:
        seeing = sorted(name for name, component in self.reward.components.items() if component.reads_images)
        if self.max_environment_image_bytes and self.evaluation.sets and seeing:
            raise ValueError(
                f"reward.components.{seeing[0]} reads images, and of held-out episodes those that the environment "
                "showed are not kept (environment.max_image_bytes); leave out evaluation.sets, or its images"
            )
        return self

    @model_validator(mode="after")
    def _determinism_is_possible(self) -> Self:
        if self.run.deterministic and self.algorithm.max_staleness:
            raise ValueError(
                f"run.deterministic: with algorithm.max_staleness {self.algorithm.max_staleness} the clock decides "
                "which weights sample a response; set max_staleness 0"
            )
        if self.run.deterministic and self.rollout.pause_mode == "keep_cache":
            raise ValueError(
                "run.deterministic: no response is in flight at a publish, whose keys and values rollout.pause_mode "
                "keep_cache would keep; leave one of them out (pause_mode keep where a recipe has it)"
            )
        if self.run.deterministic and self.algorithm.curriculum is not None:
            raise ValueError(
                "run.deterministic: with algorithm.curriculum the order in which groups are scored decides which "
                "prompts come next where one is there twice, as at the end of an epoch; leave one of them out"
            )
        if self.run.deterministic and self.actor.torch_compile:
            raise ValueError(
                "run.deterministic: compiled layers (actor.torch_compile) may differ in the last bit from start to "
                "start; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _backend_has_every_layout(self) -> Self:
        check_dtype(self.actor, self.model.dtype)
        if self.critic is not None:
            check_backend(self.actor, self.critic.parallel, "critic.parallel")
            if self.critic.lora is not None and self.actor.backend == "megatron":
                raise ValueError(
                    "critic.lora is not there with actor.backend megatron; leave it out, or use backend fsdp"
                )
            if self.critic.optimizer.kind != "adamw" and self.actor.backend == "megatron":
                raise ValueError(
                    f"critic.optimizer.kind {self.critic.optimizer.kind} is not there with actor.backend megatron; set "
                    "adamw, or use backend fsdp"
                )
        for name, section in self.references.items():
            check_backend(self.actor, section.parallel, f"references.{name}.parallel")
        return self

    @model_validator(mode="after")
    def _teachers_fit_the_algorithm(self) -> Self:
        algorithm, distillation = self.algorithm, self.algorithm.distillation
        if distillation is None:
            return self
        unknown = sorted(distillation.instances - set(self.references))
        if unknown:
            raise ValueError(
                f"algorithm.distillation names the teachers {unknown}, which are not under references "
                f"({sorted(self.references)}); add them"
            )
        if algorithm.kl is not None and algorithm.kl.reference == TEACHER:
            raise ValueError(
                f"references.{TEACHER}: what teachers say is kept under this name, and algorithm.kl reads it too; "
                "give the instance another one"
            )
        if not distillation.task_coef and algorithm.filters.without_signal:
            raise ValueError(
                "algorithm.filters.without_signal drops groups by a reward that task_coef 0 does not train on; "
                "remove it (where a recipe has it, by algorithm.filters.without_signal: false), or raise task_coef"
            )
        if not distillation.task_coef and algorithm.kl is not None and algorithm.kl.placement == "reward":
            raise ValueError(
                "algorithm.kl.placement reward: with task_coef 0 rewards are not trained on, nor is their KL; use "
                "placement: loss or raise task_coef"
            )
        advantage = algorithm.advantage
        if not distillation.task_coef and (advantage.needs_a_pass or advantage.wants_greedy_response):
            raise ValueError(
                f"algorithm.advantage {advantage.kind} costs another pass, of which task_coef 0 makes nothing; use "
                "kind: grpo or raise task_coef"
            )
        return self

    @model_validator(mode="after")
    def _batch_splits(self) -> Self:
        rows = self.algorithm.groups_per_batch * self.sampling.num_responses
        if rows < self.algorithm.num_minibatches:
            raise ValueError(
                f"algorithm.num_minibatches {self.algorithm.num_minibatches} exceeds the batch's {rows} trajectories"
            )
        if self.critic is not None and self.critic.num_minibatches is not None and rows < self.critic.num_minibatches:
            raise ValueError(
                f"critic.num_minibatches {self.critic.num_minibatches} exceeds the batch's {rows} trajectories; "
                "lower it"
            )
        is_task_trained = self.algorithm.distillation is None or self.algorithm.distillation.task_coef > 0
        if is_task_trained and self.algorithm.advantage.compares_responses and self.sampling.num_responses < 2:
            raise ValueError(
                f"sampling.num_responses must be at least 2: {self.algorithm.advantage.kind} compares responses "
                "within a group"
            )
        adaptive = self.algorithm.kl.adaptive if self.algorithm.kl is not None else None
        if adaptive is not None and rows * KL_ERROR_BOUND >= adaptive.horizon:
            raise ValueError(
                f"algorithm.kl.adaptive.horizon {adaptive.horizon}: one step of {rows} responses could take kl_coef "
                "to 0, where it stays; raise it above "
                f"{rows * KL_ERROR_BOUND:g}"
            )
        return self

    @model_validator(mode="after")
    def _advantage_gets_its_rewards(self) -> Self:
        advantage = self.algorithm.advantage
        adds_kl = self._adds_kl_to_rewards
        if isinstance(advantage, PassAtKAdvantage) and advantage.k > self.sampling.num_responses:
            raise ValueError(
                f"algorithm.advantage.k {advantage.k} exceeds sampling.num_responses {self.sampling.num_responses}; "
                "lower it"
            )
        if isinstance(advantage, GrpoAdvantage) and advantage.supervision == "process":
            if not self._may_have_token_rewards:
                raise ValueError(
                    "algorithm.advantage.supervision process compares rewarded steps, and no scorer gives "
                    "token_rewards; use one that does, or outcome"
                )
            if adds_kl:
                raise ValueError(
                    "algorithm.kl.placement reward would make a step of every token under supervision process; use "
                    "placement loss"
                )
        if advantage.kind == "custom" and "token_rewards" in advantage.needs and not self._may_have_token_rewards:
            raise ValueError(
                "algorithm.advantage.columns: the estimator reads token_rewards, and no scorer gives them; use one "
                "that does, as {kind: function, token_rewards: true}, or leave the column out"
            )
        clip = self.algorithm.shaping.clip_max
        if isinstance(advantage, PassAtKAdvantage) and clip is not None and clip < advantage.solved_at:
            raise ValueError(
                f"algorithm.shaping.clip_max {clip:g}: pass_at_k takes a response for right from "
                f"{advantage.solved_at:g} on, which none would reach; raise it"
            )
        if advantage.kind == "maxrl" and (low := self._what_is_below_0):
            raise ValueError(
                f"reward.components.{low}: it may bring rewards below 0, and maxrl divides by the group's mean reward; "
                "set algorithm.shaping.clip_min: 0, or its weight to 0, or use another estimator"
            )
        if advantage.kind in ("maxrl", "pass_at_k") and (adds_kl or self.algorithm.shaping.normalize is not None):
            what, meant = (
                ("kl.placement reward", "kl.placement loss") if adds_kl else ("shaping.normalize", "no normalize")
            )
            raise ValueError(
                f"algorithm.{what} moves the rewards that {advantage.kind} reads as right or wrong, from 0 up; use "
                f"{meant}, or another estimator"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_gets_its_components(self) -> Self:
        advantage = self.algorithm.advantage
        if not isinstance(advantage, GdpoAdvantage):
            return self
        scorers = {name: component.scorer for name, component in self.reward.components.items()}
        unknown = sorted(name for name in advantage.weights if scorers and _component_of(name) not in scorers)
        if unknown or not (scorers or advantage.weights):
            raise ValueError(
                f"algorithm.advantage.weights: gdpo weighs reward components, {unknown or 'none'} named, "
                f"{sorted(scorers)} under reward.components; "
                "name those that the scorers give"
            )
        shadows = shadows_of(self.reward.components)
        weighed = sorted(
            name for name, weight in advantage.weights.items() if weight and _component_of(name) in shadows
        )
        if weighed:
            raise ValueError(
                f"algorithm.advantage.weights: gdpo weighs {weighed}, which weigh 0 under reward.components: a "
                "shadow may be absent; give them a weight there, too"
            )
        earning = sorted(
            name for name, scorer in scorers.items() if isinstance(scorer, FunctionScorer) and scorer.token_rewards
        )
        if earning:
            raise ValueError(
                f"algorithm.advantage gdpo reads the reward's components, which the token_rewards of {earning} do "
                "not reach; use another estimator, or scorers without them"
            )
        shaping = self.algorithm.shaping.model_dump(
            include={"clip_min", "clip_max", "normalize", "overlong"}, exclude_none=True
        )
        if self._adds_kl_to_rewards or shaping:
            raise ValueError(
                "algorithm.advantage gdpo reads the reward's components, which "
                f"{sorted(shaping) or 'KL in the reward'} does not reach; remove it"
            )
        return self

    @model_validator(mode="after")
    def _environment_is_there(self) -> Self:
        gives = [
            name
            for name, component in self.reward.components.items()
            if isinstance(component.scorer, FunctionScorer) and component.scorer.kind == "environment"
        ]
        if gives and self.environment is None:
            raise ValueError(
                f"reward.components.{gives[0]} is what an environment gives, and there is none; set environment.address"
            )
        return self

    @model_validator(mode="after")
    def _sessions_are_named_after_sets(self) -> Self:
        for name in self.evaluation.sets if self.environment is not None else ():
            if not (name.isascii() and name.isprintable() and len(name) <= MAX_SET_NAME_CHARS):
                raise ValueError(
                    f"evaluation.sets: {name!r} stands in the names of the environment's sessions, which are printable "
                    f"ASCII; give it at most {MAX_SET_NAME_CHARS} such characters"
                )
        return self

    @model_validator(mode="after")
    def _loss_reads_what_is_there(self) -> Self:
        loss, kl = self.algorithm.policy_loss, self.algorithm.kl
        if isinstance(loss, CustomLoss):
            there = {column.name for column in self.columns if Plugin.LOSS in column.plugins}
            there |= {reference_column(kl.reference)} if kl is not None else set()
            absent = sorted(set(loss.columns) - there)
            if absent:
                raise ValueError(
                    f"algorithm.policy_loss.columns {absent} are not in the rows of this run; there are {sorted(there)}"
                )
        return self

    @model_validator(mode="after")
    def _other_samplers_are_corrected(self) -> Self:
        dtype = self.rollout.engine.get("kv_cache_dtype", "auto")
        others = [f"engine.kv_cache_dtype {dtype}"] if dtype != "auto" else []
        others += ["pause_mode keep_cache"] if self.rollout.pause_mode == "keep_cache" else []
        correction = self.algorithm.correction
        if others and (correction is None or not correction.corrects):
            raise ValueError(
                f"rollout.{' and rollout.'.join(others)}: makes the sampler another policy than the trainer's; set "
                "algorithm.correction to weigh or reject for it, as {weight: {kind: token, cap: 2}}"
            )
        return self

    @model_validator(mode="after")
    def _routing_can_be_replayed(self) -> Self:
        if self.actor.router_replay == "r3" and self.rollout.pipeline_parallel_size > 1:
            raise ValueError(
                "actor.router_replay r3: vLLM does not say which experts it samples with where "
                f"rollout.pipeline_parallel_size is {self.rollout.pipeline_parallel_size}; make it 1 and raise "
                "rollout.tensor_parallel_size, or use r2"
            )
        if self.actor.router_replay == "r2" and self.algorithm.sampler_is_old:
            raise ValueError(
                "actor.router_replay r2 replays the pass that gives the old logprobs, and with "
                "algorithm.correction.proximal bypass there is none; use r3, which replays the sampler's"
            )
        return self

    @model_validator(mode="after")
    def _shaping_has_an_effect(self) -> Self:
        overlong, filters = self.algorithm.shaping.overlong, self.algorithm.filters
        longest = self.sampling.max_tokens
        if overlong is not None and overlong.buffer_tokens > longest:
            raise ValueError(
                f"algorithm.shaping.overlong.buffer_tokens {overlong.buffer_tokens} exceeds the longest response, "
                f"{longest} tokens; even an empty one would "
                "be punished: lower it"
            )
        if overlong is not None and self.algorithm.advantage.kind == "maxrl":
            raise ValueError(
                "algorithm.shaping.overlong: maxrl divides by the group's mean reward, which this would bring near "
                "0; remove one of them"
            )
        if filters.without_signal and self.responses_per_group < 2:
            raise ValueError(
                "algorithm.filters.without_signal: a group of one response never has any; raise "
                "sampling.num_responses, or remove the filter"
            )
        return self

    @model_validator(mode="after")
    def _longest_trajectory_fits(self) -> Self:
        longest = self.data.max_prompt_tokens + self.sampling.max_tokens
        trainers: dict[str, TrainerSection] = {
            "actor": self.actor,
            **{f"references.{name}": section for name, section in self.references.items()},
        }
        trainers |= {"critic": self.critic} if self.critic else {}
        for role, section in trainers.items():
            if section.token_budget < longest:
                raise ValueError(
                    f"{role}.token_budget {section.token_budget} is less than the longest trajectory, "
                    "data.max_prompt_tokens + sampling.max_tokens = "
                    f"{longest}; raise it, or lower one of them"
                )
        if self.max_row_tokens < longest:
            raise ValueError(
                f"environment.max_row_tokens {self.max_row_tokens} is less than one conversation, "
                f"data.max_prompt_tokens + sampling.max_tokens = {longest}; raise it"
            )
        if self.max_row_tokens > self.actor.token_budget and self.algorithm.sees_trajectories:
            raise ValueError(
                f"environment.max_row_tokens {self.max_row_tokens} exceeds actor.token_budget "
                f"{self.actor.token_budget}, and the loss needs a whole trajectory in one microbatch (aggregation "
                "seq_mean_token_mean, a loss or correction of sequences, or one of your own); lower it, or raise the "
                "budget"
            )
        return self

    @model_validator(mode="after")
    def _epochs_can_be_counted(self) -> Self:
        if self.run.num_epochs is not None and self.algorithm.curriculum is not None:
            raise ValueError(
                "run.num_epochs: with algorithm.curriculum an epoch leaves out the prompts whose turn it is not, which "
                "nobody knows before; give run.num_steps"
            )
        return self

    @model_validator(mode="after")
    def _schedules_fit(self) -> Self:
        if self.run.num_steps is None:
            return self  # checked once the prompts are counted
        if self.critic and 0 < self.run.num_steps <= self.critic.warmup_steps:
            raise ValueError(
                f"critic.warmup_steps {self.critic.warmup_steps} leaves the policy none of run.num_steps "
                f"{self.run.num_steps}; lower it, or raise run.num_steps"
            )
        for role, optimizer, num_updates in self.trained_by:
            if optimizer.fault is not None:
                raise ValueError(f"{role}.optimizer: {optimizer.fault} (what it leaves out follows actor.optimizer)")
            num_changing = optimizer.warmup_steps + (optimizer.decay_steps or 0)
            if optimizer.decay_steps and num_changing > num_updates:
                raise ValueError(
                    f"{role}.optimizer.warmup_steps + decay_steps = {num_changing} exceed the run's {num_updates} "
                    "optimizer steps "
                    "(run.num_steps x num_minibatches x num_epochs, less critic.warmup_steps for the actor); shorten "
                    "them"
                )
        return self

    @model_validator(mode="after")
    def _devices_fit_together(self) -> Self:
        if check_devices(self):
            # not by attribute: to everybody else the file is frozen
            vars(self)["rollout"] = self.rollout.model_copy(update={"sleep_mode": True})
        if self.rollout.local_devices and len(self.rollout.devices) != self.rollout.num_replicas:
            raise ValueError(
                f"rollout.devices has {len(self.rollout.devices)} entries, rollout.num_replicas is "
                f"{self.rollout.num_replicas}; make them equal"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_takes_place(self) -> Self:
        if not self.evaluation.at_start and self.run.num_steps == 0:
            raise ValueError(
                "evaluation.at_start: a run of no steps is its evaluation, at step 0, which this leaves out; remove "
                "it, or raise run.num_steps"
            )
        if self.evaluation.beside and self.takes_shifts:
            raise ValueError(
                "evaluation.beside: rollouts sleep while the trainers work (rollout.sleep_mode, which follows from "
                "shared devices); leave beside out, or give rollouts devices of their own"
            )
        return self

    @model_validator(mode="after")
    def _deadlines_are_derived(self) -> Self:
        self._derived_deadlines = derive(self)
        # not by attribute: to everybody else the file is frozen
        vars(self).update(filled_in(self, self._derived_deadlines))
        return self


def _component_of(name: str) -> str:
    """The component that is `name`, or has a part of that name."""
    return name.partition("/")[0]
