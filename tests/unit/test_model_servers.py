"""Servers of judges that a run starts: what the file may say of them, where they listen, what vLLM is started with, and
that one that hangs is noticed.
"""

import asyncio
import io
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rolecall.commands.check import check
from rolecall.commands.cli import main
from rolecall.errors import ConfigError
from rolecall.launcher import joining, probes
from rolecall.launcher.placed import load_unplaced, note_placed
from rolecall.launcher.plan import plan_workers, resolve, write_config
from rolecall.launcher.probes import Probes
from rolecall.launcher.processes import Start, Worker
from rolecall.settings import ControllerSection, ExternalScorer, load_settings
from services.model_server.config import configure, start_environment
from services.reward.config import reward_settings
from services.reward_model.config import config_of_server
from tests.conftest import MakeSettings
from tests.smallest import judged
from tests.twins.launched import write_light_config, write_model

RUBRIC = judged()["components"]["verdict"]["scorer"]["rubric"]
ADDRESS = {"address": "http://127.0.0.1:1/v1"}


def asked(**scorer: Any) -> dict[str, Any]:
    """The section `reward` of `judged`, its scorer with these keys."""
    reward = judged()
    reward["components"]["verdict"]["scorer"] |= scorer
    return reward


def test_the_launcher_starts_it_and_the_judge_asks_it_by_its_name(make_settings: MakeSettings) -> None:
    configured = make_settings(reward=judged(devices=[3]))
    resolved = resolve(configured)
    workers = {worker.name: worker for worker in plan_workers(configured, resolved, lambda role: "unix:///store")}
    grader = workers["grader"]
    assert grader.command[3:] == ("services.model_server", str(resolved.run.dir / "config.yaml"), "--name", "grader")
    assert (grader.environment["CUDA_VISIBLE_DEVICES"], grader.environment["ROLECALL_STORE_URL"]) == ("3", "")
    address = resolved.reward.servers["grader"].address
    assert address is not None
    assert address.startswith("127.0.0.1:")
    assert address not in (resolved.reward.address, resolved.controller.address, resolved.actor.address)
    scorer = reward_settings(resolved).external["verdict"]
    assert scorer.address == f"http://{address}/v1"
    assert isinstance(scorer, ExternalScorer)
    assert scorer.asked.model == "grader"
    named = resolve(make_settings(reward=asked(rubric={**RUBRIC, "model": "Qwen/Qwen3-30B-A3B"})))
    assert configure(named, "grader").model_names == ("grader", "Qwen/Qwen3-30B-A3B")
    scorer = reward_settings(named).external["verdict"]
    assert isinstance(scorer, ExternalScorer)
    assert scorer.asked.model == "Qwen/Qwen3-30B-A3B", "one that somebody else started may know no other name"


def test_one_that_is_started_elsewhere_is_called_where_it_is(make_settings: MakeSettings) -> None:
    configured = make_settings(reward=judged(address="127.0.0.1:7"))
    resolved = resolve(configured)
    assert "grader" not in [worker.name for worker in plan_workers(configured, resolved, lambda role: "unix:///store")]
    assert reward_settings(resolved).external["verdict"].address == "http://127.0.0.1:7/v1"
    with pytest.raises(ConfigError, match=r"reward\.servers\.grader has no address: `rolecall train` starts it"):
        reward_settings(make_settings(reward=judged()))


