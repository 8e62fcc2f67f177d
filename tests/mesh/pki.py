"""Certificates for sidecars, as a mesh gives them out: each names one SPIFFE identity and nothing else."""

import datetime
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

VALID = datetime.timedelta(days=1)


def write_certificates(folder: Path, identities: Mapping[str, str]) -> None:
    """Makes an authority and, for each name, a folder with tls.crt, tls.key and ca.crt."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    authority = ec.generate_private_key(ec.SECP256R1())
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    root = _builder(name, name, authority).add_extension(constraints, critical=True).sign(authority, hashes.SHA256())
    for who, identity in identities.items():
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        builder = _builder(x509.Name([]), name, key).add_extension(alternative, critical=True)
        own = folder / who
        own.mkdir(parents=True)
        (own / "tls.crt").write_bytes(builder.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
        (own / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (own / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
    )
