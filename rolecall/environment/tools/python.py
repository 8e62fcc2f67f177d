"""Python as a tool: programs of the policy in a sandbox of their own each, as the scorer `kind: code` runs them."""

from collections.abc import Mapping
from typing import Any

from rolecall.environment.env import Tool
from rolecall.sandbox import Sandbox, sandbox_of
from rolecall.settings import CodeScorer

MAX_OUTPUT_BYTES = 2**16
"""Most bytes of output that a program writes before it is ended."""


class Python:
    """Python 3 of the system, with nothing kept from one call to the next. Linux, with bubblewrap."""

    tool = Tool(
        "python",
        "Runs a Python program and returns what it prints.",
        {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    )

    def __init__(self, limits: CodeScorer = CodeScorer(), sandbox: Sandbox | None = None) -> None:
        """`limits`: seconds, memory, processes and folders of a call. `sandbox`: absent, the one that `limits` names.
        ConfigError when programs cannot be run here.
        """
        self._limits = limits
        self._sandbox = sandbox or sandbox_of(limits)
        self._sandbox.check(["python3"])

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Implements CallableTool.call. What a program does wrong is in what it prints. ScorerUnavailableError when the
        sandbox did not come to stand, WorkerLostError when the machine had no memory: then the episode is lost.
        """
        files = {"main.py": str(arguments["code"]).encode(errors="replace")}
        command = ["sh", "-c", "exec python3 main.py 2>&1"]
        ran = self._sandbox.run(command, files, b"", self._limits.timeout_s, MAX_OUTPUT_BYTES)
        printed = ran.output.decode(errors="replace")
        if ran.status is None:
            return (
                f"{printed}\n[ended: a program has {self._limits.timeout_s:g} s and {MAX_OUTPUT_BYTES} bytes of output]"
            )
        return printed if ran.status == 0 else f"{printed}\n[exit status {ran.status}]"
