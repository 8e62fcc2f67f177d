"""Whether the store of a configuration answers, asked once before anything starts: within seconds, and with what to do
when it does not.
"""

import socket
import ssl
from urllib.parse import urlsplit

from rolecall.errors import ConfigError, StoreUnavailableError
from rolecall.settings import StoreSection
from rolecall.store.connection import connect

PROBE_S = 3.0
"""Deadline of the connection, and again of each answer."""


def find_store(section: StoreSection) -> str:
    """Connects to the external store of `section` as every role will; returns where it is, without the password.
    ConfigError says what is wrong with it.
    """
    assert section.url is not None
    url = section.url.get_secret_value()
    where = _where(url)
    try:
        connect(section, timeout_s=PROBE_S, retry_s=0.0).close()
    except StoreUnavailableError as error:
        raise ConfigError(f"store.url: {where} {_problem(error, url)}") from error
    except ConfigError as error:
        raise ConfigError(f"store.url: {where}: {error.message}") from error
    return where


def _where(url: str) -> str:
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


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
                )
            case socket.gaierror():
                return f"names a host that is not known ({cause.strerror}); correct it"
            case FileNotFoundError() if secure:
                return "was not asked: a file that the URL names is not there; correct ssl_ca_certs and its like"
            case ConnectionRefusedError() | FileNotFoundError():
                return f"cannot be reached ({cause.strerror}); start the server, or correct the URL"
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
