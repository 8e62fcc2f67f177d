"""Sections of what samples: rollouts, and the environments that their episodes are played in."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from rolecall.settings.engine_arguments import EngineArguments
from rolecall.settings.section import (
    Address,
    Conditions,
    ConfigPath,
    NonNegativeInt,
    Roots,
    Section,
    UnitFloat,
    holds,
)

PROBE_ROOM = 512
"""Tokens of an engine's step that are the probe's: more than it has (controller/publish/probe.py)."""


CPU_CACHE_BYTES = 2**30
"""KV cache of a worker on CPUs when rollout.kv_cache_bytes is absent."""
STEP_TOKENS = 2048
"""Tokens that an engine computes in one step at the least, unless rollout.engine says otherwise: vLLM's own for engines
that it knows no use of.
"""


class RolloutSection(Section):
    """vLLM replicas. They announce themselves to the controller, so there is no fixed address."""

    num_replicas: NonNegativeInt = 1
    """Replicas that `rolecall train` starts; others may join from elsewhere."""
    bind: Address = "127.0.0.1:0"
    """`host:port` to listen on; port 0 takes a free one."""
    advertise_host: str | None = None
    """Host that others reach it by; absent: the bind's host, or, of one that listens everywhere, the address of its
    machine on the way to the controller.
    """
    endpoint_bind: Address = "127.0.0.1:0"
    """`host:port` on which each rollout lets agents of environments call the policy, where some run any; port 0 takes a
    free one. Agents elsewhere reach it at advertise_host; beyond loopback it speaks TLS, unless rpc.behind_mesh.
    """
    devices: tuple[tuple[int, ...], ...] = ()
    """GPU indices per local replica, or of each `rollout-<i>` that is started elsewhere where num_replicas is 0; empty:
    CPUs. In shifts on GPUs of several machines of each `rollout-<i>`, wherever it is started.
    """
    tensor_parallel_size: PositiveInt = 1
    """Workers a layer is split over."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that the layers are split into, one after another, each of tensor_parallel_size workers."""
    max_num_seqs: PositiveInt = 256
    """Most responses the engine samples at a time."""
    max_groups: PositiveInt | None = None
    """Most groups claimed at a time; absent: max_num_seqs over the responses of a group, at least 1. Where environments
    hang with all of them and the engine has nothing to do, one more of each other kind of prompts.
    """
    kv_cache_bytes: PositiveInt | None = None
    """KV cache per worker; absent: 1 GiB on CPUs, vLLM's own share on GPUs."""
    gpu_memory_utilization: UnitFloat = 0.9
    """vLLM's share of a GPU when kv_cache_bytes is absent."""
    enforce_eager: bool | None = None
    """No CUDA graphs; absent: true on CPUs."""
    sleep_mode: bool | None = None
    """Whether rollouts sleep while the trainers work, and the trainers' state waits in host memory while rollouts
    sample; absent: where both are given the same GPUs and run on this machine. True says it of roles that are started
    elsewhere, too: the GPUs of rollout.devices are then those of the actor's machines, each named once for each of
    them, and run.dir is on a file system that they share, with locks that hold between them. vLLM gives memory up on
    GPUs only.
    """
    engine: EngineArguments = {}
    """Further arguments of vLLM's engine (AsyncEngineArgs) by their names there, as block_size or
    max_num_batched_tokens; those that another setting decides or that would break a promise are refused.
    """
    pause_mode: Literal["keep", "keep_cache", "wait", "abort"] = "keep"
    """What a publish does with requests in flight: keep freezes them, and the new weights compute their keys and values
    again, a prefill of all that is in flight; keep_cache goes on from the keys and values of the weights before, which
    makes the sampler a mixture of policies and needs algorithm.correction; wait finishes them first; abort begins them
    again.
    """
    generation_timeout_s: PositiveFloat = 600.0
    """Deadline of one group's generation, at the least; unless set, longer with sampling.max_tokens
    (settings/deadlines.py).
    """
    hang_s: PositiveFloat = 15.0
    """Longest time with requests in the engine and no token from any before the replica is taken for hung and replaced;
    unless set, longer on GPUs and for larger models.
    """

    @model_validator(mode="after")
    def _the_probe_fits_beside_what_is_kept(self) -> Self:
        least = self.max_num_seqs + PROBE_ROOM
        for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
            given = self.engine.get(name)
            if self.pause_mode == "keep_cache" and isinstance(given, int) and given < least:
                raise ValueError(
                    f"engine.{name} {given}: with pause_mode keep_cache, responses in flight take a token each of "
                    f"every step, and the probe of a publish {PROBE_ROOM} more; set it to {least} or more, or lower "
                    "max_num_seqs"
                )
        return self

    def step_tokens(self, longest: int) -> int:
        """Most tokens that the engine computes in one step, where a prompt and its response have `longest`: room for
        the probe beside all responses, and on CPUs, where no prompt is cut, for the longest one; no more than all of
        them whole.
        """
        given = self.engine.get("max_num_batched_tokens")
        if isinstance(given, int):
            return given
        least = STEP_TOKENS if self.devices else max(STEP_TOKENS, longest)
        return min(max(least, self.max_num_seqs + PROBE_ROOM), (self.max_num_seqs + 1) * longest)

    @property
    def cache_bytes(self) -> int | None:
        """KV cache of each worker; None: vLLM's own share of a GPU."""
        return self.kv_cache_bytes or (None if self.devices else CPU_CACHE_BYTES)

    @property
    def workers_per_replica(self) -> int:
        """Workers of one engine: each has a GPU, or cores, and a rank of the weight channel of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_devices(self) -> tuple[tuple[int, ...], ...]:
        """GPU indices of this machine per replica."""
        return self.devices[: self.num_replicas]


class EnvironmentSection(Section):
    """An environment that the policy acts in, for many turns: anybody's EnvironmentService. Each of its prompts begins
    episodes in place of single responses.
    """

    when: Conditions = {}
    """The prompts that are played in it, by fields of the data set: each field holds the value, or one of the values;
    absent: all. A prompt that none takes is answered once; none may have two.
    """
    address: Address
    """gRPC target of its one process: on this machine, or reached as the roles reach each other (rpc.tls, or
    rpc.behind_mesh), or by `ca_file`.
    """
    ca_file: Roots | None = None
    """PEM roots to trust at the `address` of somebody else's environment, or `system`; absent: as the roles among
    themselves, or with a bearer token the system's.
    """
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token for the `address`, read again when it changes; it is never sent without TLS."""
    max_turns: PositiveInt = 16
    """Most turns of an episode, or calls of the policy by the environment's own agent; one that is not over then is
    graded as it stands, and truncated.
    """
    max_row_tokens: PositiveInt | None = None
    """Most tokens of an episode's row, all segments together with what they repeat, for which the store keeps room;
    absent: those of one conversation, data.max_prompt_tokens + sampling.max_tokens. Branches beyond it are masked,
    those in which least was sampled first. More than actor.token_budget only where no part of the loss is of a whole
    trajectory. Must be set where the rollout steps the episodes and the chat template shows earlier turns otherwise;
    `rolecall check` says how many that asks for.
    """
    tool_parser: str | None = None
    """Name of the parser of vLLM's (its --tool-call-parser) that reads the policy's calls of tools, such as hermes;
    absent: environments get them as text alone.
    """
    max_malformed: ClassVar[int] = 3
    """Turns in a row whose calls of tools cannot be read, with which an episode ends: graded as it stands, and
    truncated.
    """
    max_observation_tokens: PositiveInt | None = None
    """Most tokens of a message with which the environment answers a turn; of a longer one a part is left out, and a
    marker of a few tokens says how many. Not of its first messages, nor of an agent's own. Absent: nothing is cut.
    """
    observation_cut: Literal["left", "middle", "right"] = "middle"
    """Part of a message with more than max_observation_tokens that is left out."""
    max_image_bytes: PositiveInt | None = None
    """Most bytes of the images that the environment shows in one episode, or its agent beside those of the row. The
    store keeps room for them in every row. An episode that would show more is graded as it stands, and truncated; an
    agent's call is refused with 403. Absent: they show none; an environment's image fails its episode, an agent's is
    refused.
    """
    max_attempts: PositiveInt = 8
    """Episodes begun for one trajectory, each after the environment lost the one before; then the group goes back, its
    delivery counted. Eight let 97 of 100 groups of 8 through where half of all episodes are lost.
    """
    budget_share: ClassVar[float] = 0.75
    """Share of rollout.generation_timeout_s after which an episode has no further turn: it is graded as it stands, and
    the rest is for the turn under way and for the grade.
    """

    @property
    def tls(self) -> bool:
        """Whether it is called as somebody else's, with TLS."""
        return self.ca_file is not None or self.bearer_token_file is not None

    @property
    def server(self) -> tuple[object, ...]:
        """The server, and the credentials it is called with: environments that agree in this share its places."""
        return self.address, self.ca_file, self.bearer_token_file

    def takes(self, metadata: Mapping[str, object]) -> bool:
        """Whether a prompt with these fields is played in it."""
        return holds(self.when, metadata)
