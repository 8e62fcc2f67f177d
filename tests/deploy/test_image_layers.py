"""Images that can be compared (`make test-deploy`): what is installed a second time, from the same wheels and the same
tree, makes layers of the same files. Their order is the builder's, and differs at times where one layer is cached.
"""

import hashlib
import json
import subprocess
import tarfile
from pathlib import Path
from typing import IO, Any

import pytest

from tests.deploy.project import docker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheels" / "cpu"
ANEW = "light-packages,rolecall,base,light"
"""Stages that are made again. Not the system: another day Debian has other packages."""


def entries(layer: IO[bytes] | None) -> list[tuple[Any, ...]]:
    """What a layer holds, sorted by name: each entry with all that its header says, and the digest of its content."""
    found = []
    with tarfile.open(fileobj=layer) as tar:
        for each in tar:
            content = tar.extractfile(each) if each.isreg() else None
            digest = hashlib.sha256(content.read()).hexdigest() if content is not None else ""
            owner, header = (each.mode, each.uid, each.gid, each.mtime), sorted(each.pax_headers.items())
            found.append((each.name, each.type, each.size, each.linkname, owner, header, digest))
    return sorted(found)


def layers(image: str, folder: Path) -> list[list[tuple[Any, ...]]]:
    """The entries of each layer of an image."""
    file = folder / "image.tar"
    docker("image", "save", "--output", str(file), image)
    with tarfile.open(file) as saved:
        manifest = saved.extractfile("manifest.json")
        assert manifest is not None
        return [entries(saved.extractfile(name)) for name in json.load(manifest)[0]["Layers"]]


@pytest.mark.skipif(not WHEELS.is_dir(), reason="the images are of another lock")
def test_the_light_image_made_again_has_layers_of_the_same_files(tmp_path: Path) -> None:
    words = ["--file", "deploy/docker/Dockerfile", "--target", "light", "--tag", "rolecall-light:again"]
    inputs = ["--build-arg", "PIP_NO_INDEX=1", "--build-context", f"wheels={WHEELS}"]
    build = ["docker", "build", "--quiet", "--no-cache-filter", ANEW, *words, *inputs, "."]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert made.returncode == 0, made.stderr
    try:
        dev, again = json.loads(docker("image", "inspect", "rolecall-light:dev", "rolecall-light:again"))
        assert again["Id"] != dev["Id"]
        assert len(again["RootFS"]["Layers"]) == len(dev["RootFS"]["Layers"])
        if again["RootFS"]["Layers"] != dev["RootFS"]["Layers"]:
            assert layers("rolecall-light:again", tmp_path) == layers("rolecall-light:dev", tmp_path)
    finally:
        docker("image", "rm", "rolecall-light:again")
