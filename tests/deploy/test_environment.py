"""The environment in what `rolecall manifests` writes: the ways between it and the rollouts, by each kind of address,
and the names by which they prove who they are.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from rolecall.commands.cli import main
from rolecall.settings import load_settings
from tests.deploy.kubernetes_objects import ROOT, Object, of_kind, problems

COMPOSE = ROOT.parent / "compose" / "runs" / "sort-digits.yaml"
BESIDE = [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "environment-game"}}}]
ARCADE = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "arcade"}}}]
OF_ROLLOUTS = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["rollout"]}
AGENTS = "--rollout.endpoint_bind=0.0.0.0:50090"


def made(folder: Path, *words: str) -> tuple[list[Object], dict[str, Any]]:
    """The objects of the base's run with an environment, and its file."""
    command = ["manifests", str(ROOT / "runs" / "base.yaml"), "--to", "kubernetes", "--out", str(folder)]
    assert main([*command, *words]) == 0
    texts = [path.read_text() for path in sorted(folder.rglob("*.yaml")) if path.name != "run.yaml"]
    objects = [object for text in texts for object in yaml.safe_load_all(text) if "apiVersion" in object]
    return objects, yaml.safe_load((folder / "run.yaml").read_text())


def ways(objects: list[Object], name: str, way: str, port: int) -> list[Any]:
    """Who is at the other end of what a NetworkPolicy opens on a port."""
    rules = of_kind(objects, "NetworkPolicy")[name]["spec"][way]
    side = "from" if way == "ingress" else "to"
    return [peer for rule in rules if {"port": port, "protocol": "TCP"} in rule["ports"] for peer in rule[side]]


@pytest.mark.parametrize(
    ("address", "peers", "is_beside"),
    [
        ("games:50080", BESIDE, True),
        ("dns:///games.sort-digits.svc.cluster.local:50080", BESIDE, True),
        ("games.arcade.svc:50080", ARCADE, False),
        ("10.1.2.3:50080", [{"ipBlock": {"cidr": "10.1.2.3/32"}}], False),
        ("[fd00::1]:50080", [{"ipBlock": {"cidr": "fd00::1/128"}}], False),
        ("games.example:50080", [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}], False),
    ],
)  # fmt: skip
def test_rollouts_alone_reach_the_environment_wherever_it_is(
    tmp_path: Path, address: str, peers: list[Any], is_beside: bool
) -> None:
    objects, run = made(
        tmp_path, f"--environments.game.address='{address}'", "--environments.game.ca_file=/data/ca.crt"
    )
    assert ways(objects, "rollout", "egress", 50080) == peers
    assert ways(objects, "rollout", "ingress", 50090) == []
    policies = of_kind(objects, "NetworkPolicy")
    assert [name for name in policies if ways(objects, name, "egress", 50080)] == ["rollout"]
    assert ("environment-game" in policies) == is_beside == ("environment-game" in of_kind(objects, "ServiceAccount"))
    assert "environment-game" not in of_kind(objects, "Certificate"), "it has roots of its own"
    assert run["environments"]["game"]["address"] == address
    assert of_kind(objects, "Deployment")["rollout"]


def test_agents_beside_the_run_call_a_rollout_by_a_name_that_its_certificate_has(tmp_path: Path) -> None:
    objects, _ = made(tmp_path, "--environments.game.address=games:50080", AGENTS)
    rollout = [{"podSelector": {"matchExpressions": [OF_ROLLOUTS]}}]
    assert ways(objects, "rollout", "ingress", 50090) == BESIDE
    assert (
        ways(objects, "environment-game", "egress", 50090)
        == rollout
        == ways(objects, "environment-game", "ingress", 50080)
    )
    certificates = of_kind(objects, "Certificate")
    assert certificates["environment-game"]["spec"]["dnsNames"] == ["games", "localhost"]
    assert "uris" not in certificates["environment-game"]["spec"], "by which it would be a caller"
    assert "*.rollout.sort-digits.svc.cluster.local" in certificates["rollout"]["spec"]["dnsNames"]
    container = of_kind(objects, "StatefulSet")["rollout"]["spec"]["template"]["spec"]["containers"][0]
    assert "--rollout.advertise_host=$(POD_NAME).rollout.sort-digits.svc.cluster.local" in container["args"]
    ports = of_kind(objects, "Service")["rollout"]["spec"]["ports"]
    assert ports[1] == {"name": "agents", "port": 50090, "appProtocol": "https"}
    assert [
        problem
        for object in objects
        if not object["kind"].startswith(("Kusto", "Comp"))
        for problem in problems(object)
    ] == []


