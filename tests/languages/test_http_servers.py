"""Scorers over HTTP against real servers that are not ours: MLServer, in an environment of its own."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.scoring.scores import Score
from rolecall.settings import ExternalScorer, RpcSection
from rolecall.v1 import reward_pb2
from services.reward.external.component import open_http
from tests.ports import free_port

pytestmark = pytest.mark.languages
START_TIMEOUT_S = 120.0
MLSERVER = os.environ.get("MLSERVER") or shutil.which("mlserver")
"""`pip install mlserver` in a virtual environment, and this names its program: it wants other packages than ours."""
MODEL = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceResponse


class Equal(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        response, truth = (StringCodec.decode_input(tensor) for tensor in payload.inputs)
        scores = np.array([float(ours == theirs) for ours, theirs in zip(response, truth)])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("score", scores)])
"""


@pytest.fixture(params=["http", "grpc"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a model behind MLServer, by either protocol: 1 where the response is the ground truth."""
    if MLSERVER is None:
        pytest.skip("no mlserver: install it in an environment of its own and name it by MLSERVER")
    port = free_port()
    text = {"datatype": "BYTES", "shape": [-1]}
    settings = {
        "name": "equal",
        "implementation": "equal.Equal",
        "inputs": [{"name": name, **text} for name in ("response", "ground_truth")],
        "outputs": [{"name": "score", "datatype": "FP64", "shape": [-1]}],
    }
    (tmp_path / "equal.py").write_text(MODEL)
    (tmp_path / "model-settings.json").write_text(json.dumps(settings))
    ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    (tmp_path / "settings.json").write_text(json.dumps({"host": "127.0.0.1", "parallel_workers": 0, **ports}))
    url = f"http://127.0.0.1:{port}/v2/models/equal"
    server = subprocess.Popen([MLSERVER, "start", "."], cwd=tmp_path)
    try:
        wait_for(f"{url}/ready", server)
        yield url if request.param == "http" else f"grpc://127.0.0.1:{ports['grpc_port']}/equal"
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Returns once `url` answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "it ended"
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {START_TIMEOUT_S} s")


async def test_a_model_behind_a_real_server_of_the_open_inference_protocol_scores(model: str) -> None:
    items = [
        reward_pb2.ScoreItem(id=str(i), response_text=text, ground_truth="4 = 2 + 2 π")
        for i, text in enumerate(["4", "4 = 2 + 2 π", ""] * 50)
    ]
    scorer = ExternalScorer(kind="kserve", address=model, range=(0, 1))
    component = open_http("it", scorer, RpcSection(), timeout_s=60.0, max_attempts=2)
    try:
        outcomes = await component.score(items)
    finally:
        await component.close()
    assert outcomes == [Score(0.0), Score(1.0), Score(0.0)] * 50
