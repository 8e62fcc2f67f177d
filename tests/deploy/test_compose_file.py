"""The Compose files, without an engine: what is committed is what `rolecall manifests` writes, what it names exists,
nobody has more than they need, and the run is valid.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.settings import load_settings
from tools.compose import ACCURACY, verdict

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "compose"
SOURCE = FOLDER / "runs" / "sort-digits.yaml"
ROLES = ("controller", "actor", "rollout", "reward")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """What `docker compose` makes of the example's two files."""
    tree: dict[str, Any] = merged(
        *(yaml.safe_load((FOLDER / name).read_text()) for name in ("compose.yaml", "compose.override.yaml"))
    )
    return tree


def merged(below: Any, above: Any) -> Any:
    """One tree over another as Compose lays them: sections are merged, lists appended."""
    if isinstance(below, list) and isinstance(above, list):
        return below + above
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: merged(below[key], value) if key in below else value for key, value in above.items()}


def written(folder: Path, **sections: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The services and the run's file that `rolecall manifests` makes of the example's run with other sections."""
    tree = yaml.safe_load(SOURCE.read_text())
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(merged(tree, sections)))
    assert main(["manifests", str(file), "--to", "compose", "--out", str(folder / "out")]) == 0
    made, run = (yaml.safe_load((folder / "out" / name).read_text()) for name in ("compose.yaml", "run.yaml"))
    return made["services"], run


def test_what_is_committed_is_what_the_command_writes(tmp_path: Path) -> None:
    assert main(["manifests", str(SOURCE), "--to", "compose", "--out", str(tmp_path)]) == 0
    for file in tmp_path.iterdir():
        assert file.read_text() == (FOLDER / file.name).read_text(), (
            "make it again: rolecall manifests runs/sort-digits.yaml --to compose --out ."
        )
    assert {file.name for file in tmp_path.iterdir()} == {"compose.yaml", "run.yaml"}


def test_the_profiles_of_the_example_are_what_the_command_writes_for_a_run_that_has_them(
    tmp_path: Path, compose: dict[str, Any]
) -> None:
    ppo = yaml.safe_load((FOLDER / "run.ppo.yaml").read_text())
    here = ("address", "bind")
    sections = {
        "critic": {key: value for key, value in ppo["critic"].items() if key not in here},
        "references": {"ref": {key: value for key, value in ppo["references"]["ref"].items() if key not in here}},
        "algorithm": ppo["algorithm"],
    }
    services, run = written(tmp_path, **sections)
    for role in ("critic", "reference"):
        of_example = {
            key: value for key, value in compose["services"][role].items() if key not in ("profiles", "build")
        }
        base = {"source": "base", "target": "/etc/rolecall/base.yaml"}
        of_example["configs"] = [config for config in of_example["configs"] if config != base]
        assert of_example == services[role]
    assert (run["critic"], run["references"]) == (ppo["critic"], ppo["references"])


def test_gpus_of_the_run_are_those_of_its_containers_and_its_own_numbers_begin_at_0(tmp_path: Path) -> None:
    services, run = written(tmp_path, actor={"devices": [0]}, rollout={"devices": [[1]]})
    for role, gpus in yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())["services"].items():
        assert gpus.items() <= services[role].items()
    own = yaml.safe_load((FOLDER / "run.gpu.yaml").read_text())
    assert (run["actor"]["devices"], run["rollout"]["devices"]) == (own["actor"]["devices"], own["rollout"]["devices"])


def test_replicas_ranks_references_and_ports_are_those_of_the_run(tmp_path: Path) -> None:
    services, run = written(
        tmp_path,
        run={"name": "other"},
        actor={"num_ranks": 2, "devices": [2, 3]},
        rollout={"num_replicas": 2, "devices": [[0], [1]]},
        references={"a": {}, "b": {}},
        algorithm={"distillation": {"teacher": "b"}, "kl": {"reference": "a", "kl_coef": 0.1}},
        weights={"ports": "29500-29599"},
        store={"max_bytes": 2**30},
    )
    given = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert given == {"actor": ["2", "3"], "rollout-0": ["0"], "rollout-1": ["1"]}
    assert {"--nproc-per-node=2", "services.actor"} <= set(services["actor"]["command"])
    assert services["actor"]["entrypoint"] == ["tini", "-e", "1", "-e", "2", "--"]
    assert {"--run", "other", "reference=reference-a", "reference=reference-b"} <= set(
        services["certificates"]["command"]
    )
    for name in ("a", "b"):
        assert run["references"][name]["address"] == f"dns:///reference-{name}:9003"
        assert services[f"reference-{name}"]["command"][-2:] == ["--name", name]
    assert services["rollout-1"]["sysctls"] == {"net.ipv4.ip_local_port_range": "29500 29599"}
    assert "--maxmemory 1024mb" in services["store"]["command"]
    (tmp_path / "cpu").mkdir()
    assert written(tmp_path / "cpu", rollout={"num_replicas": 3})[0]["rollout"]["scale"] == 3


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--run.name=Sort_Digits", "run.name 'Sort_Digits' names the project"),
        ("--model.path=/home/me/model", "model.path is /home/me/model, which a container does not see"),
        ("--data.preprocess={function: rows:row}", "data.preprocess.function is "),
        ("--actor.address=elsewhere:9001", "actor.address: the project has its own actor"),
        ("--rpc.behind_mesh=true", "rpc.behind_mesh: the roles of a Compose project have no sidecars"),
    ],
)
def test_a_run_that_the_containers_of_one_machine_could_not_hold_is_refused(
    override: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", str(SOURCE), "--to", "compose", "--out", str(tmp_path), override]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_actor_and_rollouts_take_turns_on_is_not_given_to_a_container_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["manifests", str(SOURCE), "--to", "compose", "--out", str(tmp_path)]
    assert main([*command, "--actor.devices=[0]", "--rollout.devices=[[0]]"]) == 2
    assert "run `rolecall train` on that machine, or give each role GPUs of its own" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_file_that_it_is_made_of_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SOURCE.read_text())
    assert main(["manifests", str(file), "--to", "compose", "--out", str(tmp_path)]) == 2
    assert "name another --out" in capsys.readouterr().err
    assert file.read_text() == SOURCE.read_text()


def test_every_service_is_confined(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "privileged" not in service, name
        assert "user" not in service, f"{name}: the image says who"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_who_computes_may_load_kernels_compiled_in_tmp_and_nobody_else(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        computes = name != "prepare" and any(
            role in service["image"] for role in ("rolecall-trainer", "rolecall-rollout")
        )
        assert service["tmpfs"] == ["/tmp:mode=1777,exec" if computes else "/tmp:mode=1777"], name


def test_every_volume_network_and_config_that_is_named_is_there(compose: dict[str, Any]) -> None:
    used: dict[str, set[str]] = {"volumes": set(), "networks": set(), "configs": set()}
    for service in compose["services"].values():
        used["volumes"] |= {volume.partition(":")[0] for volume in service.get("volumes", []) if volume[0] not in "./"}
        used["networks"] |= set(service.get("networks", []))
        used["configs"] |= {config["source"] for config in service.get("configs", [])}
    for kind, names in used.items():
        assert names == set(compose[kind]), kind
    for config in compose["configs"].values():
        assert (FOLDER / config["file"].removeprefix("${ROLECALL_RUN:-").removesuffix("}")).is_file()


def test_a_role_sees_its_own_certificate_and_the_reward_neither_store_nor_weights(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for role in ROLES:
        certificates = [volume for volume in services[role]["volumes"] if volume.startswith(("tls-", "authority"))]
        assert certificates == [f"tls-{role}:/run/rolecall/tls:ro"]
        users = [volume for volume in services[role]["volumes"] if volume.startswith("store-")]
        assert users == ([] if role == "reward" else [f"store-{role}:/run/rolecall/store:ro"])
        assert services[role]["restart"] == "on-failure"
        assert services[role]["healthcheck"]["test"][:4] == ["CMD", "rolecall", "health", role]
    assert services["reward"]["networks"] == ["control"]
    assert not services["reward"]["environment"]
    assert not any("store" in volume for volume in services["reward"]["volumes"])
    assert "weights" not in services["controller"]["networks"]
    assert compose["networks"]["data"]["internal"]
    assert compose["networks"]["weights"]["internal"]


def test_the_run_is_valid_and_over_mutual_tls(compose: dict[str, Any]) -> None:
    settings = load_settings(FOLDER / "run.yaml")
    assert settings.rpc.tls is not None
    assert not settings.rpc.behind_mesh
    assert settings.store.url is None, "no password in a file that is committed"
    command = compose["services"]["store"]["command"]
    assert {"--appendfsync always", "--maxmemory-policy noeviction"} <= set(command)
    (memory,) = (word for word in command if word.startswith("--maxmemory "))
    assert int(memory.split()[1].removesuffix("mb")) * 2**20 >= settings.store.max_bytes


@pytest.mark.parametrize(
    ("rows", "code", "told"),
    [
        ([], 1, "evaluated nothing. In deploy/compose, `docker compose ps --all` says"),
        ([{"step": 1, "loss": 0.1}], 1, "evaluated nothing"),
        ([{"step": 0, ACCURACY: 0.99}, {"step": 20, ACCURACY: 0.9}], 1, "0.900 after 20 steps, which is below 0.95"),
        ([{"step": 0, ACCURACY: 0.01}, {"step": 20, ACCURACY: 0.974}], 0, "Held-out accuracy 0.974 after 20 steps."),
    ],
)
def test_the_end_of_the_example_is_told_in_a_sentence(rows: list[dict[str, float]], code: int, told: str) -> None:
    ended, said = verdict(rows)
    assert ended == code
    assert told in said
