"""Environments of OpenEnv as one of ours, by functions of yours: what an observation reads like, and what action a turn
means. ADR 74 says why its own client is not used.

Owns one WebSocket for each episode, which is given up with the first answer that does not come: answers have no
numbers there, so a late one would pass for the next. Bounds: one message under way, deadlines on each.
"""

import json
import socket
import struct
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias, overload
from urllib.parse import quote, urlsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from rolecall.address import is_loopback_host
from rolecall.data.json_text import parse_json
from rolecall.environment.env import Action, Answer, Env, Messages, Opening, Task
from rolecall.errors import ConfigError, EpisodeLostError, RateLimitedError
from rolecall.scoring.scores import Score

UNREADABLE = "That is no action."
CONNECT_S = 10.0
"""Deadline of a connection, and of a page of tasks."""
CLOSE_S = 2.0
"""Time in which a connection ends in order; then it is cut."""
FULL_S = 1.0
"""What callers are told to wait for a place."""
MAX_BYTES = 100 * 2**20
"""Longest message that is read, as OpenEnv's own client reads."""
Observed: TypeAlias = Mapping[str, Any]
"""An answer as it came: `observation`, `reward`, `done`, and perhaps `metadata`."""


def given(observed: Observed) -> float | None:
    """The reward as it was given; None stays None, which is not 0."""
    return None if observed["reward"] is None else float(observed["reward"])


def listed_at(task: Task) -> dict[str, Any]:
    """Returns what a Reset is told of a task that `tasks_of` listed: its split and its index there."""
    place = {name: task.metadata[name] for name in ("split", "index") if name in task.metadata}
    return place if "index" not in place else {**place, "index": int(place["index"])}


class OpenEnv(Env):
    """An episode in an environment of OpenEnv's. Serve it with `turn_rewards=True`: every step's reward is its turn's,
    the last one's the episode's; and with no more max_sessions than the server has places. What it calls a malformed
    action, and a turn that means none, steps nothing, earns nothing and is told the policy.
    """

    def __init__(
        self,
        url: str,
        render_text: Callable[[Mapping[str, Any]], Messages | Opening],
        parse_action: Callable[[Action], Mapping[str, Any] | None],
        *,
        score: Callable[[Observed], float | Score | None] = given,
        reset_with: Callable[[Task], Mapping[str, Any]] = listed_at,
        headers: Mapping[str, str] | None = None,
        reset_timeout_s: float = 55.0,
        step_timeout_s: float = 25.0,
    ) -> None:
        """`url`: of the server, http or https. `render_text` says what an observation reads like, the fields of
        OpenEnv's Observation; `parse_action` what action a turn means, the fields of its Action; None: none. score:
        what a step earned, as a Score with components at the end, if they are somewhere in the observation.
        reset_with: further arguments of reset, beside the seed. headers: of HTTP, such as a token. The two deadlines
        are those of an answer; less than the environment is served with.
        """
        self._url = url
        self._render = render_text
        self._parse = parse_action
        self._score = score
        self._reset_with = reset_with
        self._headers = headers
        self._reset_s, self._step_s = reset_timeout_s, step_timeout_s
        self._socket: ClientConnection | None = None
        self._open = ExitStack()
        """Ends the connection."""

    def reset(self, task: Task, seed: int) -> Messages | Opening:
        """Opens a connection, which is a session there, and begins the episode."""
        self._socket = self._connected()
        observed = self._told("reset", {"seed": seed, **self._reset_with(task)}, self._reset_s)
        if observed is None or observed["done"]:
            raise EpisodeLostError(f"{self._url} takes no such reset, or is over before the first turn")
        return self._render(observed["observation"])

    def step(self, action: Action) -> str | Answer:
        """Takes one step. OpenEnv does not say what was cut short: an episode that is done came to its end."""
        meant = self._parse(action)
        observed = None if meant is None else self._told("step", meant, self._step_s)
        if observed is None:
            return UNREADABLE
        messages = self._render(observed["observation"])
        if isinstance(messages, Opening):
            messages = messages.messages
        return Answer(messages, self._score(observed), is_over=bool(observed["done"]))

    def grade(self) -> float:
        """Nothing on top of what the turns earned."""
        return 0.0

    def close(self) -> None:
        """Ends the session there with its connection."""
        if self._socket is not None:
            with suppress(ConnectionClosed):
                self._socket.send('{"type": "close"}')
        self._give_up()

    def _connected(self) -> ClientConnection:
        """Returns a new connection. RateLimitedError where there is no server to have a place at: that is waited
        for.
        """
        parts = urlsplit(self._url)
        url = f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        try:
            opened = self._open.enter_context(
                connect(
                    url,
                    additional_headers=self._headers,
                    proxy=None if is_loopback_host(parts.hostname or "") else True,
                    open_timeout=CONNECT_S,
                    close_timeout=CLOSE_S,
                    ping_timeout=None,  # pings keep ways open; who is there shows in answers
                    max_size=MAX_BYTES,
                )
            )
        except (OSError, InvalidHandshake) as error:
            if isinstance(error, InvalidStatus) and error.response.status_code not in (429, 502, 503, 504):
                raise EpisodeLostError(f"{url} takes no connection: {error}") from error
            raise RateLimitedError(f"{url} cannot be reached: {error}", retry_after_s=str(FULL_S)) from error
        # a server that reads no more must not hold whoever writes; one that is full has said so and hung up by now
        with suppress(OSError):
            opened.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self._step_s) + 1, 0))
        return opened

    def _told(self, kind: str, data: Mapping[str, Any], timeout_s: float) -> Observed | None:
        """Returns the answer to a message; None where its data is malformed. RateLimitedError without a place,
        EpisodeLostError for everything else, which ends the connection.
        """
        if self._socket is None:
            raise EpisodeLostError("its connection was given up")
        try:
            with suppress(ConnectionClosed):  # who is refused may hear it on a closed connection
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = parse_json(self._socket.recv(timeout=timeout_s, decode=True))
            told, what = answer["data"], answer["type"]
            if what == "observation" and {"observation", "reward", "done"} <= told.keys():
                return dict(told)
            code = told.get("code") if what == "error" else "no observation"
        except (TimeoutError, ConnectionClosed, ValueError, TypeError, KeyError, AttributeError) as error:
            self._give_up()
            raise EpisodeLostError(f"{self._url} answered no {kind}: {type(error).__name__}: {error}") from error
        if code == "VALIDATION_ERROR":
            return None
        self._give_up()
        said = f"{self._url} answered a {kind} with {code}: {told.get('message', '')}"
        if code == "CAPACITY_REACHED":
            raise RateLimitedError(said, retry_after_s=str(FULL_S))
        raise EpisodeLostError(said)

    def _give_up(self) -> None:
        self._socket = None
        self._open.close()


