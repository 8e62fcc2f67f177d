"""The weight channel into a real AsyncLLM whose engine runs in processes of its own: each worker is a rank, and none
outlives the service.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.thorough(
        "test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish"
    ),
    pytest.mark.timeout(300),  # an engine with two workers takes a minute to start
]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tensor_parallel_workers_receive_exact_weights_and_end_when_the_service_is_killed(
    tmp_path: Path, num_workers: int
) -> None:
    if num_workers > len(os.sched_getaffinity(0)):
        pytest.skip("each worker needs a core of its own")
    command = [sys.executable, "-m", "tests.integration.weights_async_engine_process", str(tmp_path), str(num_workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            lines = (line for line in service.stdout if line.startswith("DONE "))
            done = json.loads(next(lines, "DONE {}").removeprefix("DONE "))
        finally:
            service.kill()
    assert done, "the service ended before it was done"
    assert done["num_ranks"] == num_workers
    assert max(done["gaps"]) < 2e-5
    deadline = time.monotonic() + 100
    while any(_is_alive(pid) for pid in done["children"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in done["children"] if _is_alive(pid)] == []