def test_a_mesh_carries_both_ways_and_knows_who_may_go_them(tmp_path: Path) -> None:
    words = ("--environments.game.address=games:50080", AGENTS, "--rpc.behind_mesh=true")
    objects, _ = made(tmp_path, *words)
    allowed = of_kind(objects, "AuthorizationPolicy")
    for name, caller, port, path in (
        ("environment-game", "rollout", "50080", "/rolecall.v1.EnvironmentService/*"),
        ("agents", "environment-game", "50090", "/v1/*"),
    ):
        (rule,) = allowed[name]["spec"]["rules"]
        assert rule["from"][0]["source"]["principals"] == [f"cluster.local/ns/sort-digits/sa/{caller}"]
        assert rule["to"][0]["operation"] == {"ports": [port], "paths": [path]}
    annotations = of_kind(objects, "AnnotationsTransformer")["istio"]["annotations"]
    for way in ("Inbound", "Outbound"):
        assert annotations[f"traffic.sidecar.istio.io/include{way}Ports"] == "50051,50080,50090"
    routes = of_kind(objects, "VirtualService")
    for host, ports in (("games", [None]), ("rollout", [50051, 50090])):
        ways_of = routes[host]["spec"]["http"]
        assert [way["route"][0]["destination"].get("port", {}).get("number") for way in ways_of] == ports
        assert all((way["timeout"], way["retries"]) == ("0s", {"attempts": 0}) for way in ways_of)
    assert of_kind(objects, "Service")["rollout"]["spec"]["ports"][1]["appProtocol"] == "http"


