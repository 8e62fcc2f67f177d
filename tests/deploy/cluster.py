"""A run on a Kubernetes cluster for a test: made, started, looked at and taken away with the commands that the
documents name, `kubectl` and `rolecall`.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.project import ROOT, wait_for

ROLECALL = str(ROOT / ".venv" / "bin" / "rolecall")
CONTEXT = os.environ.get("CONTEXT", "")
"""The kubectl context of the cluster. Nothing is applied to one that nobody named."""
SMALL = {"cpu": "100m", "memory": "256Mi"}
"""What each pod asks of a cluster of one small machine."""
COMPONENT = "app.kubernetes.io/component"


def kubectl(*words: str, check: bool = True, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Runs `kubectl WORDS` at the cluster."""
    assert CONTEXT, "name the cluster: CONTEXT=, one of `kubectl config get-contexts`; without, kubectl takes any"
    command = ["kubectl", "--context", CONTEXT, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0 or not check, f"{' '.join(words)}: {ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended


class ClusterRun:
    """One run in a namespace of its own, by its name; `folder` is for what this machine keeps of it."""

    def __init__(self, name: str, folder: Path, *overrides: str) -> None:
        """overrides: of the base's run, as a command of `rolecall` takes them."""
        self.name, self.folder = name, folder
        self.base = folder / "base"
        source = str(ROOT / "deploy" / "kubernetes" / "runs" / "base.yaml")
        words = ("--to", "kubernetes", "--out", str(self.base), f"--run.name={name}", *overrides)
        rolecall("manifests", source, *words)
        self._write_overlay()

    def _write_overlay(self) -> None:
        """The images of `make images`, and requests that one small machine has room for."""
        requests = {"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests", "value": SMALL}
        job = "/spec/replicatedJobs/{}/template/spec/template/spec/containers/0/resources/requests"
        jobset = yaml.safe_load((self.base / "run-jobset.yaml").read_text())
        of_jobs = [requests | {"path": job.format(at)} for at in range(len(jobset["spec"]["replicatedJobs"]))]
        patches = {"Deployment": [requests], "StatefulSet": [requests], "JobSet": of_jobs}
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["base"],
            "images": [{"name": f"rolecall-{target}", "newTag": "dev"} for target in ("light", "trainer", "rollout")],
            "patches": [{"target": {"kind": kind}, "patch": yaml.safe_dump(ops)} for kind, ops in patches.items()],
        }
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))

    def kubectl(self, *words: str, check: bool = True, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Runs `kubectl WORDS` in the run's namespace."""
        return kubectl("--namespace", self.name, *words, check=check, timeout_s=timeout_s)

    def fill(self, job: Path) -> None:
        """Makes namespace, secrets and volumes, and copies what lies in the folder `job` to the volume `data`."""
        kubectl("apply", "-f", str(self.base / "namespace.yaml"))
        self._make_secrets()
        self.kubectl("apply", "-f", str(self.base / "volumes.yaml"))
        self.kubectl("apply", "-f", str(ROOT / "deploy" / "kubernetes" / "fill.yaml"))
        self.kubectl("wait", "pod/fill", "--for=condition=Ready", "--timeout=120s")
        for path in sorted(job.iterdir()):
            self.kubectl("cp", str(path), f"fill:/data/{path.name}")

    def _make_secrets(self) -> None:
        users, certificates = self.folder / "acl", self.folder / "certs"
        rolecall("store-acl", str(self.base / "run.yaml"), str(users), "--store.url", "redis://store:6379")
        hosts = [f"reference=reference-{name}" for name in self._settings().get("references", {})]
        rolecall("certificates", str(certificates), "--run", self.name, *(w for h in hosts for w in ("--host", h)))
        urls = [f"--from-file={path.parent.name}={path}" for path in sorted(users.glob("*/store-url"))]
        acl = f"--from-file=users.acl={users / 'users.acl'}"
        self.kubectl("create", "secret", "generic", "store", acl, *urls)
        for role in sorted(path for path in certificates.iterdir() if path.is_dir()):
            self.kubectl("create", "secret", "generic", f"tls-{role.name}", f"--from-file={role}")

    def _settings(self) -> Mapping[str, Any]:
        settings: dict[str, Any] = yaml.safe_load((self.base / "run.yaml").read_text())
        return settings

    def apply(self) -> None:
        """Starts the run, or goes on with it."""
        kubectl("apply", "-k", str(self.folder))

    def change(self, key: str, value: str) -> None:
        """Changes one key of the base's file of the run."""
        path = self.base / "run.yaml"
        tree = yaml.safe_load(path.read_text())
        section, _, name = key.partition(".")
        tree[section][name] = value
        path.write_text(yaml.safe_dump(tree))

    def without_gpus(self) -> None:
        """Has a run that was made for GPUs compute on CPUs, in the same pods."""
        for path in (self.base / "run.yaml", self.base / "run-jobset.yaml"):
            text = path.read_text()
            path.write_text(re.sub(r"(?m)^\s*(devices: .*|limits: {nvidia.com/gpu: .*)\n", "", text))

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of a component that are not on their way out, in the order in which they were made."""
        answer = self.kubectl("get", "pods", "-l", f"{COMPONENT}={component}", "-o", "json").stdout
        pods = [pod for pod in json.loads(answer)["items"] if "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def ready(self, component: str) -> dict[str, str]:
        """Names of the ready pods of a component, and the uid of each: those of a StatefulSet keep their names."""
        pods = self.pods(component)
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods if _is_ready(pod)}

    def restarts(self, name: str) -> int:
        """How often the kubelet has started the container of a pod again."""
        status = json.loads(self.kubectl("get", "pod", name, "-o", "json").stdout)["status"]
        return int(status["containerStatuses"][0]["restartCount"])

    def delete(self, name: str) -> None:
        """Deletes a pod as if its node were gone: at once."""
        self.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")

    def crash(self, name: str) -> None:
        """Kills what runs in the container of a pod, as the kernel does when memory is short."""
        kill = "[os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
        # what kills may be killed with it
        self.kubectl("exec", name, "--", "python3", "-c", f"import os; {kill}", check=False)

    def evict(self, name: str) -> None:
        """Asks for a pod's eviction, as a drain of its node does."""
        asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.name}}
        file = self.folder / "eviction.json"
        file.write_text(json.dumps(asked))
        kubectl("create", "--raw", f"/api/v1/namespaces/{self.name}/pods/{name}/eviction", "-f", str(file))

    def jobset(self) -> str:
        """How the JobSet ended, "" while it has not: Completed or Failed."""
        status = json.loads(self.kubectl("get", "jobset", "run", "-o", "json").stdout).get("status", {})
        return str(status.get("terminalState", ""))

    @contextmanager
    def forwarded(self) -> Iterator[str]:
        """The controller's address on this machine, as people who look on have it."""
        command = ["kubectl", "--context", CONTEXT, "--namespace", self.name, "port-forward"]
        words = ["service/controller", ":50051"]
        with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as ward:
            try:
                assert ward.stdout is not None
                line = ward.stdout.readline()  # "Forwarding from 127.0.0.1:PORT -> 50051", or its end
                yield line.partition(" -> ")[0].rpartition(" ")[2].replace("127.0.0.1", "localhost")
            finally:
                ward.kill()

    def rolecall(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of this machine's own `rolecall` at the run's controller, as its operator."""
        with self.forwarded() as address:
            command = [ROLECALL, words[0], address, "--tls", str(self.folder / "certs" / "operator"), *words[1:]]
            return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def status(self) -> dict[str, Any] | None:
        """The run as `rolecall status` tells it; None while no controller answers."""
        answer = self.rolecall("status", "--json")
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def lost(self) -> list[str]:
        """Names of the workers that the controller tells of as lost."""
        return [worker["worker"] for worker in (self.status() or {}).get("workers", []) if worker.get("lost")]

    def step_now(self) -> int:
        """Steps applied, once a controller answers."""
        self.wait("an answer of the controller", lambda: self.step() >= 0)
        return self.step()

    def step(self) -> int:
        """Steps applied, -1 while no controller answers."""
        status = self.status()
        return -1 if status is None else int(status.get("step", 0))

    def wait(self, what: str, holds: Callable[[], bool], within_s: float = 420.0) -> float:
        """Waits until `holds`, and returns for how long; fails with the pods and their last words."""
        return wait_for(what, holds, within_s, self.told)

    def told(self) -> str:
        """The pods, the last events and the last lines of each role's log."""
        pods = self.kubectl("get", "pods", check=False).stdout
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False).stdout.splitlines()[-15:]
        roles = ("controller", "actor", "critic", "reference", "rollout", "reward", "store")
        words = ("--tail", "12", "--prefix", "--ignore-errors")
        logs = [self.kubectl("logs", "-l", f"{COMPONENT}={role}", *words, check=False).stdout for role in roles]
        return "\n".join([pods, *events, *logs])

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, read from the volume."""
        text = self.kubectl("exec", "fill", "--", "cat", f"{self._settings()['run']['dir']}/metrics.jsonl").stdout
        return [json.loads(line) for line in text.splitlines()]


def rolecall(*words: str) -> str:
    """Runs a command of this machine's own `rolecall`."""
    ended = subprocess.run([ROLECALL, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"{' '.join(words)}: {ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended.stdout


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


@contextmanager
def cluster_run(name: str, folder: Path, job: Path, *overrides: str) -> Iterator[ClusterRun]:
    """A run whose namespace is gone afterwards, volumes and all."""
    run = ClusterRun(name, folder, *overrides)
    kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", timeout_s=200)
    try:
        run.fill(job)
        yield run
    finally:
        kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", timeout_s=200)
