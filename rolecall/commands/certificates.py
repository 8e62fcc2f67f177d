"""`rolecall certificates`: an authority of one run and a certificate for each role and person, for development,
Compose and Slurm.

The layout is that of Kubernetes' TLS secrets as cert-manager writes them, which is where production takes them from:
DIR/<role>/{tls.crt, tls.key, ca.crt}. The authority's own key stays in DIR, which no role needs to see.
"""

import datetime
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.rpc.callers import Caller
from rolecall.settings import RpcSection

AUTHORITY_DAYS = 3650
SERVERS = re.compile(r"store|environment-[a-z0-9-]+")
"""The folders of a server of the store, and of environments that the run calls as its roles call each other: where one
has a host, a certificate that names this alone, for it calls no role.
"""
_SKEW = datetime.timedelta(minutes=5)
"""Certificates are valid a little before now: clocks differ."""


class Authority:
    """A certificate authority: `ca.crt` and `ca.key` of a folder."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def made(cls, name: str) -> "Authority":
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = _builder(subject, subject, key.public_key(), datetime.timedelta(days=AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, folder: Path) -> "Authority":
        """The one in `folder`. ConfigError when it cannot be used."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{folder} holds no authority that can sign ({error}); take ca.crt and ca.key from where they were "
                "made, or name another folder"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{folder}: ca.key is not the key of ca.crt; take both from where they were made")
        return cls(certificate, key)

    def write(self, folder: Path) -> None:
        """Writes both files."""
        _replace(folder / "ca.key", _key_pem(self._key), 0o600)
        _replace(folder / "ca.crt", _pem(self.certificate), 0o644)

    def issue(
        self,
        folder: Path,
        uris: Sequence[str],
        hosts: Sequence[str],
        valid: datetime.timedelta,
        roots: Sequence["Authority"] = (),
    ) -> None:
        """Writes a new key and certificate with these names to `folder`, and the roots: its own unless others are
        given.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [*(x509.UniformResourceIdentifier(uri) for uri in uris), *(_host_name(host) for host in hosts)]
        builder = _builder(x509.Name([]), self.certificate.subject, key.public_key(), valid)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "ca.crt", b"".join(_pem(root.certificate) for root in roots or [self]), 0o644)
        _replace(folder / "tls.key", _key_pem(key), 0o600)
        _replace(folder / "tls.crt", _pem(builder.sign(self._key, hashes.SHA256())), 0o644)


def certificates(
    directory: Path, run: str, hosts: Sequence[str], *, days: float, renew: bool, spiffe_id: str | None = None
) -> int:
    """Writes DIR as the command line says and prints what was made; 0. ConfigError when DIR holds an authority and
    `renew` is false, or for a host that is not ROLE=NAME.
    """
    named = _hosts(hosts)
    template = RpcSection(spiffe_id=spiffe_id).spiffe_id if spiffe_id else RpcSection().spiffe_id
    with writing("write", directory):
        directory.mkdir(parents=True, exist_ok=True)
        is_there = (directory / "ca.crt").exists() or (directory / "ca.key").exists()
        if is_there and not renew:
            raise ConfigError(
                f"{directory} holds an authority already, and a new one would be nobody's; --renew makes new "
                "certificates from it, or name another folder"
            )
        authority = Authority.read(directory) if is_there else Authority.made(f"rolecall {run}")
        if not is_there:
            authority.write(directory)
        for role in Caller:
            uri = template.removesuffix("/{instance}").replace("{run}", run).replace("{role}", role)
            names = [role, "localhost", "127.0.0.1", "::1", *named[role]]
            authority.issue(directory / role, [uri.replace("{instance}", role)], names, datetime.timedelta(days=days))
        for server in filter(SERVERS.fullmatch, named):
            authority.issue(directory / server, [], named[server], datetime.timedelta(days=days))
    sys.stdout.write(
        f"{len(Caller)} certificates of run {run}, valid for {days:g} days, in {directory}/<role>; in the "
        f"configuration: rpc.tls: {{certificate_file: {directory}/{{role}}/tls.crt, "
        f"key_file: {directory}/{{role}}/tls.key, ca_file: {directory}/{{role}}/ca.crt}}\n"
    )
    return 0


def _hosts(given: Sequence[str]) -> Mapping[str, list[str]]:
    named: dict[str, list[str]] = {role: [] for role in Caller}
    for word in given:
        role, equals, name = word.partition("=")
        if not (role in named or SERVERS.fullmatch(role)) or not equals or not name:
            others = "store and environment-NAME of environments.NAME"
            raise ConfigError(f"--host {word} is not ROLE=NAME; roles are {', '.join(Caller)}, {others}")
        named.setdefault(role, []).append(name)
    return named


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(min(now, now + valid) - _SKEW).not_valid_after(now + valid)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Writes the file whole: who reads it meanwhile gets the old one or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    beside.replace(path)
