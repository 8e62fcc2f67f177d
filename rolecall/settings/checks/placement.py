"""The GPUs of a run's local roles: which role has which, whether rollouts and trainers share them, and whether there is
a list of them for each rollout.

A role with an `address` runs elsewhere, and so do rollouts where num_replicas is 0: their devices are other machines'.
"""

from typing import TYPE_CHECKING

from rolecall.settings.section import ServiceSection

if TYPE_CHECKING:
    from rolecall.settings.run import RunSettings
    from rolecall.settings.trainers import ReferenceSection


def shares_devices(settings: "RunSettings") -> bool:
    """Whether rollouts share GPUs with the trainers. ValueError where a GPU is given to roles that cannot share it."""
    rollouts, others = _rollouts(settings), _others(settings)
    shared = set(rollouts) & set(others.get("actor", ()))
    owners: dict[int, list[str]] = {}
    for name, devices in others.items():
        for device in devices:
            owners.setdefault(device, []).append(name)
    for device, names in owners.items():
        scores = any(name.startswith("reward") for name in names)
        together = device in shared and not scores and len(set(names)) == len(names)
        if len(names) > 1 and not together:
            raise _given_twice(device, names[0], names[1])
        if device in rollouts and not together:
            raise _given_twice(device, names[0], rollouts[device])
    if shared:
        _check_shared(settings, set(rollouts), others)
    return bool(shared)


def references_beside(settings: "RunSettings") -> dict[str, "ReferenceSection"]:
    """The references, `offload` set where one is on GPUs of the rollouts and says nothing of it."""
    rollouts, others = _rollouts(settings), _others(settings)
    return {
        name: section.model_copy(update={"offload": True})
        if section.offload is None and set(rollouts) & set(others.get(f"references.{name}", ()))
        else section
        for name, section in settings.references.items()
    }


def check_offload(settings: "RunSettings") -> None:
    """ValueError for a reference that is to leave devices to others, where none are shared."""
    for name, section in settings.references.items():
        if section.offload and not settings.takes_shifts:
            raise ValueError(
                f"references.{name}.offload: rollouts and trainers share no devices that it could leave to them; leave "
                "it out"
            )


def check_num_replicas(settings: "RunSettings") -> None:
    """ValueError where rollouts on GPUs of this machine are not as many as their lists of GPUs."""
    if settings.rollout.local_devices and len(settings.rollout.devices) != settings.rollout.num_replicas:
        raise ValueError(
            f"rollout.devices has {len(settings.rollout.devices)} entries, rollout.num_replicas is "
            f"{settings.rollout.num_replicas}; make them equal"
        )


def _rollouts(settings: "RunSettings") -> dict[int, str]:
    """Rollout by GPU."""
    owners: dict[int, str] = {}
    for i, devices in enumerate(settings.rollout.local_devices):
        for device in devices:
            if device in owners:
                raise _given_twice(device, owners[device], f"rollout.devices[{i}]")
            owners[device] = f"rollout.devices[{i}]"
    return owners


def _others(settings: "RunSettings") -> dict[str, tuple[int, ...]]:
    sections: dict[str, ServiceSection] = {"actor": settings.actor, "reward": settings.reward}
    sections |= {"critic": settings.critic} if settings.critic else {}
    sections |= {f"references.{name}": section for name, section in settings.references.items()}
    servers = {f"reward.servers.{name}": section for name, section in settings.reward.servers.items()}
    return {
        **{name: section.devices for name, section in sections.items() if section.address is None},
        **{name: section.gpus for name, section in servers.items() if section.address is None},
    }


def _check_shared(settings: "RunSettings", rollouts: set[int], others: dict[str, tuple[int, ...]]) -> None:
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
    if settings.weights.backend == "nccl":
        raise ValueError(
            f"weights.backend nccl: NCCL cannot have the actor and a rollout on one GPU, and they share {min(rollouts)}"
            "; leave it out"
        )


def _given_twice(device: int, first: str, second: str) -> ValueError:
    return ValueError(
        f"GPU {device} is given to {first} and to {second}; give each role its own, and the address to one on another "
        "machine"
    )
