"""`rolecall certificates`: an authority, and a certificate for each role."""

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from rolecall.commands.cli import main
from rolecall.rpc.callers import Caller


def names_of(folder: Path) -> x509.SubjectAlternativeName:
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_each_role_and_person_gets_a_certificate_that_says_who_it_is_and_where(tmp_path: Path) -> None:
    assert (
        main(["certificates", str(tmp_path), "--run", "sort", "--host", "actor=gpu-1", "--host", "actor=10.0.0.7"]) == 0
    )
    for role in Caller:
        folder, names = tmp_path / role, names_of(tmp_path / role)
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"spiffe://rolecall/rolecall/sort/{role}"]
        assert {role, "localhost"} <= set(names.get_values_for_type(x509.DNSName))
        assert stat.S_IMODE((folder / "tls.key").stat().st_mode) == 0o600
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(folder / "tls.crt", folder / "tls.key")
    actor = names_of(tmp_path / "actor")
    assert "gpu-1" in actor.get_values_for_type(x509.DNSName)
    assert "10.0.0.7" in {str(address) for address in actor.get_values_for_type(x509.IPAddress)}
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*/ca.key"))


def test_a_server_of_the_store_and_each_environment_get_a_certificate_that_names_its_host_and_no_caller(
    tmp_path: Path,
) -> None:
    hosts = {"store": "node-1", "environment-game": "games", "environment-tools": "tools"}
    words = [word for name, host in hosts.items() for word in ("--host", f"{name}={host}")]
    assert main(["certificates", str(tmp_path), "--run", "sort", *words]) == 0
    for name, host in hosts.items():
        assert [each.value for each in names_of(tmp_path / name)] == [host]
    assert len({(tmp_path / name / "tls.key").read_bytes() for name in hosts}) == 3


def test_an_authority_is_not_overwritten_and_certificates_are_renewed_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["certificates", str(tmp_path), "--run", "sort"]
    assert main(command) == 0
    root, old = (tmp_path / "ca.crt").read_bytes(), (tmp_path / "actor/tls.crt").read_bytes()
    assert main(command) == 2
    assert "--renew" in capsys.readouterr().err
    assert main([*command, "--renew"]) == 0
    assert (tmp_path / "ca.crt").read_bytes() == root
    assert (tmp_path / "actor/tls.crt").read_bytes() != old
    assert (tmp_path / "actor/ca.crt").read_bytes() == root
    (tmp_path / "ca.key").unlink()
    assert main([*command, "--renew"]) == 2
    assert "no authority that can sign" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["gpu-1", "actor=", "cook=gpu-1", "environment=games"])
def test_a_host_without_its_role_is_refused(tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certificates", str(tmp_path), "--run", "sort", "--host", host]) == 2
    assert "ROLE=NAME" in capsys.readouterr().err
