"""Sums as an environment with a tool: the library's calculator, and 1 for an answer that is right.

python examples/tool_use/calculate.py           # serves it on 127.0.0.1:50080 until Ctrl-C
"""

import sys

from rolecall.environment import Task, serve
from rolecall.environment.tools import ToolEpisode
from rolecall.environment.tools.calculator import Calculator

ADDRESS = "127.0.0.1:50080"


def correct(task: Task, answer: str) -> float:
    """Whether the policy's last words are the sum."""
    return float(answer.strip() == task.ground_truth)


if __name__ == "__main__":
    sys.exit(
        serve(
            lambda: ToolEpisode([Calculator()], correct),
            sys.argv[1] if len(sys.argv) > 1 else ADDRESS,
            name="calculate",
            range=(0, 1),
            roles=("user", "tool"),
            max_sessions=512,
            deterministic=True,
        )
    )