def test_where_it_was_placed_is_left_out_when_the_run_is_started_again(tmp_path: Path) -> None:
    file = write_light_config(tmp_path)
    tree = yaml.safe_load(file.read_text()) | {"reward": judged()}
    file.write_text(yaml.safe_dump(tree))
    configured = load_settings(file)
    configured.run.dir.mkdir()
    resolved = resolve(configured)
    note_placed(configured, resolved)
    written = write_config(resolved)
    assert load_settings(written).reward.servers["grader"].address == resolved.reward.servers["grader"].address
    assert load_unplaced(written, [], None, io.StringIO()).reward.servers["grader"].address is None


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"reward": asked(**ADDRESS)}, "server: it has the address; remove one of the two"),
        ({"reward": asked(server=None)}, "address: judge needs one, or a server of the run"),
        (
            {"reward": asked(kind="trl", rubric=None)},
            "server: the run starts those of judges and external scorers alone",
        ),
        ({"reward": asked(bearer_token_file="t")}, "remove ca_file and bearer_token_file"),
        ({"reward": asked(server="other")}, r"server 'other' is not under servers \(\['grader'\]\)"),
        ({"reward": asked(server=None, **ADDRESS)}, "rubric: model is missing"),
        (
            {"reward": asked(server=None, **ADDRESS, rubric={**RUBRIC, "model": "m"})},
            r"servers\.grader is named by no scorer",
        ),
        ({"reward": judged(devices=[0, 1])}, "devices names 2 GPUs, tensor_parallel_size is 1"),
        (
            {"reward": judged(engine={"served_model_name": "x"})},
            r"served_model_name: it follows from rubric\.model",
        ),
        ({"reward": judged(engine={"nnodes": 2})}, "nnodes: a server is one vLLM on one machine"),
        ({"reward": judged(bind="0.0.0.0:8000")}, r"reward\.servers\.grader\.bind 0\.0\.0\.0:8000 is beyond this"),
        (
            {"reward": judged(devices=[0]), "actor": {"devices": [0]}},
            r"GPU 0 is given to actor and to reward\.servers\.grader",
        ),
        (
            {"reward": judged(devices=[0]), "actor": {"devices": [0]}, "rollout": {"devices": [[0]]}},
            r"GPU 0 is given to actor and to reward\.servers\.grader",
        ),
        (
            {"reward": judged(devices=[1]), "rollout": {"devices": [[1]]}},
            r"GPU 1 is given to reward\.servers\.grader and to rollout\.devices\[0\]",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_in_words(make_settings: MakeSettings, sections: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        make_settings(**sections)


def preferring(scorer: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A section `reward` whose external scorer asks a reward model with these keys."""
    asking = {"kind": "external", "server": "grader", **(scorer or {})}
    return {
        "servers": {"grader": {"reward_model": {"path": "/models/grader", **keys}}},
        "components": {"liked": {"scorer": asking}},
    }


def test_a_reward_model_of_the_run_is_what_stands_in_its_file(make_settings: MakeSettings, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "devices": [2, 3],
        "num_ranks": 2,
        "bind": "127.0.0.1:50071",
        "process": {"separator": "<s>"},
    }
    configured = make_settings(reward=preferring(**keys))
    resolved = resolve(configured)
    address = resolved.reward.servers["grader"].address
    workers = {worker.name: worker for worker in plan_workers(configured, resolved, lambda role: "unix:///store")}
    grader, config = workers["grader"], str(resolved.run.dir / "config.yaml")
    assert grader.command[-4:] == ("services.reward_model", config, "--name", "grader")
    assert "--nproc-per-node=2" in grader.command
    assert (grader.environment["CUDA_VISIBLE_DEVICES"], grader.environment["ROLECALL_STORE_URL"]) == ("2,3", "")
    assert reward_settings(resolved).external["liked"].address == address
    resolved.run.dir.mkdir()
    there = config_of_server(load_settings(write_config(resolved)), "grader")
    assert (there.bind, there.name, there.num_ranks) == (address, "grader", 2), "two runs would listen at one place"
    with pytest.raises(ConfigError, match="grader is a reward model; `rolecall serve reward-model` starts it"):
        configure(resolved, "grader")
    with pytest.raises(ConfigError, match=r"reward\.servers\.liked is no reward model"):
        config_of_server(resolved, "liked")


def test_the_file_of_a_reward_model_may_lie_elsewhere(make_settings: MakeSettings, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "grader.yaml").write_text("{path: weights, dtype: float32}")
    reward = preferring()
    reward["servers"]["grader"]["reward_model"] = "models/grader.yaml"
    assert make_settings(reward=reward).reward.servers["grader"].path == tmp_path / "models" / "weights"
    reward["servers"]["grader"]["reward_model"] = "models/absent.yaml"
    with pytest.raises(ValidationError, match=r"models/absent\.yaml"):
        make_settings(reward=reward)
    assert make_settings(reward=preferring(path="near")).reward.servers["grader"].path == tmp_path / "near"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"devices": [0]}, r"GPU 0 is given to actor and to reward\.servers\.grader"),
        ({"rpc": {"behind_mesh": 3}}, r"rpc: behind_mesh: Input should be a valid boolean"),
        ({"bearer_token_file": "token"}, "rpc.tls or bearer_token_file, and a run calls its servers on loopback"),
        ({"scorer": {"kind": "judge", "rubric": RUBRIC}}, "what judge asks is a server with a model"),
    ],
)
def test_what_contradicts_a_reward_model_is_refused(
    make_settings: MakeSettings, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        make_settings(reward=preferring(**changed), actor={"devices": [0]})


def test_a_server_serves_one_model(make_settings: MakeSettings) -> None:
    reward = preferring()
    for server, told in [
        ({"model": "model", **reward["servers"]["grader"]}, "model or reward_model: a server has one of them"),
        ({}, "model or reward_model: a server has one of them"),
        ({"devices": [1], **reward["servers"]["grader"]}, "devices: it is of a judge's model; say it under"),
        ({"model": "model"}, "what external asks is a server with a reward_model"),
    ]:
        with pytest.raises(ValidationError, match=told):
            make_settings(reward={**reward, "servers": {"grader": server}})


@pytest.mark.parametrize("name", ["actor", "rollout-0", "a b", "ref"])
def test_its_name_is_no_other_process_s(make_settings: MakeSettings, name: str) -> None:
    reward = asked(server=name)
    reward["servers"] = {name: reward["servers"]["grader"]}
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    with pytest.raises(ValidationError, match=r"reward\.servers"):
        make_settings(reward=reward, algorithm=kl, references={"ref": {}})


def test_behind_a_mesh_it_may_listen_for_others(make_settings: MakeSettings) -> None:
    settings = make_settings(reward=judged(bind="0.0.0.0:8000"), rpc={"behind_mesh": True})
    config = configure(settings, "grader")
    assert (config.host, config.port) == ("0.0.0.0", 8000)


def test_its_model_is_part_of_what_the_start_waits_for(make_settings: MakeSettings, tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(60 * 10**9)
    judge = make_settings(reward=judged(model=str(tmp_path)))
    assert judge.controller.start_timeout_s == 900
    assert make_settings(reward=judged(model=str(tmp_path), devices=[0])).controller.start_timeout_s == 1500


def test_what_vllm_is_started_with_follows_from_the_section(make_settings: MakeSettings) -> None:
    def started(**server: Any) -> tuple[dict[str, Any], dict[str, str]]:
        config = configure(make_settings(reward=judged(**{"bind": "127.0.0.1:8000", **server})), "grader")
        return config.engine, start_environment(config)

    engine, environment = started()
    assert (engine["enforce_eager"], engine["kv_cache_memory_bytes"]) == (True, 2**30)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    engine, environment = started(devices=[2, 5], tensor_parallel_size=2, engine={"max_model_len": 4096})
    assert "enforce_eager" not in engine
    assert (engine["tensor_parallel_size"], engine["max_model_len"]) == (2, 4096)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,5"
    with pytest.raises(ConfigError, match=r"there is no reward\.servers\.judge; --name takes one of grader"):
        configure(make_settings(reward=judged()), "judge")


def findings(folder: Path, server: dict[str, Any], *overrides: str) -> tuple[int, str]:
    """What `rolecall check` says of a run whose server has these keys."""
    reward = judged(**{"model": str(folder / "model"), **server})
    written = [f"reward.{key}={json.dumps(value)}" for key, value in reward.items()]
    out = io.StringIO()
    return check(load_settings(write_light_config(folder), [*written, *overrides]), out), out.getvalue()


def test_check_says_what_it_takes_and_where_it_listens(tmp_path: Path) -> None:
    code, text = findings(tmp_path, {})
    assert code == 0, text
    assert (
        f"reward.servers.grader: {tmp_path}/model, Qwen3ForCausalLM, 0.01M parameters, on CPUs, 0.0 MiB of weights per "
        "worker; asked by verdict with up to 64 calls at a time; listens on a free port of 127.0.0.1"
    ) in text
    assert "reward.components.verdict" not in text, "nobody is asked yet"


def test_check_refuses_what_would_fail_minutes_later(tmp_path: Path) -> None:
    def told(server: dict[str, Any], *overrides: str) -> str:
        code, text = findings(tmp_path, server, *overrides)
        assert code == 2
        return text

    assert "reward.servers.grader.model must be a Hugging Face model directory, and there is no /nowhere" in told(
        {"model": "/nowhere"}
    )
    assert "reward.servers.grader.engine.max_model_length is no argument of the installed vLLM" in told(
        {"engine": {"max_model_length": 5}}
    )
    assert "reward.servers.grader names GPU 77; this machine has" in told({"devices": [77]})
    assert "reward.servers.grader is started by `rolecall train`, for the reward service that it starts, too" in told(
        {}, "reward.address=127.0.0.1:1"
    )
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        bind = f"127.0.0.1:{busy.getsockname()[1]}"
        assert f"reward.servers.grader.bind {bind} is in use" in told({"bind": bind})
    plain = write_model(tmp_path / "plain")
    config = json.loads((plain / "tokenizer_config.json").read_text())
    (plain / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    assert f"reward.servers.grader.model: the tokenizer of {plain} has no chat template" in told({"model": str(plain)})


@pytest.mark.parametrize("to", ["compose", "kubernetes", "slurm"])
def test_manifests_place_none_and_say_what_to_do(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_light_config(tmp_path)
    light = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({key: light[key] for key in light.keys() - {"actor"}} | {"reward": judged()}))
    assert main(["manifests", str(file), "--to", to, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "reward.servers.grader is started by `rolecall train` alone, on its machine" in said
    assert "name its address in the scorer, in place of server" in said


def test_it_is_no_member_that_is_waited_for() -> None:
    with subprocess.Popen(["true"]) as process:
        start = Start(Worker("model_server", "grader", (), {}, Path("/dev/null")), 0, "incarnation", process, 0.0)
        lost = joining.Joining(ControllerSection(start_timeout_s=0.001)).judge([], {"grader": start}, 0.0, ())
        assert list(lost) == []


async def test_one_that_falls_silent_is_condemned_and_one_that_answers_is_not(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "SERVER_PROBE_S", 0.05)
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(probes, "MAX_SERVER_SILENCE_S", 1.0)
    answered, silent, condemned = asyncio.Event(), False, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if silent:
            await reader.read()  # until the asker leaves
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            answered.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = make_settings(reward=judged(address=address))
    told: list[str] = []

    def condemn(name: str, verdict: str) -> None:
        told.append(verdict)
        condemned.set()

    asked = Probes(settings, condemn)
    process = subprocess.Popen([sys.executable, "-c", ""])
    asked.ask_model_server(
        Start(Worker("model_server", "grader", (), {}, Path("/dev/null")), 0, "incarnation", process, 0.0)
    )
    probing = asked.tasks
    try:
        async with asyncio.timeout(60):
            await answered.wait()
            assert not condemned.is_set()
            silent = True
            await condemned.wait()
    finally:
        asked.end("grader")
        await asyncio.gather(*probing, return_exceptions=True)
        server.close()
        await server.wait_closed()
        process.wait(30)
    assert told == ["grader did not answer for 1 s and was killed"]
