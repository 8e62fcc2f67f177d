"""A scorer outside the system, as a user would run one: python -m tests.chaos.outside ADDRESS. Nobody but the driver
starts it again.
"""

import sys

from rolecall.reward import serve
from tests.chaos.scorer import score

if __name__ == "__main__":
    sys.exit(serve(score, sys.argv[1], name="outside", range=(0, 1), reads=("response_text",)))
