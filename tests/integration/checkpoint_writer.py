"""A process that commits one checkpoint after the other until it is killed.

Every number in the n-th is n; each step is saved twice. It says n once that is committed.
"""

import json
from itertools import count
from multiprocessing.connection import Connection

from rolecall.checkpoint.manifest import Attempt, RunCheckpoints, StoredFile, store
from rolecall.checkpoint.storage import open_storage
from tests.forks import saying

NUM_FILES = 4


def write(attempt: Attempt, number: int) -> list[StoredFile]:
    """An attempt of which every number is `number`."""
    contents = json.dumps([number] * 2000).encode()
    return [store(attempt.storage, f"actor/{index}", lambda file: file.write(contents)) for index in range(NUM_FILES)]


def write_on(pipe: Connection, folder: str, start: int) -> None:
    """Commits one checkpoint after the other, in a process of its own."""
    say, checkpoints = saying(pipe), RunCheckpoints(open_storage(folder), 2)
    for number in count(start):
        attempt = checkpoints.begin(number // 2)
        checkpoints.commit(attempt, write(attempt, number), {"number": number})
        say(number)
