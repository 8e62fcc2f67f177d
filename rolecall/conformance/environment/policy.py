"""The policy that a kit shows to agents: an endpoint on loopback for OpenAI's chat completions, which says what a row
has it say, and which waits, fails or refuses as a check wants it to. One thread a connection.
"""

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

MODEL = "policy"
"""Name of the policy at the endpoint."""
LOOK_S = 0.05
"""Seconds between two looks whether the endpoint is to close."""
HELD_S = 60.0
"""Longest that an answer is held back."""
_REFUSED = {
    401: ("invalid_api_key", "the key is of no episode that is under way"),
    403: ("episode_over", "the episode's calls are spent; end it as it stands"),
    404: ("not_found", "the kit serves chat completions and models alone"),
    500: ("unavailable", "the engine has failed"),
}


@dataclass(eq=False)
class Script:
    """The policy of one key. Changed by a check, read by the endpoint's threads."""

    texts: Sequence[str]
    """What it says, one call after the other, and from the first on again."""
    max_calls: int
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    status: int = 0
    """A status that every call gets; 0: an answer."""
    going: Event = field(default_factory=Event)
    """Calls wait until it is set."""
    num_asked: int = 0
    """Calls that came."""
    num_answered: int = 0

    def revoke(self) -> None:
        """Refuses whatever comes with the key from now on, and what waits."""
        self.status = 401
        self.going.set()


class PolicyEndpoint:
    """An endpoint on loopback. `start` before anything else, `close` at the end."""

    def __init__(self) -> None:
        self._scripts: dict[str, Script] = {}
        self._server: _PolicyServer | None = None
        self.base_url = ""
        """URL for clients, once it listens."""

    def start(self) -> None:
        """Listens, in a thread."""
        server = self._server = _PolicyServer(self._scripts)
        self.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        Thread(target=lambda: server.serve_forever(LOOK_S), name="policy", daemon=True).start()

    def script(self, texts: Sequence[str], *, max_calls: int, status: int = 0, is_held: bool = False) -> Script:
        """A policy with a key of its own."""
        script = Script(texts or ("",), max_calls, status=status)
        if not is_held:
            script.going.set()
        self._scripts[script.key] = script
        return script

    def close(self) -> None:
        """Answers nobody any more."""
        for script in self._scripts.values():
            script.revoke()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _PolicyServer(ThreadingHTTPServer):
    """The endpoint's server, with what its threads share."""

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        super().__init__(("127.0.0.1", 0), _Calls)
        self.scripts = scripts
        self.numbers = itertools.count(1)
        self.lock = Lock()


class _Calls(BaseHTTPRequestHandler):
    """A connection to the endpoint."""

    server: _PolicyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: a report tells what was seen."""

    def do_GET(self) -> None:
        listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "kit"}]}
        self._tell(*((200, listed) if self.path.endswith("/models") else _refused(404)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        script = self.server.scripts.get(self.headers.get("Authorization", "").removeprefix("Bearer ").strip())
        if script is None or not self.path.endswith("/chat/completions"):
            self._tell(*_refused(401 if script is None else 404))
            return
        with self.server.lock:
            script.num_asked += 1
        script.going.wait(HELD_S)
        with self.server.lock:
            status = script.status or (403 if script.num_answered == script.max_calls else 200)
            text = script.texts[script.num_answered % len(script.texts)]
            script.num_answered += status == 200
        if status != 200:
            self._tell(*_refused(status))
        elif json.loads(body).get("stream"):
            self._stream(text)
        else:
            said = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": said, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self._tell(200, {**self._head("chat.completion"), "choices": [choice], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{next(self.server.numbers)}", "object": kind, "created": 0, "model": MODEL}

    def _stream(self, text: str) -> None:
        head = self._head("chat.completion.chunk")
        deltas: list[tuple[dict[str, Any], str | None]]
        deltas = [({"role": "assistant", "content": ""}, None), ({"content": text}, None), ({}, "stop")]
        choices = [{"index": 0, "delta": delta, "finish_reason": reason} for delta, reason in deltas]
        lines = [json.dumps({**head, "choices": [choice]}) for choice in choices]
        self._send(200, "text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))

    def _tell(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # its client left
            self.close_connection = True


def _refused(status: int) -> tuple[int, dict[str, Any]]:
    code, message = _REFUSED[status]
    return status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
