"""Forks trainers that have imported torch already: a killed one is back within a second instead of six. `python -m
tests.twins.nursery`

Reads lines of JSON on stdin, `["fork", role, argument...]` or `["kill", pid]`, and answers each with the child's pid.
It ends with its stdin, and its children with it. It starts no thread before it forks, so a child is as a fresh process
is.
"""

import importlib
import json
import os
import signal
import sys

import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import services.actor.ranks
import services.critic.ranks
import services.reference.ranks  # noqa: F401


def main() -> None:
    """Until stdin ends."""
    children: list[int] = []
    say("ready")
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "kill":
            os.kill(arguments[0], signal.SIGKILL)
            os.waitpid(arguments[0], 0)
            children.remove(arguments[0])
            say(arguments[0])
            continue
        pid = os.fork()
        if pid == 0:
            child(*arguments)
        children.append(pid)
        say(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def child(role: str, log: str, *argv: str) -> None:
    """The role, as its own entry point runs it; what it says goes to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(0)
    os._exit(importlib.import_module(f"services.{role}.__main__").main(argv))


def say(what: object) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
