"""Sections of the trainers: layout of ranks, adapters, and the three roles that share the training library."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import (
    Field,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolecall.settings.data import Dtype
from rolecall.settings.optimizers import CriticOptimizerSection, OptimizerSection
from rolecall.settings.section import ConfigPath, NonNegativeFloat, NonNegativeInt, Section, ServiceSection

TrainingBackend: TypeAlias = Literal["fsdp", "megatron"]
"""Libraries that spread a model over ranks and train it; rolecall/training/backends.py makes the engine of each."""

ALL_LINEAR = "all-linear"
"""Names in one word the modules of a model that may have adapters."""
_GATE = "shared_expert_gate"
"""Name of the matrix by which Qwen2-MoE weighs the expert that all tokens go to."""


class LayoutSection(Section):
    """The layout of the work over one trainer's ranks. Ranks that are not named here shard the model and take data: one
    rank, or any number, needs nothing set.
    """

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP), for many machines: parameters are gathered inside a copy, gradients summed
    over copies once per mini-batch.
    """
    sequence: PositiveInt = 1
    """Ranks that share each sequence's tokens, and so a microbatch's (Ulysses), for sequences too long for one. Must
    divide the query heads left by `tensor`, and divide the key heads or be a multiple of them.
    """
    tensor: PositiveInt = 1
    """Ranks that share each matrix (tensor parallel, by the plan that transformers ships for the model). Must divide
    heads, MLP, experts and vocabulary.
    """

    pipeline: PositiveInt = 1
    """Stages that a model's layers are cut into, each on ranks of its own, which microbatches pass through one after
    another; `megatron` only. Where they do not divide the layers, none has more than an even share, rounded up, and the
    last, which has the head, has the fewest; `rolecall check` says the split.
    """
    expert: PositiveInt = 1
    """Ranks of a stage that a layer's experts are spread over, which exchange tokens; `megatron` only. Must divide the
    experts, and the ranks of a stage, which are num_ranks / `pipeline`: whether they share rows or not.
    """

    @property
    def slot_size(self) -> int:
        """Ranks that compute the same rows together."""
        return self.sequence * self.tensor * self.pipeline

    def slot_of(self, rank: int, num_ranks: int) -> int:
        """Index of the slot of `rank`, one of `num_ranks`: in each stage as many neighbours as share its matrices and
        sequences.
        """
        return rank % (num_ranks // self.pipeline) // (self.sequence * self.tensor)

    def leads_slot(self, rank: int, num_ranks: int) -> bool:
        """Whether `rank` is the first of its slot, of its first stage therefore."""
        return rank < num_ranks // self.pipeline and rank % (self.sequence * self.tensor) == 0


class ParallelSection(LayoutSection):
    """The layout of the actor's ranks, and how gradients are summed, by the actor and by the critic."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that gradients are summed over ranks in. bfloat16 halves the traffic and loses digits that grow with the
    number of ranks.
    """
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """How gradients wait for the last microbatch of a mini-batch. Unsharded: reduced once instead of in every
    microbatch, at the price of a whole gradient in `reduce_dtype` on every rank (float32: 4 bytes per parameter left by
    `tensor`).
    """
    keep_gathered: bool | None = None
    """Whether parameters that were gathered from the ranks, or cast, stay whole until the optimizer changes them, not
    for one layer's pass alone: gathered once per mini-batch, at the price of a copy in model.dtype on every rank
    (bfloat16: 2 bytes per parameter left by `tensor`). Unset: where an eighth of the device is left beside it, as
    measured. One rank that computes in its parameters' own type copies nothing in any case.
    """


class TrainerSection(ServiceSection):
    """Common to actor, critic and reference: one SPMD group behind one address."""

    num_ranks: PositiveInt = 1
    """Processes of the group."""
    token_budget: PositiveInt = 16384
    """Most tokens in one microbatch; at least those of the longest trajectory or example, and unless set as many."""
    parallel: LayoutSection = LayoutSection()
    """How the ranks share the work."""

    @property
    def num_shards(self) -> int:
        """Ranks over which one copy of the model is spread."""
        return self.num_ranks // self.parallel.replicate

    @model_validator(mode="after")
    def _ranks_can_be_laid_out(self) -> Self:
        fixed = self.parallel.replicate * self.parallel.slot_size
        if self.num_ranks % fixed:
            raise ValueError(
                f"num_ranks is {self.num_ranks}, not a multiple of parallel.replicate x sequence x tensor x pipeline = "
                f"{fixed}; change one of them"
            )
        return self


class LoraSection(Section):
    """Low-rank adapters (arXiv:2106.09685): the base stays as it is; its adapters alone are trained, published and kept
    in checkpoints, a critic's with its value head.
    """

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Inner size of each adapter; vLLM serves up to 512."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)], Field(union_mode="left_to_right")
    ] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear modules of the transformer blocks that get one; a model that lacks one of them is refused and
    those it has are listed. `all-linear`: all of them that may have one, which no router, expert or vision tower has.
    """
    experts: bool = False
    """Give the matrices of every expert of a mixture adapters, too, each its own (peft's target_parameters). A layer is
    computed with its experts' adapters added, which takes its experts' memory once more: of one layer, but of all with
    backend fsdp without gradient_checkpointing. The actor's need weights.merge_adapters.
    """
    start: ConfigPath | None = None
    """Folder of an adapter in peft's format that training begins with, such as `rolecall export` writes. Its rank,
    alpha, modules and experts must be those of this section. Absent: one that changes nothing. A run that goes on takes
    its checkpoint's: the folder may be gone by then.
    """

    def as_kept(self) -> dict[str, JsonValue]:
        """Returns what a run and its checkpoints keep of the section: all that says what the adapters are."""
        return self.model_dump(mode="json", exclude={"start"} if self.experts else {"start", "experts"})


class MoeSection(Section):
    """The terms that a mixture of experts adds to the loss, over all tokens of a mini-batch and all layers. With both 0
    it is measured only, at the price of a pass without gradients before each update, which counts each expert's tokens.
    """

    balance_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Switch, arXiv:2101.03961, eq. 4-6; pooled over layers as transformers does),
    which is even at K experts a token.
    """
    z_coef: NonNegativeFloat = 0.0
    """Weight of the router z-loss (ST-MoE, arXiv:2202.08906, eq. 5), which keeps router logits small."""


class MegatronSection(Section):
    """Choices of Megatron-Core's beside the layout, for every trainer."""

    sequence_parallel: bool = True
    """Whether ranks that share matrices (`tensor`) also share the tokens between them, so that norms and residuals are
    kept and computed once. A mixture of experts needs it.
    """
    virtual_stages: PositiveInt = 1
    """Stages of every rank of a pipeline, which shortens its idle ends. Each has a layer at least, and a trainer's
    microbatches are computed in rounds of `pipeline`.
    """
    recompute: Literal["layers", "attention"] = "layers"
    """What gradient_checkpointing computes again in backward: whole layers, or their attention alone."""
    overlap_grad_reduce: bool = False
    """Sum gradients over ranks beside the last microbatch's backward pass, part by part."""


class ActorSection(TrainerSection):
    """The policy's trainer. What is said here of memory, threads and deadlines holds for every trainer."""

    parallel: ParallelSection = ParallelSection()
    """How the ranks share the work, and how gradients are summed."""
    backend: TrainingBackend = "fsdp"
    """The library that spreads a model over ranks, for every trainer: `fsdp` is PyTorch's fully sharded data parallel,
    `megatron` Megatron-Core (extra `megatron`), for Llama, Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V2.
    """
    megatron: MegatronSection = MegatronSection()
    """What backend `megatron` does beside the layout."""
    num_threads: PositiveInt | None = None
    """Threads per rank of a trainer on CPUs; absent: the machine's cores over the role's ranks."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward instead of keeping them; the actor and the critic. Unless set, true on GPUs
    where those of a microbatch would take more than 32 GiB of one, as far as config.json tells.
    """
    activation_offload: bool = False
    """Keep activations in host memory between a layer's forward and its backward; with gradient_checkpointing the
    layers' inputs, which are all there is. The actor and the critic.
    """
    torch_compile: bool = False
    """Compile norms, rotations and activations of each layer into few kernels, during the first passes (torch.compile):
    faster on GPUs and with less memory. Every trainer; not with parallel.tensor, router_replay, moe or
    run.deterministic.
    """
    train_timeout_s: PositiveFloat = 3600.0
    """Deadline of one Train, SaveCheckpoint or LoadCheckpoint call of the actor or the critic; unless set, longer with
    the batch and the largest model.
    """
    compute_timeout_s: PositiveFloat = 600.0
    """Deadline of one ComputeLogprobs or ComputeValues call of any trainer; unless set, longer with the batch and the
    largest model.
    """
    hang_s: PositiveFloat = 30.0
    """Longest time at work without progress before a trainer is taken for hung and replaced.

    Progress is a layer's pass over a microbatch, or a tensor published or loaded. Unless set, 300 on GPUs and with
    torch_compile, and longer for larger models.
    """
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer."""
    lora: LoraSection | None = None
    """Adapters to train instead of the model itself, which rollouts then read from model.path; absent: every parameter
    is trained.
    """
    router_replay: Literal["off", "r2", "r3"] = "off"
    """The experts that a mixture's tokens are sent to while they are trained: those its routers choose (off), those of
    the pass that gave the old logprobs (r2, arXiv:2507.18071), or those that the rollout sampled with, which that pass
    then takes, too (r3, arXiv:2510.11370).
    """
    moe: MoeSection | None = None
    """Auxiliary losses of a mixture of experts; absent: none, and nothing of its routers is measured."""

    @model_validator(mode="after")
    def _backend_does_what_is_asked(self) -> Self:
        check_backend(self, self.parallel, "actor.parallel")
        check_adapters(self, self.lora, self.parallel, "actor.parallel")
        if self.backend != "megatron":
            return self
        only_fsdp = [
            ("activation_offload", self.activation_offload, "set gradient_checkpointing"),
            ("torch_compile", self.torch_compile, "leave it out"),
            ("optimizer.kind muon", self.optimizer.kind != "adamw", "set adamw"),
            ("parallel.reduce_dtype bfloat16", self.parallel.reduce_dtype != "float32", "set float32"),
            ("parallel.accumulate unsharded", self.parallel.accumulate != "sharded", "set sharded"),
            ("parallel.keep_gathered", self.parallel.keep_gathered is not None, "leave it out"),
        ]
        for name, found, remedy in only_fsdp:
            if found:
                raise ValueError(f"{name} is not there with backend megatron; {remedy}, or use backend fsdp")
        return self

    @model_validator(mode="after")
    def _compiled_layers_are_dense(self) -> Self:
        if self.torch_compile and (self.moe is not None or self.router_replay != "off"):
            raise ValueError(
                "torch_compile: layers whose routers are measured (moe) or told what to choose (router_replay) are not "
                "compiled; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _routers_are_whole(self) -> Self:
        if self.moe is not None and self.parallel.tensor > 1 and self.backend == "fsdp":
            raise ValueError(
                "moe: auxiliary losses are not computed where experts are spread over ranks (parallel.tensor); "
                "leave it at 1 and raise num_ranks, or use backend megatron"
            )
        return self


def check_dtype(actor: ActorSection, dtype: Dtype) -> None:
    """Raises ValueError when the back end does not train a model in `dtype`."""
    if actor.backend == "megatron" and dtype == "float16":
        raise ValueError(
            "model.dtype float16 is not there with actor.backend megatron; set bfloat16, or use backend fsdp"
        )


def check_adapters(actor: ActorSection, lora: LoraSection | None, parallel: LayoutSection, setting: str) -> None:
    """Raises ValueError when the back end does not split matrices with adapters. `setting` names `parallel`."""
    if lora is not None and _GATE in lora.target_modules and actor.backend == "megatron":
        raise ValueError(
            f"{setting.removesuffix('parallel')}lora.target_modules: {_GATE} gets no adapter with actor.backend "
            "megatron; leave it out, or use backend fsdp"
        )
    if lora is not None and lora.experts and actor.activation_offload and not actor.gradient_checkpointing:
        raise ValueError(
            f"{setting.removesuffix('parallel')}lora.experts: actor.activation_offload would move the experts of every "
            "layer to the host and back; set actor.gradient_checkpointing, too, or leave it out"
        )
    if lora is not None and parallel.tensor > 1 and actor.backend == "fsdp":
        raise ValueError(
            f"{setting}.tensor: matrices with adapters (lora) are not split over ranks; leave it at 1 and raise "
            "num_ranks, which shards them, or use backend megatron"
        )


def check_backend(actor: ActorSection, parallel: LayoutSection, setting: str) -> None:
    """Raises ValueError when the back end has no such layout. `setting` names `parallel`."""
    if actor.torch_compile and parallel.tensor > 1:
        raise ValueError(
            f"{setting}.tensor: matrices that are split over ranks are not compiled (actor.torch_compile); leave it at "
            "1, or do not compile"
        )
    if actor.backend == "fsdp" and (parallel.pipeline > 1 or parallel.expert > 1):
        raise ValueError(
            f"{setting}: pipeline and expert are there with actor.backend megatron only; leave them at 1, or use it"
        )
    if actor.backend == "megatron" and parallel.replicate > 1:
        raise ValueError(
            f"{setting}.replicate is not there with actor.backend megatron; leave it at 1: num_ranks may be any "
            "multiple of a slot"
        )
    if actor.backend == "megatron" and actor.megatron.virtual_stages > 1 and parallel.pipeline == 1:
        raise ValueError(
            f"actor.megatron.virtual_stages is {actor.megatron.virtual_stages}, and {setting}.pipeline 1; virtual "
            "stages are of a pipeline: leave them at 1, or set pipeline"
        )


class CriticSection(TrainerSection):
    """The trainer of the value model, whose optimizer and minibatches are the actor's where it says nothing."""

    path: ConfigPath | None = None
    """Model directory; absent: the policy's. A new value head is made when it has none."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """Optimizer."""
    value_clip_eps: PositiveFloat | None = 0.2
    """Clip of the value's change (PPO's implementation); null: none."""
    num_minibatches: PositiveInt | None = None
    """Optimizer steps per pass; absent: the actor's."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which the critic alone learns and the policy stays as it is. A new value head says
    nothing yet: this is its value pretraining (VC-PPO, arXiv:2503.01491).
    """
    lora: LoraSection | None = None
    """Adapters to train instead of the model itself; the value head is trained whole beside them. Absent: every
    parameter is trained.
    """


class ReferenceSection(TrainerSection):
    """A reference: a frozen policy under a name."""

    path: ConfigPath | None = None
    """Model directory; absent: the policy's starting point."""
    offload: bool | None = None
    """Whether it scores a batch at a time, while rollouts sleep, and is in host memory otherwise. Absent: where
    rollouts and trainers share its devices. False there: it stays, and scores groups as they land.
    """
