"""Which roles may be given the same GPUs, and what follows from it for the rest of the file."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rolecall.errors import ConfigError
from rolecall.launcher.plan import resolve, write_config
from rolecall.manifests import pods
from rolecall.settings import load_settings
from tests.conftest import MakeSettings

SHARED: dict[str, Any] = {"actor": {"devices": [0]}, "rollout": {"devices": [[0]]}}
SCORER: dict[str, Any] = {"components": {"correct": {"scorer": {"kind": "exact_match"}}}}
GAE = {"algorithm": {"groups_per_batch": 2, "advantage": {"kind": "gae"}}}


def test_the_same_gpu_for_actor_and_rollout_is_all_that_takes_shifts_need(make_settings: MakeSettings) -> None:
    assert make_settings(**SHARED).takes_shifts
    assert not make_settings(actor={"devices": [0]}, rollout={"devices": [[1]]}).takes_shifts
    assert not make_settings().takes_shifts
    assert make_settings(rollout={"sleep_mode": True}).takes_shifts


def test_the_pod_of_a_rollout_has_a_gpu_for_each_of_its_workers(make_settings: MakeSettings) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert pods.rollout(make_settings(rollout={"devices": [[0, 1, 2, 3]], **sizes})).devices == (0, 1, 2, 3)
    assert pods.rollout(make_settings(rollout=sizes)).devices == ()


def test_no_evaluation_goes_on_while_rollouts_sleep(make_settings: MakeSettings) -> None:
    beside = {"evaluation": {"beside": True}}
    assert make_settings(**beside).evaluation.beside
    with pytest.raises(ValidationError, match=r"evaluation\.beside: rollouts sleep while the trainers work"):
        make_settings(**SHARED, **beside)


def test_a_reference_leaves_the_gpus_of_the_rollouts_unless_it_is_to_stay(make_settings: MakeSettings) -> None:
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}

    def in_shifts(**reference: Any) -> tuple[str, ...]:
        return make_settings(**SHARED, algorithm=kl, references={"ref": reference}).references_in_shifts

    assert in_shifts(devices=[0]) == in_shifts(offload=True) == ("ref",)
    assert in_shifts(devices=[0], offload=False) == in_shifts(devices=[1]) == ()
    assert in_shifts(devices=[0], address="elsewhere:1") == (), "it has the GPU of another machine"
    with pytest.raises(ValidationError, match=r"references\.ref\.offload: rollouts and trainers share no devices"):
        make_settings(algorithm=kl, references={"ref": {"offload": True}})


def test_roles_read_from_the_resolved_file_that_they_take_shifts(make_settings: MakeSettings) -> None:
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    settings = make_settings(**SHARED, algorithm=kl, references={"ref": {"devices": [0]}})
    settings.run.dir.mkdir(parents=True)
    written = load_settings(write_config(resolve(settings)))
    assert written.actor.address is not None
    assert written.takes_shifts
    assert written.references_in_shifts == ("ref",)
    assert yaml.safe_load((settings.run.dir / "config.yaml").read_text())["rollout"]["sleep_mode"] is True


def test_weights_go_through_shared_memory_where_nccl_would_have_two_ranks_on_a_gpu(make_settings: MakeSettings) -> None:
    apart = make_settings(actor={"devices": [0]}, rollout={"devices": [[1]]})
    assert apart.weight_backend(receivers_on_gpus=True) == "nccl"
    assert make_settings(**SHARED).weight_backend(receivers_on_gpus=True) == "shared"
    with pytest.raises(ValidationError, match=r"weights\.backend nccl: NCCL cannot have"):
        make_settings(**SHARED, weights={"backend": "nccl"})


@pytest.mark.parametrize(
    "sections",
    [
        {"actor": {"devices": [0, 1], "num_ranks": 2}, "rollout": {"devices": [[0], [1]], "num_replicas": 2}},
        {"actor": {"devices": [0, 1], "num_ranks": 2}, "rollout": {"devices": [[0, 1]], "tensor_parallel_size": 2}},
        {"actor": {"devices": [0, 1], "num_ranks": 2}, "rollout": {"devices": [[0, 1]], "pipeline_parallel_size": 2}},
        {**SHARED, **GAE, "critic": {"devices": [0]}},
        {**SHARED, **GAE, "critic": {"devices": [1]}},
        {
            **SHARED,
            "algorithm": {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}},
            "references": {"ref": {"devices": [0]}},
        },
    ],
)
def test_all_trainers_and_rollouts_of_a_machine_may_share(make_settings: MakeSettings, sections: Any) -> None:
    assert make_settings(**sections).takes_shifts


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"actor": {"devices": [0, 1], "num_ranks": 2}, "rollout": {"devices": [[0]]}}, "share some and not others"),
        ({"actor": {"devices": [0]}, "rollout": {"devices": [[0], [1]], "num_replicas": 2}}, "share some and not"),
        ({"actor": {"devices": [0]}, "rollout": {"devices": [[0], [0]], "num_replicas": 2}}, r"rollout\.devices\[0\]"),
        ({**SHARED, **GAE, "critic": {"devices": [0, 1], "num_ranks": 2}}, r"critic\.devices \[0, 1\] are shared"),
        ({**GAE, "actor": {"devices": [0]}, "critic": {"devices": [0]}}, "GPU 0 is given to actor and to critic"),
        ({**SHARED, "reward": {"devices": [0], **SCORER}}, "GPU 0 is given to actor and to reward"),
        ({"actor": {"devices": [0]}, "rollout": {"devices": [[0]], "sleep_mode": False}}, "sleep_mode is false"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused_in_words(make_settings: MakeSettings, sections: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        make_settings(**sections)


EIGHT = list(range(8))
OVER_TWO_MACHINES: dict[str, Any] = {
    "actor": {"address": "one:1", "devices": EIGHT, "num_ranks": 16},
    "rollout": {
        "sleep_mode": True,
        "num_replicas": 0,
        "tensor_parallel_size": 4,
        "devices": [[0, 1, 2, 3], [4, 5, 6, 7]] * 2,
    },
    "weights": {"host": "10.0.0.1"},
}


def test_a_file_says_of_several_machines_that_actor_and_rollouts_share_their_gpus(make_settings: MakeSettings) -> None:
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    reference = {"address": "one:2", "devices": [0], "offload": True}
    settings = make_settings(**OVER_TWO_MACHINES, algorithm=kl, references={"ref": reference})
    assert settings.takes_shifts
    assert settings.references_in_shifts == ("ref",)
    assert settings.weight_backend(receivers_on_gpus=True) == "shared"
    apart = {**OVER_TWO_MACHINES["rollout"], "sleep_mode": None}
    assert not make_settings(actor=OVER_TWO_MACHINES["actor"], rollout=apart).takes_shifts, "of other machines"


def test_a_launcher_starts_the_rollouts_of_its_machine_beside_ranks_on_several(make_settings: MakeSettings) -> None:
    rollout = {**OVER_TWO_MACHINES["rollout"], "num_replicas": 2}
    critic = {"address": "one:2", "devices": EIGHT, "num_ranks": 16}
    settings = resolve(make_settings(**GAE, actor=OVER_TWO_MACHINES["actor"], rollout=rollout, critic=critic))
    assert settings.rollout.local_devices == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert settings.actor.address == "one:1"


@pytest.mark.parametrize(
    ("section", "keys", "told"),
    [
        ("rollout", {"devices": [[0, 1, 2, 3], [4, 5, 6, 7]]}, "names GPU 0 1 times, and the 16 ranks .* name it 2"),
        ("rollout", {"devices": [[0, 1, 2, 3], [4, 5, 6, 7]] * 3}, "names GPU 0 3 times, .* on 2 machines"),
        ("rollout", {"devices": [[0, 1, 2, 3]] * 2}, "take turns on the same GPUs, .* give both the same"),
        ("rollout", {"devices": [[8, 9]] * 2}, r"and those of rollout\.devices are \[8, 9\]"),
        ("rollout", {"devices": []}, r"and those of rollout\.devices are \[\]"),
        ("actor", {"devices": []}, r"actor\.devices is \[\], and those"),
        ("actor", {"num_ranks": 12}, r"actor\.num_ranks 12 is no multiple of the 8 GPUs"),
        ("weights", {"host": "127.0.0.1"}, r"weights\.host 127\.0\.0\.1 is reached by nobody on the other machines"),
    ],
)
def test_gpus_of_several_machines_are_all_shared_or_none(
    make_settings: MakeSettings, section: str, keys: dict[str, Any], told: str
) -> None:
    make_settings(**OVER_TWO_MACHINES).require_same_gpus()
    settings = make_settings(**OVER_TWO_MACHINES | {section: {**OVER_TWO_MACHINES[section], **keys}})
    with pytest.raises(ConfigError, match=told):
        settings.require_same_gpus()


def test_a_rollout_that_is_added_to_a_run_in_shifts_may_have_gpus_of_its_own(make_settings: MakeSettings) -> None:
    resolved = resolve(make_settings(**SHARED))
    resolved.require_same_gpus()
    added = {**resolved.rollout.model_dump(), "num_replicas": 0, "devices": [[4]]}
    assert make_settings(actor=resolved.actor.model_dump(), rollout=added).takes_shifts


def test_a_scorer_here_has_no_gpu_of_an_actor_elsewhere(make_settings: MakeSettings) -> None:
    reward = {"components": {"correct": {"scorer": {"kind": "exact_match"}}}, "devices": [0]}
    make_settings(**OVER_TWO_MACHINES, reward=reward)
    beside = {**OVER_TWO_MACHINES["rollout"], "num_replicas": 2}
    with pytest.raises(ValidationError, match="GPU 0 is given to"):
        make_settings(**OVER_TWO_MACHINES | {"rollout": beside}, reward=reward)


def test_nccl_has_no_two_ranks_on_a_gpu_of_several_machines_either(make_settings: MakeSettings) -> None:
    with pytest.raises(ValidationError, match=r"weights\.backend nccl: NCCL cannot have"):
        make_settings(**OVER_TWO_MACHINES | {"weights": {"backend": "nccl"}})


def test_a_run_begins_with_all_rollouts_that_share_gpus_of_several_machines(make_settings: MakeSettings) -> None:
    assert make_settings(**OVER_TWO_MACHINES).num_first_rollouts == 4
    assert make_settings(rollout={"num_replicas": 0, "sleep_mode": True}).num_first_rollouts == 1
    assert make_settings(rollout={"num_replicas": 2}).num_first_rollouts == 2
