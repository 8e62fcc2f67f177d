"""The whole file as sections, and what follows from several of them."""

from rolecall.columns import COLUMNS, ROUTED_EXPERTS, Column, Given, column, reference_column
from rolecall.settings.algorithm.algorithm import AlgorithmSection
from rolecall.settings.data import DataSection, EvaluationSection, ModelSection, RunSection, SamplingSection
from rolecall.settings.optimizers import OptimizerSection
from rolecall.settings.reward.components import RewardSection
from rolecall.settings.rollout import EnvironmentSection, RolloutSection
from rolecall.settings.section import Named, Section
from rolecall.settings.services import (
    ControllerSection,
    LauncherSection,
    RpcSection,
    StoreSection,
    TelemetrySection,
    TrackersSection,
    WeightBackend,
    WeightsSection,
)
from rolecall.settings.trainers import ActorSection, CriticSection, LoraSection, ReferenceSection


class RunSections(Section):
    """The sections of a run's file, each by itself: RunSettings has checked that they agree, and what is left out."""

    run: RunSection
    model: ModelSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    algorithm: AlgorithmSection
    controller: ControllerSection = ControllerSection()
    rollout: RolloutSection = RolloutSection()
    environments: Named[EnvironmentSection] = {}
    actor: ActorSection = ActorSection()
    critic: CriticSection | None = None
    references: Named[ReferenceSection] = {}
    reward: RewardSection
    weights: WeightsSection = WeightsSection()
    launcher: LauncherSection = LauncherSection()
    store: StoreSection = StoreSection()
    rpc: RpcSection = RpcSection()
    telemetry: TelemetrySection = TelemetrySection()
    trackers: TrackersSection = TrackersSection()

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
            Given.TOKEN_REWARDS: self.reward.may_have_token_rewards,
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
        """Whether the policy may be shown images: by its prompts, or by an environment."""
        return self.data.images_field is not None or self.max_environment_image_bytes > 0

    @property
    def max_environment_image_bytes(self) -> int:
        """Most bytes of images that an environment shows in an episode; 0: none shows any."""
        return max((section.max_image_bytes or 0 for section in self.environments.values()), default=0)

    @property
    def freezes_vision_tower(self) -> bool:
        """Whether a vision tower stays as it is: it learns nothing where no images are shown."""
        return self.model.freeze_vision_tower or not self.shows_images

    @property
    def trained_image_share(self) -> float:
        """Most of a row's tokens that may be of images, of which a trained vision tower keeps what its backward pass
        takes, as a share.
        """
        if self.freezes_vision_tower:
            return 0.0
        return 1.0 if self.max_environment_image_bytes else self.data.max_prompt_tokens / self.conversation_tokens

    @property
    def published_adapters(self) -> LoraSection | None:
        """The adapters that a publish carries; None: it carries a whole model."""
        return None if self.weights.merge_adapters else self.actor.lora

    @property
    def takes_shifts(self) -> bool:
        """Whether rollouts sleep while the trainers work, and the trainers wait in host memory while they sample."""
        return bool(self.rollout.sleep_mode)

    @property
    def takes_shifts_apart(self) -> bool:
        """Whether actor and rollouts take shifts on GPUs and not all of them are started here: the file says that their
        machines are the same.
        """
        is_apart = self.actor.address is not None or not self.rollout.num_replicas
        return self.takes_shifts and is_apart and bool(self.actor.devices or self.rollout.devices)

    @property
    def num_first_rollouts(self) -> int:
        """Rollouts with which a run begins. Those that share GPUs on several machines are all named: one that joins
        later is without weights until the next publish, and so are its GPUs without work.
        """
        return len(self.rollout.devices) if self.takes_shifts_apart else max(1, self.rollout.num_replicas)

    @property
    def keeps_over_shifts(self) -> bool:
        """Whether responses that are unfinished when rollouts leave shared devices keep their tokens and go on later.
        Episodes come to their end before, for what environments and agents do meanwhile has deadlines; and so do the
        single responses of a run with some, for the engine is paused in one way.
        """
        return not self.environments and self.rollout.pause_mode in ("keep", "keep_cache")

    @property
    def references_in_shifts(self) -> tuple[str, ...]:
        """The references that score in a shift of their own, and are in host memory otherwise."""
        return tuple(name for name, section in self.references.items() if section.offload)

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
        return max([self.conversation_tokens, *map(self.episode_tokens, self.environments.values())])

    @property
    def conversation_tokens(self) -> int:
        """Most tokens of one conversation that is trained: of a prompt and a response, or of an episode's turns."""
        return self.data.max_prompt_tokens + self.sampling.max_tokens

    def episode_tokens(self, environment: EnvironmentSection) -> int:
        """Most tokens of the row of an episode in `environment`, all segments together."""
        return environment.max_row_tokens or self.conversation_tokens
