"""The objects of deploy/kubernetes as a cluster would get them, and what the tests ask of them."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSION = "1.33"
"""Of Kubernetes: the oldest release that has what the manifests use and is still kept (sleep in preStop is stable in
1.34, and on by default since 1.30).
"""
COMPONENT = "app.kubernetes.io/component"

Object = dict[str, Any]

_CRDS = {
    file.stem: Draft202012Validator(json.loads(file.read_text())) for file in (Path(__file__).parent / "crds").iterdir()
}


def builder() -> list[str] | None:
    """The command that builds a kustomization, before its folder; None where this machine has none."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


@cache
def built(resource: str, *components: str) -> list[Object]:
    """The objects of a base or an overlay with components, paths under deploy/kubernetes."""
    command = builder()
    assert command is not None
    if not components:
        return _objects(_said([*command, str(ROOT / resource)]))
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".test-") as folder:
        tree = {"resources": [f"../{resource}"], "components": [f"../{component}" for component in components]}
        kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kind | tree))
        return _objects(_said([*command, folder]))


@cache
def files(base: str) -> list[Object]:
    """The objects of a base's own files, as they were written, and those that a builder would make beside them: what
    needs no builder. A builder looks for names in workloads that it knows, so not in a JobSet.
    """
    tree = yaml.safe_load((ROOT / base / "kustomization.yaml").read_text())
    suffix = "" if tree.get("generatorOptions", {}).get("disableNameSuffixHash") else "-0123456789"
    made = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": each["name"] + suffix},
         "data": {name: (ROOT / base / name).read_text() for name in each["files"]}}
        for each in tree["configMapGenerator"]
    ]  # fmt: skip
    return made + [found for name in tree["resources"] for found in _objects((ROOT / base / name).read_text())]


def problems(object: Object) -> list[str]:
    """What a cluster of VERSION, with the custom resources that crds/ describes, would refuse or ignore of it."""
    kind = object["kind"]
    if kind in _CRDS:
        found = [f"{kind}: {error.message}" for error in _CRDS[kind].iter_errors(object)]
        return found + [problem for job in jobs_of(object) for problem in problems(job)]
    try:
        kubernetes_validate.validate(object, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{kind} {object['metadata']['name']}: {error}"]
    return []


def jobs_of(object: Object) -> list[Object]:
    """The jobs of a JobSet, as the controller would make them; none of anything else."""
    if object["kind"] != "JobSet":
        return []
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        for job in object["spec"]["replicatedJobs"]
    ]


def pods_of(objects: Sequence[Object]) -> Iterator[Object]:
    """The templates of all pods, those of a JobSet's jobs among them."""
    jobs = [job for object in objects for job in jobs_of(object)]
    for owner in [*objects, *jobs]:
        if owner["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield owner["spec"]["template"]


def of_kind(objects: Sequence[Object], kind: str) -> dict[str, Object]:
    """By name."""
    return {object["metadata"]["name"]: object for object in objects if object["kind"] == kind}


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _objects(text: str) -> list[Object]:
    return [object for object in yaml.load_all(text, yaml.CSafeLoader) if object]
