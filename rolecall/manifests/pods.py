"""The pods of a run's roles: what differs between them, and the template that every workload holds one of."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rolecall.launcher.plan import role_environment
from rolecall.manifests.completed import METRICS_PORT, PORT, RANKS_PORT, TLS_FOLDER, nodes_of
from rolecall.manifests.environment import FOLDER as ENVIRONMENT_FOLDER
from rolecall.manifests.environment import are_named
from rolecall.manifests.render import render
from rolecall.settings import RunSettings, TrainerSection

CONFIG = "/etc/rolecall/run.yaml"
DATA, RUNS = "/data", "/runs"
"""Where the volumes are mounted."""
REFERENCE = "rolecall/reference"
"""Label that names the instance of a reference."""

_DRAIN = {
    "light": ("2 s of NOT_SERVING, then 5 s for calls under way", 45),
    "trainer": ("a trainer finishes its step for up to 60 s", 120),
    "rollout": ("a rollout finishes what it can in 3 s and gives the rest back", 45),
}
"""Seconds by image: what ending takes (docs/operations.md), and terminationGracePeriodSeconds, that and 30 s at the
least.
"""
_GPU_NODES = "- {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}"


@dataclass(frozen=True)
class Pod:
    """The pods of one workload."""

    role: str
    name: str
    """Name of the workload and its service."""
    image: str
    devices: tuple[int, ...] = ()
    num_ranks: int = 1
    nodes: int = 1
    overrides: tuple[str, ...] = ()
    """Overrides of the run's file, by what only the pod knows."""
    own_name: str = ""
    """Name under which a rollout joins."""
    in_job: bool = False
    """Whether it begins and ends with the run; the others may be several."""
    cpu: int = 1
    memory_gib: int = 2
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that say which one of its role, where there are several kinds."""

    @property
    def instance_label(self) -> str:
        """The lines of `labels`."""
        return "".join(f"{key}: {value}\n" for key, value in self.labels.items())

    @property
    def ranks_per_node(self) -> int:
        """Processes of a trainer on each of its machines."""
        return len(self.devices) or self.num_ranks


def light(role: str) -> Pod:
    """A role without a model."""
    return Pod(role, role, "light", in_job=role == "controller")


def trainer(name: str, section: TrainerSection, settings: RunSettings, *, in_job: bool) -> Pod:
    """A trainer, or the reference `name`. Memory: a beginning, by the ranks of a node."""
    is_reference = name in settings.references
    per_node = len(section.devices) or section.num_ranks
    return Pod(
        role="reference" if is_reference else name,
        name=f"reference-{name}" if is_reference else name,
        image="trainer",
        devices=section.devices,
        num_ranks=section.num_ranks,
        nodes=nodes_of(section),
        overrides=("--weights.host=$(POD_IP)",) if name == "actor" else (),
        in_job=in_job,
        cpu=2 * per_node,
        memory_gib=(64 if section.devices else 8) * per_node,
        labels={REFERENCE: name} if is_reference else {},
    )


def rollout(settings: RunSettings) -> Pod:
    """A replica, with the GPUs of the first that the file describes."""
    gpus = settings.rollout.workers_per_replica if settings.rollout.devices else 0
    host = "$(POD_NAME).rollout"
    named = f"--rollout.advertise_host={host}.{settings.run.name}.svc.cluster.local"
    return Pod(
        role="rollout",
        name="rollout",
        image="rollout",
        devices=tuple(range(gpus)),
        overrides=(named,) if are_named(settings) else (),
        # not rollout-0, by which a launcher numbers the replicas of one machine
        own_name=host if are_named(settings) else "$(POD_NAME)",
        cpu=max(2, 4 * gpus),
        memory_gib=max(8, 32 * gpus),
    )


def pod_template(pod: Pod, settings: RunSettings) -> str:
    """The template of a pod."""
    why, grace_s = _DRAIN[pod.image]
    label = {"role": pod.role, "instance_label": pod.instance_label}
    ports = (settings.weights.ports or "").replace("-", " ")
    values: dict[str, object] = {
        **label,
        "drain_why": why,
        "grace_s": grace_s,
        "restart_policy": "restartPolicy: Never # the Job starts another pod, by its exit code" if pod.in_job else "",
        "spread": "" if pod.in_job else render("spread.yaml", label),
        "tolerations": render("tolerations.yaml", {"gpus": _GPU_NODES if pod.devices else ""}),
        "sysctls": "" if pod.image == "light" else render("sysctls.yaml", {"ports": ports}),
        "image": pod.image,
        "command": _command(pod),
        "store_env": "" if pod.role == "reward" else render("store_env.yaml", {}),
        "more_env": _environment(pod, settings),
        "port": PORT,
        "metrics_port": f"- {{name: metrics, containerPort: {METRICS_PORT}}}"
        if settings.telemetry.metrics_bind
        else "",
        "probes": _probes(pod, settings),
        "pre_stop": render("pre_stop.yaml", {}) if not pod.in_job and pod.role != "rollout" else "",
        "cpu": pod.cpu,
        "memory": f"{pod.memory_gib}Gi",
        "limits": f"limits: {{nvidia.com/gpu: {len(pod.devices)}}}" if pod.devices else "",
    }
    return render("pod.yaml", values | _mounts(pod, settings))


def _mounts(pod: Pod, settings: RunSettings) -> dict[str, str]:
    """The lines of mounts and volumes, those that the pod does not have empty."""
    secret = f"secret: {{secretName: tls-{pod.role}, defaultMode: 0440}}"
    store = f"secret: {{secretName: store, defaultMode: 0440, items: [{{key: {pod.role}, path: url}}]}}"
    secret_of_environment = "secret: {secretName: environment, defaultMode: 0440}"
    claim = "persistentVolumeClaim: {claimName: %s}"
    shares_files = pod.role == "controller" or settings.run.checkpoint_url is None
    mounts = [
        ("tls", f"{TLS_FOLDER}, readOnly: true", secret, not settings.rpc.behind_mesh),
        ("environment", f"{ENVIRONMENT_FOLDER}, readOnly: true", secret_of_environment, _reads_files(pod, settings)),
        ("store", "/run/rolecall/store, readOnly: true", store, pod.role != "reward"),
        ("shm", "/dev/shm", "emptyDir: {medium: Memory}", pod.image != "light"),
        ("data", f"{DATA}, readOnly: true", claim % "data", pod.role != "reward"),
        ("runs", RUNS, claim % "runs" if shares_files else "emptyDir: {}", _has_run_dir(pod)),
    ]
    lines = {}
    for name, path, source, has in mounts:
        lines[f"{name}_mount"] = f"- {{name: {name}, mountPath: {path}}}" if has else ""
        lines[f"{name}_volume"] = f"- {{name: {name}, {source}}}" if has else ""
    return lines


def _reads_files(pod: Pod, settings: RunSettings) -> bool:
    """Whether it calls an environment by files of its secret."""
    sections = settings.environments.values()
    files = [file for section in sections for file in (section.ca_file, section.bearer_token_file)]
    return pod.role == "rollout" and any(
        isinstance(file, Path) and file.is_relative_to(ENVIRONMENT_FOLDER) for file in files
    )


def _has_run_dir(pod: Pod) -> bool:
    return pod.image == "trainer" or pod.role == "controller"


def _environment(pod: Pod, settings: RunSettings) -> str:
    """Returns what `rolecall train` gives a role, too; which GPUs, the device plugin says."""
    threads = {"OMP_NUM_THREADS": str(settings.actor.num_threads or 2), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**role_environment(None), **(threads if pod.image == "trainer" else {})}
    return "".join(f'- {{name: {name}, value: "{value}"}}\n' for name, value in environment.items())


def _command(pod: Pod) -> str:
    """The arguments of the image's own command, `tini -- rolecall`, or the command of several ranks."""
    name = pod.labels.get(REFERENCE, pod.role)
    if not pod.in_job:  # each of several needs a name of its own
        name = pod.own_name if pod.role == "rollout" else f"{name}/$(POD_NAME)"
    arguments = [CONFIG, "--name", name, *pod.overrides]
    if pod.num_ranks == 1:
        return f"args: {json.dumps(['serve', pod.role, *arguments])}"
    node = "$(JOB_COMPLETION_INDEX)" if pod.in_job else "0"
    leader = f"run-{pod.name}-0-0.run" if pod.in_job else "$(POD_IP)"
    words = torchrun(
        pod.role, pod.ranks_per_node, arguments, nodes=pod.nodes, node=node, own="$(POD_IP)", leader=leader
    )
    return f"command: {json.dumps(['tini', '--', *words])}"


