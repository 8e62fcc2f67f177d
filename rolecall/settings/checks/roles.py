"""The roles beside the actor: that the algorithm finds those it reads, and reads those that there are."""

import re
from collections.abc import Iterable

from rolecall.address import is_loopback
from rolecall.columns import TEACHER
from rolecall.settings.algorithm.advantages import CustomAdvantage
from rolecall.settings.algorithm.kl import ACTOR_BASE
from rolecall.settings.run_sections import RunSections

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,41}")
"""Names of references: `reference-<name>` is a host, with room for what Kubernetes adds, and `<name>/0` a replica."""
_ENVIRONMENT = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
"""Names of environments: `environment-<name>` is a service account of Kubernetes and a folder of certificates."""
_OTHERS = re.compile(r"controller|actor|critic|reward|store|rollout(-.*)?")
"""Names of the run's other processes; the launcher, and files of several machines, know a process by its name alone."""


def check_names(instances: Iterable[str]) -> None:
    """ValueError for a name of a reference or a server that no process can have, or that another role has."""
    for name in instances:
        if not _REFERENCE.fullmatch(name):
            raise ValueError(
                f"{name!r} names a process, a log and a host; give it up to 42 letters, digits, '.', '_' and '-', "
                "with a letter or digit first (the model's directory goes under its path)"
            )
        if _OTHERS.fullmatch(name):
            raise ValueError(f"{name!r} is what another role of a run is called; give the instance another name")


def check_environment_names(environments: Iterable[str]) -> None:
    """ValueError for a name that cannot stand in what is named after an environment."""
    for name in environments:
        if not _ENVIRONMENT.fullmatch(name):
            raise ValueError(
                f"{name!r} stands in the names of metrics, certificates and pods; give it up to 42 lower-case letters, "
                "digits and '-', with a letter or digit first and last"
            )


def check_servers(settings: RunSections) -> None:
    """ValueError for a server of the reward's that is called as another process, or that others could listen in on."""
    try:
        check_names(settings.reward.servers)
    except ValueError as error:
        raise ValueError(f"reward.servers: {error}") from error
    for name in settings.reward.servers.keys() & settings.references.keys():
        raise ValueError(f"reward.servers.{name}: an instance under references is called so; rename one of them")
    for name, section in settings.reward.servers.items():
        if section.bind is not None and not is_loopback(section.bind) and not settings.rpc.behind_mesh:
            raise ValueError(
                f"reward.servers.{name}.bind {section.bind} is beyond this machine, and vLLM's server speaks no TLS "
                "here; bind 127.0.0.1, or set rpc.behind_mesh when a service mesh encrypts it"
            )


def check_roles(settings: RunSections) -> None:
    """ValueError where a critic or reference is missing that the algorithm reads, or is there and read by nothing."""
    advantage = settings.algorithm.advantage
    if advantage.reads_values and settings.critic is None:
        raise ValueError(
            f"algorithm.advantage {advantage.kind} reads values: add a critic section (critic: {{}} takes all defaults)"
        )
    if settings.critic is not None and not advantage.reads_values:
        remedy = "name values in its columns" if isinstance(advantage, CustomAdvantage) else "use kind: gae"
        raise ValueError(
            f"critic: algorithm.advantage {advantage.kind} does not read values; remove the section (critic: "
            f"null where a recipe has it) or {remedy}"
        )
    kl = settings.algorithm.kl
    if ACTOR_BASE in settings.references:
        raise ValueError(
            f"references.{ACTOR_BASE}: this name means the actor's own model without its adapters; give the "
            "instance another one"
        )
    if kl is not None and kl.reference == ACTOR_BASE:
        if settings.actor.lora is None:
            raise ValueError(
                f"algorithm.kl.reference {ACTOR_BASE!r} is the actor without its adapters, and actor.lora is "
                "not set; set it, or name an instance "
                "under references"
            )
    elif kl is not None and kl.reference not in settings.references:
        raise ValueError(
            f"algorithm.kl.reference {kl.reference!r} is not under references ({sorted(settings.references)}); add it"
        )
    distillation = settings.algorithm.distillation
    teachers = distillation.instances if distillation else frozenset()
    unused = sorted(set(settings.references) - teachers - ({kl.reference} if kl else set()))
    if unused:
        raise ValueError(
            f"references {unused} are read by nothing; remove them (references.{unused[0]}: null where a recipe "
            "has it) or name them in "
            "algorithm.kl.reference or algorithm.distillation"
        )


def check_teachers(settings: RunSections) -> None:
    """ValueError where a teacher of the distillation is missing, or the algorithm asks for what it makes nothing of."""
    algorithm, distillation = settings.algorithm, settings.algorithm.distillation
    if distillation is None:
        return
    unknown = sorted(distillation.instances - set(settings.references))
    if unknown:
        raise ValueError(
            f"algorithm.distillation names the teachers {unknown}, which are not under references "
            f"({sorted(settings.references)}); add them"
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
