"""A twin of OpenEnv's server: its WebSocket, its codes, its places; and faults that the real one has by chance.

The game is that of the real server in tests/languages/test_openenv.py: a number is added up to a goal, which the seed
decides.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve


class Twin:
    """Sessions of the game. `places`: as many at a time."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.num_sessions = 0
        self.num_opened = 0
        self.seen: list[dict[str, Any]] = []
        """Every message."""
        self._lock = threading.Lock()

    def session(self, connection: ServerConnection) -> None:
        """One connection, from its beginning to its end."""
        with self._lock:
            is_full = self.num_sessions >= self.places
            self.num_sessions += not is_full
            self.num_opened += not is_full
        if is_full:
            connection.send(error("Server at capacity", "CAPACITY_REACHED", active_sessions=self.places))
            return
        try:
            self._play(connection)
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                self.num_sessions -= 1

    def _play(self, connection: ServerConnection) -> None:
        total = goal = 0
        for raw in connection:
            message = json.loads(raw)
            self.seen.append(message)
            data = message.get("data", {})
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                total, goal = 0, data["seed"] % 5 + 3
                connection.send(observation(total, goal, None))
                continue
            if not isinstance(data.get("add"), int):
                connection.send(error("Invalid message", "VALIDATION_ERROR", errors=[]))
                continue
            total += data["add"]
            match data["add"]:
                case 100:
                    connection.send(error("it broke", "EXECUTION_ERROR"))
                case 101:
                    continue  # it says nothing
                case 102:
                    connection.send("garbage")
                case 103:
                    return
                case 104:
                    connection.send(json.dumps({"type": "observation", "data": {"observation": {}}}))
                case 105:
                    connection.send("[" * 100_000)
                case _:
                    connection.send(observation(total, goal, 0.25 if total == goal else None if total < goal else 0.0))


def error(message: str, code: str, **more: Any) -> str:
    """An error as OpenEnv writes it."""
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


def observation(total: int, goal: int, reward: float | None) -> str:
    """An observation as OpenEnv writes it."""
    seen = {"total": total, "goal": goal, "parts": {"exact": float(total == goal)}, "metadata": {}}
    return json.dumps({"type": "observation", "data": {"observation": seen, "reward": reward, "done": total >= goal}})


@contextmanager
def serving(places: int = 4) -> Iterator[tuple[str, Twin]]:
    """Serves a twin on a free port; gives its URL."""
    twin = Twin(places)
    with serve(twin.session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", twin
        finally:
            server.shutdown()
            thread.join(30)
