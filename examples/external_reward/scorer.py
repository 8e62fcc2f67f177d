"""A reward of your own, in ten lines: the share of the expected words that the response contains."""

import sys

from rolecall.reward import Item, serve


def score(item: Item) -> float:
    words = item.ground_truth.split()
    return sum(word in item.response_text.split() for word in words) / len(words)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50070"
    sys.exit(serve(score, address, name="words", range=(0, 1), reads=("response_text", "ground_truth")))
