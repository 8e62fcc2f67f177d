"""A run on Kubernetes: the files of a kustomize base. deploy/kubernetes/base is the one of its runs/base.yaml.

A JobSet holds the controller, the trainers and what else spans machines: they begin and end together. Rollouts, the
reward service and references of one machine are scaled by themselves.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rolecall.errors import ConfigError
from rolecall.manifests.completed import (
    PORT,
    TLS_FOLDER,
    as_text,
    complete_for_cluster,
    local_roles,
    nodes_of,
    replicas_of,
    require_no_servers,
    require_paths_under,
    trainers_of,
    with_store_bytes,
)
from rolecall.manifests.environment import FOLDER as ENVIRONMENT_FOLDER
from rolecall.manifests.environment import agents_port, are_named, places_of
from rolecall.manifests.mesh import certificates, istio
from rolecall.manifests.pods import DATA, RUNS, Pod, light, pod_template, rollout, trainer
from rolecall.manifests.policies import PEOPLE, network_policies
from rolecall.manifests.render import comment, render
from rolecall.settings import RunSettings, validated

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_NO_TEXT = re.compile(r"[0-9]+(e-?[0-9]+)?|0o[0-7]+|y|n")
"""Names that kustomize's reader takes for numbers or truths, and Python's does not."""

JOB_PAUSE_S = 600
"""The longest pause of a Job before it makes another pod: 10 s, doubled by each failure and renewed by nothing."""

_FIRST = (
    "One pod at a time, and of several nodes the first, where rank 0 serves. Not ready is not out of reach: the "
    "controller asks a trainer that loads, and no connection ends because a probe came late."
)
_FLEET = (
    "Rollouts join the controller by themselves, so any number may come and go: scale them as you like. They are ready "
    "while they hold attested weights, which a new one gets at once, or at the end of the step in training."
)
_STATELESS = "Without a state of its own: scale it as you like."
_JOINED = (
    "Each rollout tells the controller where it is, and is called there before it is ready: it waits for weights. So "
    "the service names them all, ready or not."
)
_ALL = "All addresses, over which clients take turns by themselves."
_ONE = "One address: the mesh takes turns."


def kubernetes(tree: dict[str, Any], file: Path) -> dict[str, str]:
    """Returns the base's files by name, of what `file` says, its `tree`. ConfigError for a run that no cluster could
    hold.
    """
    if (tree.get("rollout") or {}).get("sleep_mode"):  # before its GPUs are counted anew, as each pod has them
        raise ConfigError(
            "rollout.sleep_mode: each pod has GPUs of its own, which nobody takes turns on; leave it out, or write the "
            "run --to slurm"
        )
    local, mesh = local_roles(tree), bool((tree.get("rpc") or {}).get("behind_mesh"))
    done = complete_for_cluster(tree, {name: _host(name, mesh) for name in local})
    settings = _with_pauses(done, validated(done, file), file)
    require_no_servers(settings)
    _ = settings.run.total_steps  # of a file whose epochs nobody counted, ConfigError here and not from each pod
    _require_names(settings)
    require_paths_under(tree, settings, (DATA, RUNS, TLS_FOLDER, ENVIRONMENT_FOLDER))
    jobs, scaled = _pods(settings, local)
    places = places_of(settings)
    run, roles = settings.run.name, sorted({"rollout", *(pod.role for pod in (*jobs, *scaled))})
    others = [*(place.name for place in places if place.is_beside), *(PEOPLE if mesh else ())]
    done = with_store_bytes(done, settings)
    files = {
        "run.yaml": as_text(done, "Made by `rolecall manifests`: the run's file, and what the cluster decides."),
        "namespace.yaml": render("namespace.yaml", {"namespace": run}),
        "accounts.yaml": _accounts([*roles, "store", *others]),
        "volumes.yaml": render("volumes.yaml", _volumes(settings)),
        "store.yaml": render("store.yaml", _store(settings)),
        "run-jobset.yaml": render("jobset.yaml", {"jobs": "".join(_job(pod, settings) for pod in jobs)}),
        "rollout.yaml": _fleet(replicas_of(tree), settings),
        **{f"{pod.name}.yaml": _deployment(pod, settings) for pod in scaled},
        "services.yaml": _services(jobs, scaled, mesh, agents_port(settings)),
        "budgets.yaml": _budgets(scaled),
        "network-policies.yaml": network_policies(settings, roles),
    }
    resources = "".join(f"- {name}\n" for name in sorted(files) if name != "run.yaml")
    secrets = "" if mesh else ",\n# and `tls-<role>` for each role, which the component cert-manager makes"
    values = {"namespace": run, "resources": resources, "secrets": secrets}
    files["kustomization.yaml"] = render("kustomization.yaml", values)
    hosts = ["rollout", *(pod.name for pod in (*jobs, *scaled))]
    files |= _gpu_nvidia(jobs, scaled, settings)
    return files | (istio(roles, hosts, settings) if mesh else certificates(run, roles, settings))


def _host(name: str, mesh: bool) -> str:
    """Returns where clients reach a role: one that may be several by a name that is looked up, for the client takes
    turns over what it finds, or by the mesh's one address.
    """
    if name in ("controller", "actor", "critic"):
        return name
    return ("" if mesh else "dns:///") + (name if name == "reward" else f"reference-{name}")


def _with_pauses(tree: dict[str, Any], settings: RunSettings, file: Path) -> RunSettings:
    """Returns `settings` with time for a role that is away until its Job starts it again, and writes it to `tree`: what
    the probes wait, roles wait. ConfigError where the file gives up sooner.
    """
    start_s = settings.controller.start_timeout_s + JOB_PAUSE_S
    tree["controller"]["start_timeout_s"] = start_s
    settings = validated(tree, file)
    stall_s = settings.controller.stall_timeout_s
    if stall_s < start_s:
        raise ConfigError(
            f"controller.stall_timeout_s is {stall_s:g}, and a role that failed may be back after {start_s:g} s, "
            f"{JOB_PAUSE_S} of them its Job's pause; leave it out, or give that much"
        )
    return settings


def _require_names(settings: RunSettings) -> None:
    named = {"run.name": settings.run.name, **{f"references.{name}": name for name in settings.references}}
    for what, name in named.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{what} {name!r} names objects of Kubernetes: use lower case letters, digits and '-'")
        if _NO_TEXT.fullmatch(name) or not isinstance(yaml.safe_load(name), str):
            raise ConfigError(
                f"{what} {name!r} names objects of Kubernetes, whose YAML takes it for a number, a date, true, false "
                f"or nothing; add a word, e.g. '{name}-run'"
            )


def _pods(settings: RunSettings, local: list[str]) -> tuple[list[Pod], list[Pod]]:
    """Returns those of the run's own job, and those that are scaled."""
    jobs, scaled = [light("controller")], list[Pod]()
    for name, section in trainers_of(settings, local).items():
        is_scaled = name in settings.references and nodes_of(section) == 1
        (scaled if is_scaled else jobs).append(trainer(name, section, settings, in_job=not is_scaled))
    return jobs, scaled + ([light("reward")] if "reward" in local else [])