class _Split(Sequence[Task]):
    """The tasks of one split, read from the server as they are asked for."""

    def __init__(self, ask: Callable[..., Any], split: str, task_of: Callable[[str, int, Any], Task]) -> None:
        self._ask = ask
        self._split = split
        self._task_of = task_of
        self._num = int(ask("num_tasks", split=split)["num_tasks"])

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, int):
            start = range(len(self))[index]
            return self[start : start + 1][0]
        start, stop, step = index.indices(len(self))
        tasks = self._ask("task_range", split=self._split, start=start, stop=stop)["tasks"] if start < stop else []
        return [self._task_of(self._split, i, task) for i, task in enumerate(tasks, start)][::step]


def tasks_of(
    url: str, task_of: Callable[[str, int, Any], Task], headers: Mapping[str, str] | None = None
) -> dict[str, Sequence[Task]]:
    """The tasks of OpenEnv's Task API by split, to be served with the environment: `task_of(split, index, task)` makes
    ours of what a server has there, with `split` and `index` in the metadata, which `listed_at` reads. ConfigError
    where it cannot be asked, or has no such API.
    """

    is_here = is_loopback_host(urlsplit(url).hostname or "")
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] if is_here else [])

    def ask(path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        told = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{url.rstrip('/')}/{path}", data, told)
        try:
            with opener.open(request, timeout=CONNECT_S) as answer:
                return parse_json(answer.read().decode())
        except (OSError, ValueError) as error:  # an answer of HTTP's that is an error, too
            raise ConfigError(f"{request.full_url} lists no tasks: {error}; leave tasks out, or correct it") from error

    (name, *_) = ask("list_environments")
    folder = quote(name)
    splits = [split["name"] for split in ask(f"{folder}/splits")]
    return {split: _Split(lambda path, **body: ask(f"{folder}/{path}", **body), split, task_of) for split in splits}
