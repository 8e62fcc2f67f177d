"""A rubric of verifiers as a scorer: the share of the expected words that the response contains, and how short it is.

python examples/external_reward/verifiers/scorer.py 127.0.0.1:50070     # serves it until Ctrl-C
"""

import sys
from typing import Any

import verifiers as vf

from rolecall.verifiers import serve_rubric


def words(completion: list[dict[str, Any]], answer: str) -> float:
    """The reward function: the share of the words of the ground truth."""
    expected = answer.split()
    return sum(word in completion[-1]["content"].split() for word in expected) / len(expected)


def length(completion: list[dict[str, Any]]) -> float:
    """A metric: words of the response."""
    return float(len(completion[-1]["content"].split()))


if __name__ == "__main__":
    rubric = vf.Rubric(funcs=[words, length], weights=[1.0, 0.0])
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50070"
    sys.exit(serve_rubric(rubric, address, name="words", range=(0, 1)))