def _job(pod: Pod, settings: RunSettings) -> str:
    values = {"job": pod.name, "nodes": pod.nodes, "role": pod.role, "pod": pod_template(pod, settings)}
    return render("job.yaml", values)


def _fleet(replicas: int, settings: RunSettings) -> str:
    """The rollouts. Only a StatefulSet's pods have a name each."""
    # ready with its first weights: once all have started, and a step at the most later
    within_s = settings.controller.start_timeout_s + settings.actor.train_timeout_s
    values = {"replicas": replicas, "update": "{maxSurge: 0, maxUnavailable: 25%}"}
    template = "statefulset.yaml" if are_named(settings) else "deployment.yaml"
    return _workload(template, rollout(settings), settings, _FLEET, within_s, values)


def _deployment(pod: Pod, settings: RunSettings) -> str:
    # a pod beside the old ones would wait for GPUs that they hold, and they would serve the old model meanwhile
    update = "{maxSurge: 0, maxUnavailable: 1}" if pod.devices else "{maxSurge: 1, maxUnavailable: 0}"
    values: dict[str, object] = {"replicas": 1, "update": update}
    return _workload("deployment.yaml", pod, settings, _STATELESS, settings.controller.start_timeout_s, values)


def _workload(
    template: str, pod: Pod, settings: RunSettings, why: str, within_s: float, values: dict[str, object]
) -> str:
    common: dict[str, object] = {
        "why": comment(why),
        "name": pod.name,
        "role": pod.role,
        "instance_label": pod.instance_label,
        "progress_s": math.ceil(within_s) + 120,
        "pod": pod_template(pod, settings),
    }
    return render(template, common | values)


