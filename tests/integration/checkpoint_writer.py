"""A process that commits one checkpoint after the other until it is killed: `python -m
tests.integration.checkpoint_writer FOLDER NUMBER`.

Every number in the n-th is n; each step is saved twice. It says n once that is committed. Light, because a test starts
many.
"""

import json
import sys
from itertools import count

from rolecall.checkpoint.manifest import Attempt, RunCheckpoints, StoredFile, store
from rolecall.checkpoint.storage import open_storage

NUM_FILES = 4


def write(attempt: Attempt, number: int) -> list[StoredFile]:
    """An attempt of which every number is `number`."""
    contents = json.dumps([number] * 2000).encode()
    return [store(attempt.storage, f"actor/{index}", lambda file: file.write(contents)) for index in range(NUM_FILES)]


def main(folder: str, start: int) -> None:
    checkpoints = RunCheckpoints(open_storage(folder), 2)
    for number in count(start):
        attempt = checkpoints.begin(number // 2)
        checkpoints.commit(attempt, write(attempt, number), {"number": number})
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
