"""The GPUs of a run's local roles: which role has which, whether rollouts and trainers share them, and whether there is
a list of them for each rollout.

A role with an `address` runs elsewhere, and so do rollouts where num_replicas is 0: their devices are other machines',
and whether they are the same ones is not seen but said, by rollout.sleep_mode.
"""

from collections import Counter

from rolecall.address import is_loopback_host
from rolecall.errors import ConfigError
from rolecall.settings.run_sections import RunSections
from rolecall.settings.section import ServiceSection
from rolecall.settings.trainers import ReferenceSection


def shares_devices(settings: RunSections) -> bool:
    """Whether rollouts share GPUs with the trainers. ValueError where a GPU is given to roles that cannot share it."""
    rollouts, others = _rollouts(settings), _others(settings)
    gpus = _gpus_of_rollouts(settings)
    shared = gpus & set(others.get("actor", ()))
    owners: dict[int, list[str]] = {}
    for name, devices in others.items():
        if name == "actor" and settings.actor.address is not None:
            continue  # on other machines, with whose rollouts alone it is compared
        for device in devices:
            owners.setdefault(device, []).append(name)
    for device, names in owners.items():
        scores = any(name.startswith("reward") for name in names)
        together = device in shared and not scores and len(set(names)) == len(names)
        if len(names) > 1 and not together:
            raise _given_twice(device, names[0], names[1])
        if device in rollouts and not together:
            raise _given_twice(device, names[0], rollouts[device])
    if shared and not settings.takes_shifts_apart:
        _check_shared(settings, gpus, others)
    if shared and settings.weights.backend == "nccl":
        raise ValueError(
            f"weights.backend nccl: NCCL cannot have the actor and a rollout on one GPU, and they share {min(shared)}"
            "; leave it out"
        )
    return bool(shared)


def require_same_gpus(settings: RunSections) -> None:
    """ConfigError unless each GPU of an actor that takes turns with rollouts is one rollout's, on each of its machines.
    No rollout is held to it: it may have joined beside those of the run's file.
    """
    actor, lists = settings.actor, settings.rollout.devices
    named = Counter(device for devices in lists for device in devices)
    if not settings.takes_shifts or not (actor.devices or named):
        return
    if set(actor.devices) != named.keys():
        raise ConfigError(
            f"rollout.sleep_mode: actor and rollouts take turns on the same GPUs, and actor.devices is "
            f"{list(actor.devices)}, and those of rollout.devices are {sorted(named)}; give both the same, or leave it "
            "out"
        )
    num_machines, odd = divmod(actor.num_ranks, len(actor.devices))
    if odd:
        raise ConfigError(
            f"actor.num_ranks {actor.num_ranks} is no multiple of the {len(actor.devices)} GPUs that actor.devices "
            "names of each of its machines; give each rank one"
        )
    for device, number in named.items():
        if number != num_machines:
            raise ConfigError(
                f"rollout.devices names GPU {device} {number} times, and the {actor.num_ranks} ranks of the actor, "
                f"which take turns with rollouts, are on {num_machines} machines with a GPU {device}; name it "
                f"{num_machines} times, in a list of a rollout on each"
            )
    if num_machines > 1 and is_loopback_host(settings.weights.host):
        raise ConfigError(
            f"weights.host {settings.weights.host} is reached by nobody on the other machines of the actor, whose "
            "ranks send the weights there; name an interface of rank 0's machine that all of them reach"
        )


def references_beside(settings: RunSections) -> dict[str, ReferenceSection]:
    """The references, `offload` set where one is on GPUs of the rollouts and says nothing of it."""
    gpus, others = _gpus_of_rollouts(settings), _others(settings)
    return {
        name: section.model_copy(update={"offload": True})
        if section.offload is None and gpus & set(others.get(f"references.{name}", ()))
        else section
        for name, section in settings.references.items()
    }


def check_offload(settings: RunSections) -> None:
    """ValueError for a reference that is to leave devices to others, where none are shared."""
    for name, section in settings.references.items():
        if section.offload and not settings.takes_shifts:
            raise ValueError(
                f"references.{name}.offload: rollouts and trainers share no devices that it could leave to them; leave "
                "it out"
            )


def check_num_replicas(settings: RunSections) -> None:
    """ValueError where rollouts on GPUs of this machine are not as many as their lists of GPUs. In shifts over several
    machines further lists are those of rollouts on the others.
    """
    num_lists, num_replicas = len(settings.rollout.devices), settings.rollout.num_replicas
    if settings.takes_shifts_apart and num_lists > num_replicas:
        return
    if settings.rollout.local_devices and num_lists != num_replicas:
        raise ValueError(
            f"rollout.devices has {num_lists} entries, rollout.num_replicas is {num_replicas}; make them equal"
        )


def _gpus_of_rollouts(settings: RunSections) -> set[int]:
    """Returns those with which the actor's are compared, by the numbers of each machine."""
    lists = settings.rollout.devices if settings.takes_shifts_apart else settings.rollout.local_devices
    return {device for devices in lists for device in devices}


def _rollouts(settings: RunSections) -> dict[int, str]:
    """Rollout by GPU."""
    owners: dict[int, str] = {}
    for i, devices in enumerate(settings.rollout.local_devices):
        for device in devices:
            if device in owners:
                raise _given_twice(device, owners[device], f"rollout.devices[{i}]")
            owners[device] = f"rollout.devices[{i}]"
    return owners


def _others(settings: RunSections) -> dict[str, tuple[int, ...]]:
    sections: dict[str, ServiceSection] = {"actor": settings.actor, "reward": settings.reward}
    sections |= {"critic": settings.critic} if settings.critic else {}
    sections |= {f"references.{name}": section for name, section in settings.references.items()}
    servers = {f"reward.servers.{name}": section for name, section in settings.reward.servers.items()}
    together = {"actor"} if settings.takes_shifts_apart else set[str]()
    return {
        **{name: each.devices for name, each in sections.items() if each.address is None or name in together},
        **{name: section.gpus for name, section in servers.items() if section.address is None},
    }


def _check_shared(settings: RunSections, rollouts: set[int], others: dict[str, tuple[int, ...]]) -> None:
    """All of them are shared, or none: while one side works, the other is off the GPUs altogether."""
    if set(others["actor"]) != rollouts:
        raise ValueError(
            f"actor.devices {list(others['actor'])} and the GPUs of rollout.devices {sorted(rollouts)} share some and "
            "not others; give both the same GPUs, or each its own"
        )
    apart = set(others.get("critic", ())) - rollouts
    if apart and len(apart) < len(set(others["critic"])):
        raise ValueError(
            f"critic.devices {list(others['critic'])} are shared with the rollouts in part; give it GPUs of theirs or "
            "its own"
        )
    if settings.rollout.sleep_mode is False:
        raise ValueError(
            f"GPU {min(rollouts)} is given to actor and to rollouts, who take turns on it, and rollout.sleep_mode is "
            "false; leave it out, or give each role its own GPU"
        )


def _given_twice(device: int, first: str, second: str) -> ValueError:
    return ValueError(
        f"GPU {device} is given to {first} and to {second}; give each role its own, and the address to one on another "
        "machine"
    )