def _gpu_nvidia(jobs: list[Pod], scaled: list[Pod], settings: RunSettings) -> dict[str, str]:
    """The component that a cluster may need for the pods with GPUs; none where no pod has any."""
    alone = "/spec/template"
    places = [(pod, "JobSet", "run", f"/spec/replicatedJobs/{i}/template{alone}") for i, pod in enumerate(jobs)]
    places += [(pod, "Deployment", pod.name, alone) for pod in scaled]
    places.append((rollout(settings), "StatefulSet" if are_named(settings) else "Deployment", "rollout", alone))
    patches = [
        render("gpu-nvidia-patch.yaml", {"kind": kind, "name": name, "template": template})
        for pod, kind, name, template in places
        if pod.devices
    ]
    text = render("gpu-nvidia-kustomization.yaml", {"patches": "".join(patches)})
    return {"gpu-nvidia/kustomization.yaml": text} if patches else {}


def _services(jobs: list[Pod], scaled: list[Pod], mesh: bool, port_of_agents: int | None) -> str:
    made = [_service(pod, _FIRST, first=True, unready=True) for pod in jobs]
    fleet = Pod("rollout", "rollout", "rollout")
    agents = f"- {{name: agents, port: {port_of_agents}, appProtocol: {'http' if mesh else 'https'}}}"
    agents = "" if port_of_agents is None else agents
    made.append(_service(fleet, _JOINED, headless=True, unready=True, agents=agents))
    made += [_service(pod, _ONE if mesh else _ALL, headless=not mesh) for pod in scaled]
    return "---\n".join(made)


def _service(
    pod: Pod,
    why: str,
    *,
    first: bool = False,
    headless: bool = False,
    unready: bool = False,
    agents: str = "",
) -> str:
    values = {
        "agents": agents,
        "why": comment(why),
        "name": pod.name,
        "role": pod.role,
        "port": PORT,
        "headless": "clusterIP: None" if headless else "",
        "unready": str(unready).lower(),
        "instance_label": pod.instance_label,
        "first_label": 'batch.kubernetes.io/job-completion-index: "0"' if first else "",
    }
    return render("service.yaml", values)


def _budgets(scaled: list[Pod]) -> str:
    head = comment(
        "None for controller and trainers: a node that is drained must end, and the run goes on elsewhere from the "
        "store and its checkpoint. Whoever would rather hold the drain back adds one with minAvailable."
    )
    fleet = _budget(Pod("rollout", "rollout", "rollout"), "25%", "A quarter of the fleet at a time.")
    why = "One at a time; a single one may go, and calls wait for its successor."
    return head + "---\n".join([fleet, *(_budget(pod, 1, why) for pod in scaled)])


def _budget(pod: Pod, unavailable: int | str, why: str) -> str:
    values = {"name": pod.name, "role": pod.role, "instance_label": pod.instance_label, "unavailable": unavailable}
    return render("budget.yaml", {**values, "why": comment(why)})


def _accounts(roles: Iterable[str]) -> str:
    head = comment(
        "Names without rights, by which a mesh or a store of checkpoints knows each role. No token is mounted."
    )
    return head + "---\n".join(render("account.yaml", {"name": role}) for role in roles)


def _volumes(settings: RunSettings) -> dict[str, str]:
    if settings.run.checkpoint_url is not None:
        why, mode = "The controller's files, under /runs; checkpoints are at run.checkpoint_url.", "ReadWriteOnce"
    else:
        why, mode = "Checkpoints, which controller and trainers share, under /runs.", "ReadWriteMany"
    return {"runs_why": comment(why), "runs_mode": mode}


def _store(settings: RunSettings) -> dict[str, str]:
    mib = settings.store.max_bytes // 2**20
    return {
        "maxmemory": f"{mib * 5 // 4}mb",
        "memory": f"{mib * 5 // 4 + 256}Mi",
        "memory_limit": f"{mib * 5 // 2 + 512}Mi",
        "storage": f"{max(10, mib * 8 // 1024)}Gi",
        "tolerations": render("tolerations.yaml", {"gpus": ""}),
    }