def test_roots_and_token_of_one_elsewhere_are_a_secret_that_rollouts_alone_mount(tmp_path: Path) -> None:
    folder = "/run/rolecall/environment"
    files = (f"--environments.game.ca_file={folder}/ca.crt", f"--environments.game.bearer_token_file={folder}/token")
    objects, _ = made(tmp_path, "--environments.game.address=games.example:443", *files)
    (pod,) = (
        object["spec"]["template"]["spec"] for object in objects if "secretName: environment" in yaml.safe_dump(object)
    )
    assert pod["serviceAccountName"] == "rollout"
    assert {"name": "environment", "mountPath": folder, "readOnly": True} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--environments.game.address=127.0.0.1:50080"],
            "is each rollout's own there; name the environment's service",
        ),
        (["--environments.game.address=games:50080", "--rollout.endpoint_bind=0.0.0.0:0"], "by its port; name one"),
        (
            ["--environments.game.address=games:1", "--environments.game.ca_file=/me/ca.crt"],
            "environments.game.ca_file is /me/ca.crt",
        ),
    ],
)
@pytest.mark.parametrize("place", ["kubernetes", "compose"])
def test_an_environment_that_no_container_reaches_is_refused(
    place: str, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = COMPOSE if place == "compose" else ROOT / "runs" / "base.yaml"
    assert main(["manifests", str(file), "--to", place, "--out", str(tmp_path), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_project_has_a_certificate_for_the_environment_in_it_and_a_name_for_its_agents(tmp_path: Path) -> None:
    command = ["manifests", str(COMPOSE), "--to", "compose", "--out"]
    words = ["--environments.game.address=games:9010", "--rollout.endpoint_bind=0.0.0.0:9011"]
    assert main([*command, str(tmp_path / "inside"), *words]) == 0
    project = yaml.safe_load((tmp_path / "inside" / "compose.yaml").read_text())
    certificates = project["services"]["certificates"]
    assert "tls-environment-game" in project["volumes"]
    assert "tls-environment-game:/run/rolecall/certificates/environment-game" in certificates["volumes"]
    words_of = [word.replace("/run/rolecall/certificates", str(tmp_path / "tls")) for word in certificates["command"]]
    assert main(words_of) == 0
    assert names(tmp_path / "tls" / "environment-game") == (["games"], [])
    settings = load_settings(tmp_path / "inside" / "run.yaml")
    assert settings.rollout.advertise_host == "rollout"
    assert "rollout" in names(tmp_path / "tls" / "rollout")[0]
    assert main([*command, str(tmp_path / "outside"), "--environments.game.address=games.example:443",
                 "--environments.game.ca_file=system"]) == 0  # fmt: skip
    assert "tls-environment" not in (tmp_path / "outside" / "compose.yaml").read_text()


def names(folder: Path) -> tuple[list[str], list[str]]:
    """The hosts and the URIs of a certificate."""
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return alternatives.get_values_for_type(x509.DNSName), alternatives.get_values_for_type(
        x509.UniformResourceIdentifier
    )


def test_agents_of_several_rollouts_in_one_project_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--environments.game.address=games:9010",
        "--rollout.endpoint_bind=0.0.0.0:9011",
        "--rollout.num_replicas=2",
    ]
    assert main(["manifests", str(COMPOSE), "--to", "compose", "--out", str(tmp_path), *words]) == 2
    assert "the containers of 2 share one" in capsys.readouterr().err


SEVERAL = [
    "--environments.game={address: 'games:50080', when: {task: game}}",
    "--environments.tools={address: 'tools:50081', when: {task: tools}}",
    "--environments.hard={address: 'games:50080', when: {task: hard}}",
    "--environments.long={address: 'games:50082', when: {task: long}}",
    "--environments.web={address: 'web.example:443', ca_file: system, when: {task: web}}",
]


def test_each_environment_has_a_way_and_a_certificate_of_its_own_and_one_host_has_one(tmp_path: Path) -> None:
    objects, _ = made(tmp_path, *SEVERAL, AGENTS)
    beside = {"environment-game": ("games", [50080, 50082]), "environment-tools": ("tools", [50081])}
    certificates, accounts = of_kind(objects, "Certificate"), of_kind(objects, "ServiceAccount")
    rollouts = [{"podSelector": {"matchExpressions": [OF_ROLLOUTS]}}]
    for name, (host, ports) in beside.items():
        peer = [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": name}}}]
        for port in ports:
            assert ways(objects, "rollout", "egress", port) == peer
            assert ways(objects, name, "ingress", port) == rollouts == ways(objects, name, "egress", 50090)
        assert certificates[name]["spec"]["dnsNames"] == [host, "localhost"]
        assert name in accounts
    named = [name for kind in (certificates, accounts) for name in kind if name.startswith("environment")]
    assert sorted(set(named)) == sorted(beside), "those on one host are of one pod; one elsewhere has its own"
    callers = ways(objects, "rollout", "ingress", 50090)
    assert {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "environment-tools"}}} in callers
    assert not [
        problem
        for object in objects
        if not object["kind"].startswith(("Kusto", "Comp"))
        for problem in problems(object)
    ]


def test_a_mesh_knows_each_environment(tmp_path: Path) -> None:
    objects, _ = made(tmp_path, *SEVERAL, AGENTS, "--rpc.behind_mesh=true")
    allowed, routes = of_kind(objects, "AuthorizationPolicy"), of_kind(objects, "VirtualService")
    for name, ports in (("environment-game", ["50080", "50082"]), ("environment-tools", ["50081"])):
        (rule,) = allowed[name]["spec"]["rules"]
        assert rule["to"][0]["operation"] == {"ports": ports, "paths": ["/rolecall.v1.EnvironmentService/*"]}
    principals = allowed["agents"]["spec"]["rules"][0]["from"][0]["source"]["principals"]
    assert {name.rpartition("/")[2] for name in principals} >= {"environment-game", "environment-tools"}
    assert {"games", "tools"} <= routes.keys()
    annotations = of_kind(objects, "AnnotationsTransformer")["istio"]["annotations"]
    assert annotations["traffic.sidecar.istio.io/includeOutboundPorts"] == "50051,50080,50082,50081,50090"


def test_what_an_environment_encrypts_itself_stays_out_of_the_mesh(tmp_path: Path) -> None:
    own = "--environments.long.ca_file=/data/ca.crt"
    objects, _ = made(tmp_path, *SEVERAL, own, "--rpc.behind_mesh=true")
    (rule,) = of_kind(objects, "AuthorizationPolicy")["environment-game"]["spec"]["rules"]
    assert rule["to"][0]["operation"]["ports"] == ["50080"]
    annotations = of_kind(objects, "AnnotationsTransformer")["istio"]["annotations"]
    assert annotations["traffic.sidecar.istio.io/includeOutboundPorts"] == "50051,50080,50081"
    assert ways(objects, "environment-game", "ingress", 50082)


def test_a_project_has_a_certificate_for_each_environment_in_it(tmp_path: Path) -> None:
    assert main(["manifests", str(COMPOSE), "--to", "compose", "--out", str(tmp_path), *SEVERAL]) == 0
    project = yaml.safe_load((tmp_path / "compose.yaml").read_text())
    certificates = project["services"]["certificates"]
    hosts = [word for word in certificates["command"] if word.startswith("environment")]
    assert hosts == ["environment-game=games", "environment-tools=tools"]
    for name in ("environment-game", "environment-tools"):
        assert f"tls-{name}" in project["volumes"]
        assert f"tls-{name}:/run/rolecall/certificates/{name}" in certificates["volumes"]
