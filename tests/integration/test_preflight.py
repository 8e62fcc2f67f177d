"""What would keep a run from starting is told by `rolecall check` and `rolecall train` before anything is started or
written.
"""

import io
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rolecall.commands.check import find_problems
from rolecall.commands.cli import main
from rolecall.settings import load_settings
from rolecall.v1 import controller_pb2, reward_pb2
from tests.contract.peer import Authority
from tests.ports import free_port
from tests.twins.launched import start_train, write_light_config


def get_run(request: bytes, context: Any) -> bytes:
    return controller_pb2.GetRunResponse(status=controller_pb2.RunStatus(run="other")).SerializeToString()


def describe(component: str, request: bytes, context: Any) -> bytes:
    if ("authorization", "Bearer right") not in context.invocation_metadata():
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
    spec = reward_pb2.DescribeResponse(name="scorer", components=[reward_pb2.ComponentSpec(name=component)])
    return spec.SerializeToString()


def serve(opened: ExitStack, credentials: grpc.ServerCredentials | None = None, component: str = "accuracy") -> str:
    """A server that is an actor by its health, the controller of `other`, and a scorer with a token."""
    described = partial(describe, component)
    server = grpc.server(ThreadPoolExecutor(2))
    known = health.HealthServicer()
    known.set("rolecall.v1.ActorService", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(known, server)
    for service, method, answer in (("ControllerService", "GetRun", get_run), ("RewardService", "Describe", described)):
        handler: Any = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"rolecall.v1.{service}", {method: handler}),)
        )
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    server.start()
    opened.callback(lambda: server.stop(0).wait())
    return f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the overrides below name."""
    folder = tmp_path_factory.mktemp("places")
    ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
    pair, other = ours.issue("scorer"), theirs.issue("scorer")
    for name, text in {"garbage": "no certificate\n", "empty": "\n", "wrong": "wrong\n", "right": "right\n"}.items():
        (folder / name).write_text(text)
    with ExitStack() as opened:
        web = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        opened.callback(web.server_close)
        opened.callback(web.shutdown)
        Thread(target=web.serve_forever, daemon=True).start()
        silent = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        credentials = grpc.ssl_server_credentials([(pair.key_file.read_bytes(), pair.certificate_file.read_bytes())])
        yield {
            "web": f"127.0.0.1:{web.server_port}",
            "silent": f"127.0.0.1:{silent.getsockname()[1]}",
            "roles": serve(opened),
            "scorer": serve(opened, credentials),
            "parts": serve(opened, credentials, "right"),
            "nobody": f"127.0.0.1:{free_port()}",
            "folder": str(folder),
            "ca": str(pair.ca_file),
            "theirs": str(theirs.ca_file),
            "pair": f"certificate_file: {pair.certificate_file}, key_file: {pair.key_file}",
            "torn": f"certificate_file: {pair.certificate_file}, key_file: {other.key_file}",
        }


SCORER = "reward.components={{c: {{scorer: {{kind: external, address: '{scorer}', %s}}}}}}"
FUNCTION = "reward.components={{c: {{scorer: {{kind: function, target: '%s'}}}}}}"
C = "reward.components.c.scorer"
LOCAL = {"actor": {}, "rollout": {"num_replicas": 1}}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("store.url=redis://{nobody}", "store.url: {nobody} cannot be reached (Connection refused); start the server"),
        ("controller.address={web}", "controller.address {web} is somebody else's: what listens there speaks no gRPC"),
        (
            "controller.address={silent}",
            "controller.address {silent} is somebody else's: what listens there speaks no gRPC",
        ),
        (
            "controller.address={roles}",
            "controller.address {roles} is the controller of the run 'other', not of 'light'; correct the address "
            "or run.name",
        ),
        (
            "actor.address={scorer}",
            "actor.address {scorer} is somebody else's: what listens there speaks no gRPC, or with other certificates",
        ),
        ("reward.address={web}", "reward.address {web} is somebody else's"),
        ("reward.address={roles}", "reward.address {roles} refuses the credentials"),
        (
            "reward.address=scorer.example:50051",
            "reward: scorer.example:50051 is beyond this machine and the connection has no TLS; set rpc.tls",
        ),
        (
            "controller.bind=0.0.0.0:45671",
            "refusing to listen on 0.0.0.0:45671 (controller.bind) without TLS; set rpc.tls",
        ),
        (SCORER % "ca_file: '{folder}/none'", f"{C}: ca_file: cannot read {{folder}}/none: No such file or directory"),
        (
            SCORER % "ca_file: '{folder}/garbage'",
            "ca_file: {folder}/garbage holds no certificate that can be read (NO_CERTIFICATE_OR_CRL_FOUND)",
        ),
        (
            SCORER % "ca_file: '{theirs}'",
            f"{C}.address {{scorer}} is somebody else's: what listens there speaks no gRPC, or with other certificates",
        ),
        (SCORER % "bearer_token_file: '{folder}/none'", f"{C}: bearer_token_file: cannot read {{folder}}/none"),
        (
            SCORER % "bearer_token_file: '{folder}/empty'",
            "bearer_token_file: {folder}/empty is empty; write the token into it",
        ),
        (
            SCORER % "ca_file: '{ca}', bearer_token_file: '{folder}/wrong'",
            f"{C}.address {{scorer}} refuses the credentials",
        ),
        (
            "rpc.tls={{{torn}, ca_file: '{ca}'}}",
            "are no certificate with its key (KEY_VALUES_MISMATCH); name two PEM files that belong together",
        ),
        (
            "rpc.tls={{{pair}, ca_file: '{folder}/garbage'}}",
            "rpc.tls.ca_file: {folder}/garbage holds no certificate that can be read",
        ),
        (FUNCTION % "absent_module:score", f"{C}.target 'absent_module:score': there is no module 'absent_module' in"),
        (
            FUNCTION % "my_rewards:scroe",
            f"{C}.target 'my_rewards:scroe': the module 'my_rewards' has no function 'scroe'; correct it",
        ),
        (
            FUNCTION % "broken:score",
            f"{C}.target 'broken:score' cannot be imported: ZeroDivisionError: division by zero; correct the module",
        ),
        ("rollout.num_replicas=5000", "the roles on CPUs need at least 6,2"),
        (
            "rollout.pipeline_parallel_size=1000",
            "rollout.tensor_parallel_size 1 x pipeline_parallel_size 1000: each worker of a replica needs a core",
        ),
        ("rollout.kv_cache_bytes=1000000000000000", "the roles on CPUs need at least 931,323."),
        ("actor.num_ranks=100000", "the roles on CPUs need at least "),
        ("store.max_bytes=1000000000000000", "store.max_bytes 931,322.6 GiB exceeds the "),
    ],
)
def test_what_cannot_start_is_told_by_check_and_train_and_leaves_no_run_dir(
    tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str], override: str, told: str
) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(item):\n    return 0.0\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    config = write_light_config(tmp_path)
    tree = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(tree | LOCAL if "on CPUs" in told else tree))
    settings = load_settings(config, [override.format(**places)])
    problems = find_problems(settings, io.StringIO())
    assert [problem for problem in problems if told.format(**places) in problem], problems
    assert main(["train", str(config), f"--{override.format(**places)}"]) == 2
    assert told.format(**places) in capsys.readouterr().err
    assert not settings.run.dir.exists()


def test_a_loss_that_needs_a_gpu_to_be_imported_finds_the_one_that_its_role_has(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import os\n\nGPUS = os.environ['CUDA_VISIBLE_DEVICES'].split(',')\nassert '1' in GPUS\n\n\ndef "
        "loss(batch): ...\n"
    )
    config = write_light_config(tmp_path)
    tree = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(tree | LOCAL))
    loss = "algorithm.policy_loss={kind: custom, function: 'kernels:loss'}"
    for devices, is_found in (([1], True), ([], False)):
        out = io.StringIO()
        problems = find_problems(load_settings(config, [loss, f"actor.devices={devices}"]), out)
        assert ("algorithm.policy_loss.function: kernels:loss is found" in out.getvalue()) == is_found, problems


def test_a_role_that_may_still_come_is_noted_and_waited_for(tmp_path: Path, places: dict[str, str]) -> None:
    out = io.StringIO()
    assert find_problems(load_settings(write_light_config(tmp_path), [f"actor.address={places['nobody']}"]), out) == []
    told = (
        f"NOTE actor.address {places['nobody']}: nobody listens there yet; the run waits for it, up to "
        "controller.start_timeout_s = 300 s\n"
    )
    assert told in out.getvalue()
    scorer = "reward.components={won: {scorer: {kind: environment}}}"
    game = f"environments={{game: {{address: '{places['nobody']}'}}}}"
    assert find_problems(load_settings(write_light_config(tmp_path), [game, scorer]), out) == []
    where = f"NOTE environments.game.address {places['nobody']}"
    assert f"{where}: nobody listens there yet; its prompts wait for it, others go on\n" in out.getvalue()


@pytest.mark.parametrize("kind", ["trl", "code"])
def test_a_scorer_over_http_is_asked_for_and_one_that_may_still_come_is_noted(
    tmp_path: Path, places: dict[str, str], kind: str
) -> None:
    config = write_light_config(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2 + 2", "tests": [{"output": "4"}]}\n')
    told = {}
    for name in ("web", "nobody"):
        out = io.StringIO()
        scorer = f"reward.components={{c: {{scorer: {{kind: {kind}, address: 'http://{places[name]}'}}}}}}"
        assert find_problems(load_settings(config, [scorer]), out) == []
        told[name] = out.getvalue()
    assert f"{C}.address http://{places['web']} answers\n" in told["web"]
    assert f"NOTE {C}.address http://{places['nobody']}: " in told["nobody"]
    assert "cannot be reached" in told["nobody"]


def test_what_is_there_is_told(tmp_path: Path, places: dict[str, str]) -> None:
    out = io.StringIO()
    scorer = SCORER % "ca_file: '{ca}', bearer_token_file: '{folder}/right'"
    overrides = [f"actor.address={places['roles']}", scorer.format(**places), "run.name=other"]
    assert find_problems(load_settings(write_light_config(tmp_path), overrides), out) == []
    assert {f"actor.address {places['roles']} answers", f"{C}.address {places['scorer']} answers"} < set(
        out.getvalue().splitlines()
    )


def test_a_reward_whose_components_are_called_as_metrics_is_told(tmp_path: Path, places: dict[str, str]) -> None:
    section = {"address": "{scorer}", "ca_file": "{ca}", "bearer_token_file": "{folder}/right", "components": "{{}}"}
    reward = [f"reward.{name}={value.format(**places)}" for name, value in section.items()]
    (told,) = find_problems(load_settings(write_light_config(tmp_path), reward), io.StringIO())
    assert told.startswith(f"reward.address {places['scorer']} declares the components ['accuracy'], and metrics of")


def test_a_filter_of_a_component_that_the_reward_does_not_have_is_told(tmp_path: Path, places: dict[str, str]) -> None:
    def told(component: str) -> list[str]:
        section = {"address": "{parts}", "ca_file": "{ca}", "bearer_token_file": "{folder}/right", "components": "{{}}"}
        reward = [f"reward.{name}={value.format(**places)}" for name, value in section.items()]
        filters = f"algorithm.filters={{without_signal: true, component: {component}}}"
        return find_problems(load_settings(write_light_config(tmp_path), [*reward, filters]), io.StringIO())

    assert told("right") == []
    (problem,) = told("left")
    assert "algorithm.filters.component 'left': the reward has no component of that name, it has ['right']" in problem


DESCRIPTIONS: dict[str, reward_pb2.DescribeResponse | None] = {
    "unknown": reward_pb2.DescribeResponse(
        name="scorer", reads=[reward_pb2.SCORE_FIELD_UNSPECIFIED]
    ),  # what grpc-js makes of a name that is none
    "gaps": reward_pb2.DescribeResponse(name="scorer"),
    "raises": None,
}


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ("unknown", "reads the fields [0], which this release does not know; name some of its ScoreField"),
        ("raises", "answers, and does not say what it is ("),
        ("gaps", "names no fields that it reads: it is sent ids, finish reasons and lengths, and no response; correct"),
    ],
)
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_scorer_that_a_run_cannot_begin_with_is_told_and_a_shadow_or_a_gap_is_noted(
    tmp_path: Path, described: str, told: str, weight: float
) -> None:
    def answer(request: bytes, context: Any) -> bytes:
        spec = DESCRIPTIONS[described]
        if spec is None:
            context.abort(grpc.StatusCode.UNKNOWN, "no such model")
        assert spec is not None
        return spec.SerializeToString()

    server = grpc.server(ThreadPoolExecutor(1))
    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    handlers = grpc.method_handlers_generic_handler("rolecall.v1.RewardService", {"Describe": handler})
    server.add_generic_rpc_handlers((handlers,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    scorer = f"{{scorer: {{kind: external, address: '{address}'}}, weight: {weight}}}"
    other = "{scorer: {kind: length, max_tokens: 8}}"
    out = io.StringIO()
    problems = find_problems(
        load_settings(write_light_config(tmp_path), [f"reward.components={{c: {scorer}, other: {other}}}"]), out
    )
    server.stop(0).wait()
    where = f"{C}.address {address}"
    if weight and described != "gaps":
        (problem,) = problems
        assert problem.startswith(f"{where} {told}")
    else:
        assert problems == []
        noted = told if described != "raises" else "it answers, and failed when it was asked ("
        (line,) = [line for line in out.getvalue().splitlines() if noted in line]
        assert line.startswith(f"NOTE {where}")


def test_another_role_at_an_address_is_told(tmp_path: Path, places: dict[str, str]) -> None:
    critic = ["critic.address=" + places["roles"], "algorithm.advantage={kind: gae}"]
    (told,) = find_problems(load_settings(write_light_config(tmp_path), critic), io.StringIO())
    assert told == f"critic.address {places['roles']} answers and is no rolecall.v1.CriticService; correct the address"


@pytest.fixture(scope="module", autouse=True)
def waiting(tmp_path_factory: pytest.TempPathFactory, places: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A run that waits for a controller while the tests here go on: it takes a while until it says so."""
    folder = tmp_path_factory.mktemp("waiting")
    train = start_train(write_light_config(folder), f"--controller.address={places['nobody']}")
    yield train
    train.kill()
    train.communicate(timeout=60)


def test_a_controller_that_nobody_serves_yet_is_noted_waited_for_and_told_of(
    places: dict[str, str], waiting: "subprocess.Popen[str]"
) -> None:
    address = places["nobody"]
    assert waiting.stdout is not None
    said: list[str] = []
    for line in waiting.stdout:  # the test's own timeout bounds it
        said.append(line)
        if line.startswith(f"no answer from the controller at {address} for "):
            break
    assert said[0].startswith("NOTE ")
    assert any(
        line.startswith(f"NOTE controller.address {address}: nobody listens there yet; the run waits for it")
        for line in said
    ), said
    assert said[-1].endswith("the roles here wait for it\n"), said
