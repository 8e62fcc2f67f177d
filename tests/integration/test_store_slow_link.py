"""Rows of wide columns on a link that carries less than they are in the time of one answer: a long context's top-k
columns are a hundred megabytes, and all ranks of a teacher write theirs at once.
"""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from rolecall.columns import TOPK_IDS, TOPK_LOGPROBS
from rolecall.store.clients import open_client
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.v1.trajectory_pb2 import TrajectoryMeta
from rolecall.wire import Array
from tests.fixtures_servers import StartServer

TIMEOUT_S = 1.0
NUM_WRITERS = 2
NUM_TOKENS, WIDTH = 8192, 64
ROW_BYTES = 8 * NUM_TOKENS * WIDTH


class SlowLink:
    """Passes bytes to the server on port `far` and back, all connections together at most `bytes_per_s` a second each
    way.
    """

    def __init__(self, far: int, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._far = far
        self._lock = threading.Lock()
        self._free_at = {True: 0.0, False: 0.0}
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)  # a thread that waits for one goes on
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
                far.connect(("127.0.0.1", self._far))
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, there: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**14):
                with self._lock:
                    now = time.monotonic()
                    self._free_at[there] = max(now, self._free_at[there]) + len(data) / self._bytes_per_s
                    pause_s = self._free_at[there] - now
                time.sleep(pause_s)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@pytest.fixture
def connections(start_server: StartServer) -> Iterator[list[Connection]]:
    """Connections over one slow link to a server, each patient for TIMEOUT_S."""
    link = SlowLink(start_server(), NUM_WRITERS * ROW_BYTES / (1.6 * TIMEOUT_S))
    made = [Connection(open_client(f"redis://127.0.0.1:{link.port}", TIMEOUT_S)) for _ in range(NUM_WRITERS)]
    yield made
    for connection in made:
        connection.close()
    link.close()


def test_large_rows_are_written_and_read_by_all_at_once_however_long_the_link_takes(
    connections: list[Connection],
) -> None:
    writers = [Rows(connection, "run", 1) for connection in connections]
    refs = [writers[0].ref(f"{gid}/0", "r.0-1", NUM_TOKENS) for gid in range(NUM_WRITERS)]
    tokens: dict[str, Array] = {"token_ids": np.zeros(NUM_TOKENS, np.int32)}
    writers[0].stage_many(refs, [tokens] * NUM_WRITERS, [TrajectoryMeta(id=ref.id) for ref in refs], 600)
    noise = np.random.default_rng(0)
    wide: list[dict[str, Array]] = [
        {
            TOPK_IDS: noise.integers(2**17, size=(NUM_TOKENS, WIDTH), dtype=np.int32),
            TOPK_LOGPROBS: noise.random((NUM_TOKENS, WIDTH), np.float32),
        }
        for _ in refs
    ]
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        started = time.monotonic()
        assert list(pool.map(lambda i: writers[i].put([refs[i]], [wide[i]]), range(NUM_WRITERS))) == [0] * NUM_WRITERS
        assert time.monotonic() - started > 1.2 * TIMEOUT_S
        read = list(pool.map(lambda i: writers[i].read([refs[i]], [TOPK_IDS, TOPK_LOGPROBS])[0], range(NUM_WRITERS)))
    for row, columns in zip(read, wide, strict=True):
        assert all(np.array_equal(row[name], column) for name, column in columns.items())
