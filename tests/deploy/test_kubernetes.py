"""deploy/kubernetes: what is committed is what `rolecall manifests` writes, a cluster takes it, and it keeps our rules.

Nothing here needs a cluster. What needs kustomize is skipped where neither it nor kubectl is.
"""

import copy
import re
import shlex
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.manifests.completed import PORTS, RANKS_PORT
from rolecall.manifests.policies import STORE_PORT
from rolecall.rpc.callers import PUBLIC, Caller, rules
from rolecall.settings import load_settings
from tests.deploy.kubernetes_objects import COMPONENT, ROOT, Object, builder, built, files, of_kind, pods_of, problems

BASES = sorted(file.stem for file in (ROOT / "runs").iterdir())
OVERLAYS = sorted(f"overlays/{folder.name}" for folder in (ROOT / "overlays").iterdir())
COMPONENTS = ["base-gpu/gpu-nvidia", *sorted(f"components/{folder.name}" for folder in (ROOT / "components").iterdir())]
"""Of base-gpu, which has every kind of role that they patch."""
ONE_OF = [{"components/hpa", "components/keda"}, {"components/prometheus", "components/prometheus-istio"}]
"""Components that would both do the same."""
SCALERS = {"components/hpa": "HorizontalPodAutoscaler", "components/keda": "ScaledObject"}

needs_kustomize = pytest.mark.skipif(
    builder() is None, reason="needs kustomize or kubectl (Debian: kustomize, of trixie)"
)


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("base", BASES)
def test_what_is_committed_is_what_the_command_writes(base: str, tmp_path: Path) -> None:
    assert main(["manifests", str(ROOT / "runs" / f"{base}.yaml"), "--to", "kubernetes", "--out", str(tmp_path)]) == 0
    assert written(tmp_path) == written(ROOT / base), f"make it again: rolecall manifests runs/{base}.yaml ..."