def torchrun(
    role: str,
    ranks: int,
    arguments: Sequence[str],
    *,
    nodes: int,
    node: str,
    own: str,
    leader: str,
    port: int = RANKS_PORT,
) -> list[str]:
    """The command of a trainer's ranks on the `node`th of its `nodes`. own, leader: addresses of this one and of the
    first, where they meet on `port`; `arguments` are those of each rank.
    """
    words = ["python", "-P", "-m", "rolecall.training.ranks.torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    words += [f"--node-rank={node}", f"--local-addr={own}", f"--master-addr={leader}", f"--master-port={port}"]
    # rather longer than a trainer's drain, which is the ranks' own to end
    return [*words, "--shutdown-timeout=90", "-m", f"services.{role}", *arguments]


def _probes(pod: Pod, settings: RunSettings) -> str:
    if pod.nodes > 1:
        return render("no_probes.yaml", {})
    ask = ["rolecall", "health", pod.role, CONFIG]
    ask += ["--name", pod.labels[REFERENCE]] if REFERENCE in pod.labels else []
    failures = math.ceil((settings.controller.start_timeout_s + 60) / 10)
    values = {"live": json.dumps([*ask, "--live"]), "ready": json.dumps(ask), "startup_failures": failures}
    return render("probes.yaml", values)
