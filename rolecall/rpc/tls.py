"""Credentials from files, which rotate without a restart: servers read them again at each handshake when they changed,
clients look before each call (`Renewal`, `BearerToken`), HTTP servers when they are told to (`HttpsCertificate`).
"""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

from rolecall.errors import ConfigError
from rolecall.settings import TlsSection

logger = logging.getLogger(__name__)


def server_credentials(tls: TlsSection, client_certificates: bool) -> grpc.ServerCredentials:
    """Returns the server's side of TLS. With `client_certificates` it is mutual: clients must present one signed by
    `tls.ca_file`. ConfigError when a file cannot be read.
    """
    # None from the fetcher means "unchanged", which gRPC documents and the published types leave out.
    return grpc.dynamic_ssl_server_credentials(_configuration(tls), _changed_configuration(tls), client_certificates)  # type: ignore[arg-type]


def mutual_credentials(tls: TlsSection) -> grpc.ChannelCredentials:
    """The roles' credentials among themselves: our certificate, their roots, as they stand in the files now.
    ConfigError when one cannot be used.
    """
    key, certificate = _pair(tls)
    return grpc.ssl_channel_credentials(read_roots(tls.ca_file, "rpc.tls.ca_file"), key, certificate)


def public_credentials(ca_file: Path | None) -> grpc.ChannelCredentials:
    """TLS towards somebody else's service: the roots in `ca_file`, else the system's; no certificate of ours.
    ConfigError when the file cannot be used.
    """
    return grpc.ssl_channel_credentials(read_roots(ca_file, "ca_file") if ca_file else None)


def with_bearer_token(credentials: grpc.ChannelCredentials, token: Callable[[], str]) -> grpc.ChannelCredentials:
    """Sends `authorization: Bearer <token>` with each call, what `token` gives then, over TLS only."""
    return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_Bearer(token)))


def read(path: Path, name: str) -> bytes:
    """Bytes of a file; ConfigError naming the setting when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error


def read_roots(path: Path, name: str) -> bytes:
    """PEM of the certificates to trust; ConfigError naming the setting when the file cannot be read or holds none. gRPC
    would only fail to connect.
    """
    pem = read(path, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{name}: {path} holds no certificate that can be read ({error.reason or error}); name a PEM file"
        ) from error
    return pem


def _pair(tls: TlsSection) -> tuple[bytes, bytes]:
    key, certificate = read(tls.key_file, "rpc.tls.key_file"), read(tls.certificate_file, "rpc.tls.certificate_file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
            tls.certificate_file, tls.key_file, password=lambda: b""
        )
    except ssl.SSLError as error:
        raise ConfigError(
            f"rpc.tls: {tls.certificate_file} and {tls.key_file} are no certificate with its key "
            f"({error.reason or error}); name two PEM files that belong "
            "together, the key without a password"
        ) from error
    return key, certificate


def _configuration(tls: TlsSection) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([_pair(tls)], read_roots(tls.ca_file, "rpc.tls.ca_file"))


class HttpsCertificate:
    """The certificate of an HTTP server of ours. Used from one thread."""

    def __init__(self, tls: TlsSection) -> None:
        """ConfigError when the files cannot be used."""
        self._tls, self._renewal = tls, Renewal(tls)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        """The server's side of TLS; connections made from now on show what `renew` last took."""
        self._load()

    def renew(self) -> None:
        """Takes the files' certificate where they changed since the last look, and it fits its key."""
        if not self._renewal.changed():
            return
        try:
            self._load()
        except ConfigError as error:
            logger.warning("keeping the old TLS certificate for HTTP: %s", error)

    def _load(self) -> None:
        _pair(self._tls)  # a pair that does not fit must not reach the context that is in use
        self.context.load_cert_chain(self._tls.certificate_file, self._tls.key_file)


class BearerToken:
    """The token that a file holds, white space around it removed. Read again by a call that finds the file changed;
    while it cannot be read, the one before stands. Any thread may ask.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError when the file cannot be read or is empty."""
        self._path = path
        self._stamp, self._token = self._stamp_now(), _token_in(path)

    def __call__(self) -> str:
        """The token as it stands now."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp  # said once; what is half-way through a rotation changes again
            try:
                self._token = _token_in(self._path)
                logger.info("calls use the new bearer token from %s", self._path)
            except ConfigError as error:
                logger.warning("keeping the old bearer token: %s", error)
        return self._token

    def _stamp_now(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return found.st_mtime_ns, found.st_ino, found.st_size


def token_of(path: Path | None) -> BearerToken | None:
    """The bearer token in a file, as it stands at each call. ConfigError when the file cannot be read or is empty."""
    return None if path is None else BearerToken(path)


def read_token(path: Path | None) -> str | None:
    """The bearer token in a file now. ConfigError when the file cannot be read or is empty."""
    return None if path is None else BearerToken(path)()


def _token_in(path: Path) -> str:
    token = read(path, "bearer_token_file").decode().strip()
    if not token:
        raise ConfigError(f"bearer_token_file: {path} is empty; write the token into it")
    return token


class _Bearer(grpc.AuthMetadataPlugin):
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback((("authorization", f"Bearer {self._token()}"),), None)


class Renewal:
    """A watch over the files of a section. Used from one thread."""

    def __init__(self, tls: TlsSection) -> None:
        self._tls = tls
        self._seen = self._stamp()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """New credentials when the files changed since the last look; None while they stay, and while they do not fit
        together: half-way through a rotation.
        """
        if not self.changed():
            return None
        try:
            credentials = mutual_credentials(self._tls)
        except ConfigError as error:
            logger.warning("keeping the old TLS certificate for calls: %s", error)
            return None
        logger.info("calls use the new TLS certificate from %s", self._tls.certificate_file)
        return credentials

    def changed(self) -> bool:
        """Whether the files changed since the last look."""
        before, self._seen = self._seen, self._stamp()
        return self._seen != before

    def _stamp(self) -> tuple[int, ...]:
        return tuple(
            path.stat().st_mtime_ns if path.exists() else 0
            for path in (self._tls.key_file, self._tls.certificate_file, self._tls.ca_file)
        )


def _changed_configuration(tls: TlsSection) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    def stamp() -> list[int]:
        return [path.stat().st_mtime_ns for path in (tls.key_file, tls.certificate_file, tls.ca_file)]

    last = stamp()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        try:
            now = stamp()
            if now == last:
                return None
            configuration, last = _configuration(tls), now
        except (OSError, ConfigError) as error:  # half-way through a rotation: the next handshake tries again
            logger.warning("keeping the old TLS certificate: %s", error)
            return None
        logger.info("TLS certificate replaced from %s", tls.certificate_file)
        return configuration

    return fetch
