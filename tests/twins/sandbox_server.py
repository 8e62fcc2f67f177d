"""A server that runs programs by this machine's own interpreters, and speaks SandboxFusion's HTTP API."""

import base64
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.twins.http_scorer import Asked, HttpTwin

COMPILES = {"python": [], "bash": [], "compiled": ["sh", "-c", '! grep -q "no program" "$0" && cp "$0" main']}
"""What makes a program of the file that is appended; a language of none is interpreted."""
STARTS = {"python": [sys.executable], "bash": ["sh"], "compiled": ["sh", "main"]}


def sandbox_twin() -> HttpTwin:
    """A server of the languages above, one of which is compiled."""
    twin = HttpTwin(_answer)
    twin.look = "pong"
    return twin


def _answer(request: Asked) -> dict[str, Any]:
    assert request.path == "/run_code", request.path
    body = request.body
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file, content in body["files"].items():
            (folder / file).write_bytes(base64.b64decode(content))
        code = folder / "tmp4x8k1pnf"
        code.write_text(body["code"])
        limits = ["prlimit", f"--as={body['memory_limit_MB'] * 2**20}", "--core=0", "--"]
        compiled, ran = None, None
        if COMPILES[body["language"]]:
            compiled = _command([*COMPILES[body["language"]], str(code)], folder, "", body["compile_timeout"])
        if compiled is None or compiled["return_code"] == 0:
            command = [*limits, *STARTS[body["language"]], *([] if compiled else [str(code)])]
            ran = _command(command, folder, body["stdin"], body["run_timeout"])
    ends = [each["return_code"] for each in (compiled, ran) if each is not None]
    status = "Success" if all(end == 0 for end in ends) else "Failed"
    return {"status": status, "message": "", "compile_result": compiled, "run_result": ran, "files": {}}


def _command(command: Sequence[str], folder: Path, stdin: str, timeout_s: float) -> dict[str, Any]:
    started = time.monotonic()
    ended: dict[str, Any]
    try:
        ran = subprocess.run(
            command, cwd=folder, input=stdin.encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        ended = {"status": "TimeLimitExceeded", "return_code": None, "stdout": (error.stdout or b"").decode()}
    else:
        output = ran.stdout.decode(errors="replace")
        ended = {"status": "Finished", "return_code": ran.returncode, "stdout": output}
    return {**ended, "stderr": "", "execution_time": time.monotonic() - started}
