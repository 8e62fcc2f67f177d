"""Images that can be compared (`make test-deploy`): what is installed a second time, from the same wheels and the same
tree, makes the same layers.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.deploy.project import docker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheels" / "cpu"
ANEW = "light-packages,rolecall,base,light"
"""Stages that are made again. Not the system: another day Debian has other packages."""


@pytest.mark.skipif(not WHEELS.is_dir(), reason="the images are of another lock")
def test_the_light_image_made_again_has_the_same_layers() -> None:
    words = ["--file", "deploy/docker/Dockerfile", "--target", "light", "--tag", "rolecall-light:again"]
    inputs = ["--build-arg", "PIP_NO_INDEX=1", "--build-context", f"wheels={WHEELS}"]
    build = ["docker", "build", "--quiet", "--no-cache-filter", ANEW, *words, *inputs, "."]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert made.returncode == 0, made.stderr
    try:
        dev, again = json.loads(docker("image", "inspect", "rolecall-light:dev", "rolecall-light:again"))
        assert again["Id"] != dev["Id"]
        assert again["RootFS"]["Layers"] == dev["RootFS"]["Layers"]
    finally:
        docker("image", "rm", "rolecall-light:again")
