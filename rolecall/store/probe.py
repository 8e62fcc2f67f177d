"""Whether the store of a configuration answers and holds no other run of the name, asked once before anything starts:
within seconds, and with what to do when it does not.
"""

import socket
import ssl
from urllib.parse import unquote, urlsplit

from redis.exceptions import InvalidResponse

from rolecall.errors import ConfigError, StoreUnavailableError
from rolecall.settings import RunSettings, StoreSection
from rolecall.store.connection import connect
from rolecall.store.ledger import Ledger
from rolecall.store.position import RunPosition

PROBE_S = 3.0
"""Deadline of the connection, and again of each answer."""


def find_store(section: StoreSection) -> tuple[str, tuple[str, ...]]:
    """Connects to the external store of `section` as every role will; returns where it is, without the password, and
    what it did not let be seen. ConfigError says what is wrong with it.
    """
    assert section.url is not None
    url = section.url.get_secret_value()
    where = place_of(url)
    try:
        connection = connect(section, timeout_s=PROBE_S, retry_s=0.0)
        connection.close()
    except StoreUnavailableError as error:
        raise ConfigError(f"store.url: {where} {_problem(error, url)}") from error
    except ConfigError as error:
        raise ConfigError(f"store.url: {where}: {error.message}") from error
    return where, connection.taken_on_trust


def require_free_name(settings: RunSettings) -> None:
    """Raises ConfigError when the store of a run that is to begin holds another one of its name.

    The new run would take its keys and weights for its own.
    """
    name, position = settings.run.name, _position(settings)
    if position.next_gid:
        raise ConfigError(
            f"run.name {name!r} is taken: the store holds a run of that name, at step {position.step} with "
            f"{position.admitted} groups admitted. Give this "
            "run another run.name; or go on with that one from its own run.dir with --resume; or, if nobody needs "
            f"it, delete its keys ({{rl:{name}...)"
        )


def holds_run(settings: RunSettings) -> bool:
    """Whether the external store of a run has ever admitted a group of its name."""
    return _position(settings).next_gid > 0


def place_of(url: str) -> str:
    """Returns where the store of a URL is, without user and password."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


def _position(settings: RunSettings) -> RunPosition:
    connection = connect(settings.store)
    try:
        return Ledger(connection, settings.run.name).position()
    finally:
        connection.close()


def _problem(error: StoreUnavailableError, url: str) -> str:
    secure = url.startswith("rediss")
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        match cause:
            case ssl.SSLCertVerificationError():
                return (
                    f"shows a certificate that is not trusted ({cause.verify_message}); end the URL with "
                    "?ssl_ca_certs=FILE, the roots that signed it"
                )
            case ssl.SSLError() if cause.reason == "WRONG_VERSION_NUMBER":
                return "does not speak TLS; write redis:// instead of rediss://, or the port on which it does"
            case ssl.SSLError():
                return (
                    f"and this side cannot agree on TLS ({cause.reason or cause}); correct the files that the URL names"
                    ", or, where the server wants a certificate of this side, add ssl_certfile=FILE&ssl_keyfile=FILE"
                )
            case socket.gaierror():
                return f"names a host that is not known ({cause.strerror}); correct it"
            case FileNotFoundError() if secure:
                return "was not asked: a file that the URL names is not there; correct ssl_ca_certs and its like"
            case ConnectionRefusedError() | FileNotFoundError():
                return f"cannot be reached ({cause.strerror}); start the server, or correct the URL"
            case InvalidResponse():
                return (
                    "answers, but not as Redis does; correct the host and the port of the URL"
                    f"{'' if secure else ', or, if it speaks TLS, write rediss://'}"
                )
            case TimeoutError():
                return (
                    f"did not answer within {PROBE_S:g} s; is it the right address, does a firewall let it "
                    f"through{', does it speak TLS' * secure}?"
                )
    words = str(causes[1] if len(causes) > 1 else error.message).partition(" : <")[0]
    return (
        f"cannot be used ({words}); start the server, or correct the "
        f"URL{'' if secure else '; if it speaks TLS, write rediss://'}"
    )