def test_what_lies_in_the_folder_and_is_of_another_run_is_not_written_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "critic.yaml").touch()
    command = ["manifests", str(ROOT / "runs" / "base.yaml"), "--to", "kubernetes", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "critic.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--run.name=Sort_Digits", "run.name 'Sort_Digits' names objects of Kubernetes"),
        *(
            (f"--run.name='{name}'", f"run.name '{name}' names objects of Kubernetes, whose YAML takes it for a number")
            for name in ("2026", "1e5", "08", "0o17", "0x1f", "2026-11-28", "on", "null", "y")
        ),
        ("--model.path=/home/me/model", "model.path is /home/me/model, which a container does not see"),
        (
            "--data.preprocess={function: /home/me/code/rows:row}",
            "data.preprocess.function is /home/me/code, which a container does not see",
        ),
        ("--weights.ports=x", "weights.ports"),
        ("--actor.devices=[0,1,2]", "actor.num_ranks is 2, and actor.devices has 3 GPUs, on each of its machines"),
        ("--rollout.sleep_mode=true", "rollout.sleep_mode: each pod has GPUs of its own"),
        (
            "--controller.stall_timeout_s=600",
            "controller.stall_timeout_s is 600, and a role that failed may be back after",
        ),
    ],
)
def test_a_run_that_no_cluster_could_hold_is_refused(
    override: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["manifests", str(ROOT / "runs" / "base.yaml"), "--to", "kubernetes", "--out", str(tmp_path), override]
    assert main(command) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bind", "written_bind", "ports"),
    [
        ("127.0.0.1:9464", "0.0.0.0:9464", [50051, 9464]),
        ("0.0.0.0:9000", "0.0.0.0:9464", [50051, 9464]),
        ("null", None, [50051]),
    ],
)
def test_numbers_are_shown_where_the_cluster_looks_for_them_or_nowhere(
    bind: str, written_bind: str | None, ports: list[int], tmp_path: Path
) -> None:
    """Whatever the file says for one machine."""
    command = ["manifests", str(ROOT / "runs" / "base.yaml"), "--to", "kubernetes", "--out", str(tmp_path)]
    assert main([*command, f"--telemetry.metrics_bind={bind}"]) == 0
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["telemetry"] == {"metrics_bind": written_bind}
    (reward,) = yaml.safe_load_all((tmp_path / "reward.yaml").read_text())
    assert problems(reward) == []
    (container,) = reward["spec"]["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == ports


def test_a_password_of_the_store_is_in_no_file(tmp_path: Path) -> None:
    command = ["manifests", str(ROOT / "runs" / "base.yaml"), "--to", "kubernetes", "--out", str(tmp_path)]
    assert main([*command, "--store.url=redis://me:secret@store:6379"]) == 0
    assert not any("secret@" in text for text in written(tmp_path).values())


@pytest.mark.parametrize("base", BASES)
def test_a_cluster_takes_every_object(base: str) -> None:
    assert [problem for object in files(base) for problem in problems(object)] == []


@pytest.mark.parametrize("base", BASES)
def test_a_pod_whose_gpus_its_successor_needs_gives_way_first(base: str) -> None:
    updates = {
        name: (object["spec"]["strategy"]["rollingUpdate"], "nvidia.com/gpu" in str(object["spec"]["template"]))
        for name, object in of_kind(files(base), "Deployment").items()
    }
    assert {name for name, (update, _) in updates.items() if update["maxSurge"]} == {
        name for name, (_, has_gpus) in updates.items() if not has_gpus and name != "rollout"
    }
    assert all(update["maxSurge"] or update["maxUnavailable"] for update, _ in updates.values())


@needs_kustomize
def test_every_overlay_builds_and_all_components_at_once_and_a_cluster_takes_them() -> None:
    whole = [name for name in COMPONENTS if name not in ("components/hpa", "components/prometheus-istio")]
    taken_by_a_cluster([built(overlay) for overlay in OVERLAYS] + [built("base-gpu", "base-gpu/cert-manager", *whole)])


@needs_kustomize
@pytest.mark.thorough("test_every_overlay_builds_and_all_components_at_once_and_a_cluster_takes_them")
def test_every_two_components_build_in_either_order_and_a_cluster_takes_them() -> None:
    pairs = [pair for pair in permutations(COMPONENTS, 2) if set(pair) not in ONE_OF]
    taken_by_a_cluster([built("base-gpu", "base-gpu/cert-manager", *pair) for pair in pairs])


@needs_kustomize
@pytest.mark.parametrize("component", SCALERS)
@pytest.mark.parametrize("base", BASES)
def test_a_scaler_names_an_object_of_the_build_and_has_its_replicas_to_itself(base: str, component: str) -> None:
    objects = built(base, component)
    scaler = of_kind(objects, SCALERS[component])["rollout"]
    target = scaler["spec"]["scaleTargetRef"]
    (scaled,) = [
        object
        for object in objects
        if (object["apiVersion"], object["kind"], object["metadata"]["name"])
        == (target["apiVersion"], target["kind"], target["name"])
    ]
    assert scaled["kind"] == ("StatefulSet" if base == "base-istio" else "Deployment")
    assert scaled["metadata"]["namespace"] == scaler["metadata"]["namespace"]
    assert "replicas" not in scaled["spec"]


@needs_kustomize
def test_behind_istio_the_numbers_are_read_without_certificates_that_nobody_has() -> None:
    objects = built("base-istio", "base-istio/istio", "components/hpa", "components/prometheus-istio")
    taken_by_a_cluster([objects])
    (endpoint,) = of_kind(objects, "PodMonitor")["rolecall"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "http"
    assert "tls-viewer" not in str(objects)


@needs_kustomize
def test_behind_istio_people_have_a_pod_whose_calls_the_sidecar_takes() -> None:
    """Nothing runs until somebody scales it, and nothing probes it, for it serves nothing."""
    operator = of_kind(built("overlays/istio"), "Deployment")["operator"]
    pod = operator["spec"]["template"]
    assert operator["spec"]["replicas"] == 0
    assert pod["metadata"]["annotations"]["traffic.sidecar.istio.io/includeOutboundPorts"] == "50051"
    of_roles = {"is probed", "ends in its time", "leaves a lost node soon"}
    assert {rule.removeprefix("operator: ") for rule in broken_rules(pod)} == of_roles


def taken_by_a_cluster(builds: list[list[Object]]) -> None:
    seen = {repr(object): object for objects in builds for object in objects}
    assert [problem for object in seen.values() for problem in problems(object)] == []


# --- the rules of every pod -----------------------------------------------------------------------


def broken_rules(pod: Object) -> list[str]:
    """What a pod lacks of the standard "restricted", and of what we ask beyond it."""
    spec, name = pod["spec"], pod["metadata"]["labels"][COMPONENT]
    context = spec.get("securityContext", {})
    asked = {
        "mounts no token": spec.get("automountServiceAccountToken") is False,
        "has an account of its own": spec.get("serviceAccountName") == name,
        "is not root": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
        "has a seccomp profile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
        "ends in its time": spec.get("terminationGracePeriodSeconds", 0) >= 45,
        "leaves a lost node soon": {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
        <= {each["key"] for each in spec.get("tolerations", ()) if each.get("tolerationSeconds", 300) <= 60},
        "keeps out of the host": not {"hostNetwork", "hostPID", "hostIPC"} & set(spec),
        "has volumes that a pod may have": all("hostPath" not in volume for volume in spec["volumes"]),
    }
    for container in spec["containers"]:
        own, probes = container.get("securityContext", {}), {"startupProbe", "livenessProbe", "readinessProbe"}
        is_one_of_several_nodes = "--nnodes=1" not in container.get("command", ["--nnodes=1"]) and "--nnodes" in str(
            container.get("command")
        )
        asked |= {
            "asks for cpu and memory": {"cpu", "memory"} <= set(container.get("resources", {}).get("requests", {})),
            "writes to volumes alone": own.get("readOnlyRootFilesystem") is True,
            "gains no privilege": own.get("allowPrivilegeEscalation") is False,
            "has no capability": own.get("capabilities") == {"drop": ["ALL"]},
            "is probed": probes <= set(container) or is_one_of_several_nodes,
            "has no tag that moves": not re.search(r":latest$", container["image"]),
            "gets no secret by its environment": all("secretKeyRef" not in str(e) for e in container.get("env", [])),
        }
    return [f"{name}: {rule}" for rule, is_kept in asked.items() if not is_kept]


@pytest.mark.parametrize("base", BASES)
def test_every_pod_keeps_the_rules(base: str) -> None:
    pods = list(pods_of(files(base)))
    assert len(pods) >= 5
    assert [rule for pod in pods for rule in broken_rules(pod)] == []


@needs_kustomize
@pytest.mark.parametrize("component", COMPONENTS)
def test_no_component_takes_a_rule_away(component: str) -> None:
    """No capability either: a process that is not root would not get it."""
    objects = built("base-gpu", component)
    assert [rule for pod in pods_of(objects) for rule in broken_rules(pod)] == []
    (namespace,) = of_kind(objects, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        (lambda pod: pod["spec"].update(hostNetwork=True), "keeps out of the host"),
        (lambda pod: pod["spec"].pop("automountServiceAccountToken"), "mounts no token"),
        (lambda pod: pod["spec"]["containers"][0].pop("livenessProbe"), "is probed"),
        (lambda pod: pod["spec"]["containers"][0]["resources"].pop("requests"), "asks for cpu and memory"),
        (lambda pod: pod["spec"]["containers"][0]["securityContext"].clear(), "writes to volumes alone"),
        (lambda pod: pod["spec"]["securityContext"].pop("seccompProfile"), "has a seccomp profile"),
        (lambda pod: pod["spec"].pop("tolerations"), "leaves a lost node soon"),
    ],
)
def test_a_rule_that_is_broken_is_found(what: Callable[[Object], Any], rule: str) -> None:
    pod = copy.deepcopy(next(pods_of(files("base"))))
    assert broken_rules(pod) == []
    what(pod)
    assert any(found.endswith(rule) for found in broken_rules(pod))


def test_a_field_that_is_none_is_found_in_our_objects_and_in_others() -> None:
    deployment, jobset = (copy.deepcopy(files("base")[i]) for i in (0, 0))
    objects = copy.deepcopy(files("base"))
    deployment, jobset = of_kind(objects, "Deployment")["rollout"], of_kind(objects, "JobSet")["run"]
    deployment["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 3
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 3
    assert len(problems(deployment)) == 1
    assert len(problems(jobset)) == 2


# --- what agrees with what ------------------------------------------------------------------------


def selected(pods: list[Object], selector: dict[str, str]) -> set[str]:
    """The roles of the pods that a selector takes; the number of a job's pod is set by the cluster."""
    wanted = {key: value for key, value in selector.items() if not key.startswith("batch.kubernetes.io/")}
    labels = [pod["metadata"]["labels"] for pod in pods]
    return {each[COMPONENT] for each in labels if wanted.items() <= each.items()}


@pytest.mark.parametrize("base", BASES)
def test_every_address_of_the_run_is_a_service_with_pods_behind_it(base: str) -> None:
    objects = files(base)
    run, services, pods = (
        yaml.safe_load((ROOT / base / "run.yaml").read_text()),
        of_kind(objects, "Service"),
        list(pods_of(objects)),
    )
    sections = {**{name: run[name] for name in ("controller", "actor", "reward")}, **run.get("references", {})}
    for name, section in sections.items():
        host, port = section["address"].removeprefix("dns:///").split(":")
        spec = services[host]["spec"]
        role = "reference" if name in run.get("references", {}) else name
        assert selected(pods, spec["selector"]) == {role}
        assert [each["port"] for each in spec["ports"]] == [int(port)]
        assert section["bind"].endswith(f":{port}")


@pytest.mark.parametrize("base", [base for base in BASES if (ROOT / base / "cert-manager").is_dir()])
def test_certificates_name_the_hosts_by_which_roles_are_called_and_probed(base: str) -> None:
    run = yaml.safe_load((ROOT / base / "run.yaml").read_text())
    made = yaml.safe_load_all((ROOT / base / "cert-manager" / "certificates.yaml").read_text())
    certificates = of_kind(list(made), "Certificate")
    called = {name: [run[name]["address"]] for name in ("controller", "actor", "reward")}
    called["reference"] = [section["address"] for section in run.get("references", {}).values()]
    called["rollout"] = ["rollout:0"]  # by its own address, and known by this name (rolecall/rpc/channel.py)
    for role, addresses in called.items():
        hosts = {address.removeprefix("dns:///").split(":")[0] for address in addresses}
        if hosts:
            assert set(certificates[role]["spec"]["dnsNames"]) == hosts | {"localhost"}
            assert certificates[role]["spec"]["uris"] == [f"spiffe://rolecall/rolecall/{run['run']['name']}/{role}"]
            assert certificates[role]["spec"]["secretName"] == f"tls-{role}"


@pytest.mark.parametrize("base", BASES)
def test_nothing_is_mounted_or_named_that_is_not_there(base: str) -> None:
    all_is_there(files(base))


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_mounted_or_named_that_is_not_there_once_it_is_built(overlay: str) -> None:
    all_is_there(built(overlay))


def all_is_there(objects: list[Object]) -> None:
    accounts, claims = of_kind(objects, "ServiceAccount"), of_kind(objects, "PersistentVolumeClaim")
    maps = of_kind(objects, "ConfigMap")
    for pod in pods_of(objects):
        spec, role = pod["spec"], pod["metadata"]["labels"][COMPONENT]
        assert spec["serviceAccountName"] in accounts
        names = {volume["name"] for volume in spec["volumes"]}
        for volume in spec["volumes"]:
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
            assert volume.get("secret", {}).get("secretName") in {None, "store", f"tls-{role}"}
            assert volume.get("configMap", {}).get("name") in {None, *maps}
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == names or role == "store"


@pytest.mark.parametrize("base", BASES)
def test_policies_of_the_network_open_what_the_table_of_callers_allows_and_nothing_else(base: str) -> None:
    objects = files(base)
    roles = {pod["metadata"]["labels"][COMPONENT] for pod in pods_of(objects)} - {"store"}
    callers = roles | {Caller.OPERATOR.value, Caller.VIEWER.value}
    allowed = {
        (caller.value, served)
        for method, may in rules().items()
        for caller in may
        for served in roles
        if method.startswith(f"/rolecall.v1.{served.capitalize()}Service/") and caller.value in callers
    }
    assert {"rolecall.v1.RewardService", "rolecall.v1.EnvironmentService"} == PUBLIC
    allowed.add(("controller", "reward"))
    policies = of_kind(objects, "NetworkPolicy")
    taken = {(peer, role) for role in roles for peer in peers(policies[role], "ingress", "from", 50051)}
    opened = {(role, peer) for role in callers for peer in peers(policies[role], "egress", "to", 50051)}
    assert taken == {(caller, served) for caller, served in allowed}, "of callers that no pod has, too"
    assert opened == {(caller, served) for caller, served in allowed if caller in callers}


def test_the_store_keeps_what_it_holds_as_the_one_of_a_single_machine_does() -> None:
    (container,) = of_kind(files("base"), "StatefulSet")["store"]["spec"]["template"]["spec"]["containers"]
    words = container["command"][container["command"].index("valkey-server") + 1 :]
    of_cluster = dict(zip(words[::2], words[1::2], strict=True))
    services = yaml.safe_load((ROOT.parent / "compose" / "compose.yaml").read_text())["services"]
    of_compose = dict(shlex.split(line) for line in services["store"]["command"])
    of_its_place = {"--dir", "--aclfile", "--maxmemory"}
    assert of_cluster.keys() == of_compose.keys() >= of_its_place
    for name in of_cluster.keys() - of_its_place:
        assert of_cluster[name] == of_compose[name]


def test_the_store_the_weights_and_the_ranks_are_opened_to_those_that_use_them() -> None:
    policies = of_kind(files("base-gpu"), "NetworkPolicy")
    assert peers(policies["store"], "ingress", "from", 6379) == {"actor", "controller", "reference", "rollout"}
    assert "store" not in peers(policies["reward"], "egress", "to", 6379)
    for ports in (28400, 29400):
        between = {
            (role, peer) for role in ("actor", "reference", "rollout", "reward", "controller")
            for peer in peers(policies[role], "ingress", "from", ports)
        }  # fmt: skip
        ranks = {("actor", "actor")}  # on two nodes; the reference is on one
        channel = {("actor", "rollout"), ("rollout", "actor"), ("rollout", "rollout")}
        assert between == (ranks | channel if ports == 28400 else ranks)
    assert policies["deny-all"]["spec"]["podSelector"] == {}
    assert policies["deny-all"]["spec"]["ingress"] == []
    names, of_openshift = policies["deny-all"]["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"], "a cache on the node is no pod to every network"
    assert {port["port"] for port in of_openshift["ports"]} == {5353}, "decided after the service's 53 became this"


def test_linkerd_lets_the_store_the_weights_and_the_ranks_pass_by() -> None:
    annotations = yaml.safe_load((ROOT / "components" / "linkerd" / "annotations.yaml").read_text())["annotations"]
    first, last = map(int, PORTS.split("-"))
    assert last == RANKS_PORT - 1
    for way in ("inbound", "outbound"):
        assert annotations[f"config.linkerd.io/skip-{way}-ports"] == f"{STORE_PORT},{first}-{RANKS_PORT}"


def peers(policy: Object, way: str, side: str, port: int) -> set[str]:
    """The roles at the other end of what a policy opens on a port."""
    return {
        role
        for rule in policy["spec"][way]
        if any(each["port"] == port for each in rule["ports"])
        for peer in rule[side]
        for expression in peer.get("podSelector", {}).get("matchExpressions", ())
        for role in expression["values"]
    }


def test_of_the_pods_of_a_job_the_one_that_shows_numbers_is_scraped() -> None:
    monitor = yaml.safe_load((ROOT / "components" / "prometheus" / "pods.yaml").read_text())
    (rule,) = monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
    label = "__meta_kubernetes_pod_label_batch_kubernetes_io_job_completion_index"
    assert (rule["action"], rule["sourceLabels"]) == ("drop", [label])
    indices = ["", *map(str, range(32))]  # "": of no job
    assert [index for index in indices if not re.fullmatch(rule["regex"], index)] == ["", "0"]


def test_the_sidecars_of_istio_hold_the_table_too_and_neither_time_out_nor_repeat() -> None:
    made = {
        name: list(yaml.safe_load_all((ROOT / "base-istio" / "istio" / f"{name}.yaml").read_text()))
        for name in ("authorization", "traffic")
    }
    policies, services = of_kind(made["authorization"], "AuthorizationPolicy"), of_kind(files("base-istio"), "Service")
    roles = set(policies) - {"deny-all"}
    prefix = "cluster.local/ns/sort-digits/sa/"
    allowed = {
        (principal.removeprefix(prefix), path)
        for name in roles
        for rule in policies[name]["spec"]["rules"]
        for principal in rule["from"][0]["source"].get("principals", ())
        for path in rule["to"][0]["operation"]["paths"]
    }
    there = roles | {Caller.OPERATOR.value, Caller.VIEWER.value}
    table = {
        (caller.value, method)
        for method, may in rules().items()
        for caller in may
        if method.removeprefix("/rolecall.v1.").split("Service/")[0].lower() in roles and caller.value in there
    }
    assert allowed == table | {("controller", "/rolecall.v1.RewardService/*")}
    assert policies["deny-all"]["spec"] == {}
    assert {caller for caller, _ in allowed} <= of_kind(files("base-istio"), "ServiceAccount").keys()
    routes = of_kind(made["traffic"], "VirtualService")
    assert set(routes) == set(services) - {"store"}
    for route in routes.values():
        assert [(each["timeout"], each["retries"]) for each in route["spec"]["http"]] == [("0s", {"attempts": 0})]


@pytest.mark.parametrize("base", BASES)
def test_pods_that_are_not_ready_hold_no_drain_back(base: str) -> None:
    budgets = of_kind(files(base), "PodDisruptionBudget").values()
    assert budgets
    assert {budget["spec"]["unhealthyPodEvictionPolicy"] for budget in budgets} == {"AlwaysAllow"}


def test_ranks_on_several_nodes_have_a_leader_and_codes_that_decide() -> None:
    job = of_kind(files("base-gpu"), "JobSet")["run"]["spec"]["replicatedJobs"][1]
    spec = job["template"]["spec"]
    assert (job["name"], spec["completionMode"], spec["completions"], spec["parallelism"]) == ("actor", "Indexed", 2, 2)
    container = spec["template"]["spec"]["containers"][0]
    words = {
        "--nnodes=2",
        "--nproc-per-node=8",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=run-actor-0-0.run",
    }
    assert words <= set(container["command"])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    final = spec["podFailurePolicy"]["rules"][1]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [1, 2])
    sysctls = spec["template"]["spec"]["securityContext"]["sysctls"]
    assert sysctls == [{"name": "net.ipv4.ip_local_port_range", "value": "28400 29399"}]


@needs_kustomize
def test_every_pod_with_gpus_may_run_where_gpus_are(tmp_path: Path) -> None:
    """Those of actor, reference and rollouts; of a critic, and of a reference on two nodes."""
    run = yaml.safe_load((ROOT / "runs" / "base-gpu.yaml").read_text())
    run["critic"] = {"devices": [0, 1], "num_ranks": 2, "token_budget": 32768}
    run["algorithm"]["advantage"] = {"kind": "gae"}
    run["references"]["start"]["num_ranks"] = 4
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(run))
    base = tmp_path / "ppo"
    assert main(["manifests", str(tmp_path / "ppo.yaml"), "--to", "kubernetes", "--out", str(base)]) == 0
    tree = {"resources": ["ppo"], "components": ["ppo/gpu-nvidia"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    for build, roles in (("overlays/gpu", 3), (str(tmp_path), 4)):
        pods = [pod["spec"] for pod in pods_of(built(build))]
        with_gpus = [pod for pod in pods if "nvidia.com/gpu" in pod["containers"][0]["resources"].get("limits", {})]
        assert len(with_gpus) == roles
        for pod in pods:
            has = pod in with_gpus
            assert (pod.get("runtimeClassName") == "nvidia") == has
            assert any(each["key"] == "nvidia.com/gpu" for each in pod["tolerations"]) == has


@pytest.mark.parametrize("base", BASES)
def test_a_clusters_weights_have_a_range_of_ports_whatever_the_file_says(base: str, tmp_path: Path) -> None:
    run = yaml.safe_load((ROOT / "runs" / f"{base}.yaml").read_text())
    given = run.setdefault("weights", {})
    for ports, expected in ((None, "28400-29399"), ("31000-31099", "31000-31099")):
        given["ports"] = ports
        file, out = tmp_path / "run.yaml", tmp_path / str(ports)
        file.write_text(yaml.safe_dump(run))
        assert main(["manifests", str(file), "--to", "kubernetes", "--out", str(out)]) == 0
        assert load_settings(out / "run.yaml").weights.ports == expected


@pytest.mark.parametrize("base", BASES)
def test_a_run_waits_for_a_role_until_its_job_starts_it_again_and_it_has_loaded(base: str) -> None:
    """A Job waits for 10 minutes at the most, and a controller may be started again meanwhile."""
    asked = yaml.safe_load((ROOT / "runs" / f"{base}.yaml").read_text()).get("controller", {"start_timeout_s": 300})
    made = load_settings(ROOT / base / "run.yaml").controller
    assert made.start_timeout_s == asked["start_timeout_s"] + 600
    assert made.stall_timeout_s >= made.start_timeout_s


@pytest.mark.parametrize("base", BASES)
def test_probes_wait_as_long_as_the_roles_may_take_to_start(base: str) -> None:
    run = yaml.safe_load((ROOT / base / "run.yaml").read_text())
    for pod in pods_of(files(base)):
        probe = pod["spec"]["containers"][0].get("startupProbe", {})
        if "exec" in probe:
            assert probe["periodSeconds"] * probe["failureThreshold"] > run["controller"]["start_timeout_s"]
