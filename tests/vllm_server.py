"""vLLM's own server, `vllm serve`, on CPUs, for tests of whoever asks it."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolecall.settings import child_environment
from tests.ports import free_port

START_TIMEOUT_S = 600.0
"""Time in which it must answer."""
MAX_NUM_SEQS = 64
"""Questions that it answers at a time, as many as a component of the reward asks."""


@contextmanager
def vllm_serve(model: Path, log: Path) -> Iterator[str]:
    """Serves `model`, a directory, as `judge`; gives the URL that ends in /v1."""
    port = free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "judge"]
    words += ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", str(MAX_NUM_SEQS)]
    environment = child_environment(
        {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words]
    with log.open("w") as written:
        process = subprocess.Popen(command, env=environment, stdout=written, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"{url} did not answer within {START_TIMEOUT_S} s: {log.read_text()[-4000:]}")
