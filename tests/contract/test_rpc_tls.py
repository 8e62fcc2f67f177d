"""Connections between roles are mutual TLS from files, rotated without a restart; tokens never go in the clear."""

import os
from pathlib import Path

import pytest

from rolecall.errors import ConfigError, UnavailableError
from rolecall.rpc.channel import open_channel
from rolecall.settings import RpcSection, TlsSection
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.contract.peer import Authority, Peer, serving
from tests.twins.callers import party

GET = controller_pb2.GetRunRequest()


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


async def call(target: str, rpc: RpcSection, tls: bool | None = None, ca_file: Path | None = None) -> None:
    async with open_channel(target, rpc, tls=tls, ca_file=ca_file) as channel:
        await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(GET, timeout=5.0)


async def test_roles_with_certificates_of_one_authority_reach_each_other(peer: Peer, authority: Authority) -> None:
    async with serving(peer, party(tls=authority.issue("controller"))) as (_, address):
        await call(address, RpcSection(tls=authority.issue("operator")))
    assert peer.calls == ["GetRun"]


async def test_a_certificate_of_another_authority_is_refused(peer: Peer, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "theirs").issue("stranger")
    trusting = TlsSection(
        certificate_file=stranger.certificate_file, key_file=stranger.key_file, ca_file=authority.ca_file
    )
    async with serving(peer, party(tls=authority.issue("controller"))) as (_, address):
        with pytest.raises(UnavailableError):
            await call(address, RpcSection(tls=trusting))
    assert peer.calls == []


async def test_a_caller_without_a_certificate_is_refused(peer: Peer, authority: Authority) -> None:
    async with serving(peer, party(tls=authority.issue("controller"))) as (_, address):
        with pytest.raises(UnavailableError):
            await call(address, RpcSection(), tls=True, ca_file=authority.ca_file)
        with pytest.raises(UnavailableError):
            await call(address, RpcSection())
    assert peer.calls == []


async def test_a_replaced_certificate_is_used_without_a_restart(
    peer: Peer, authority: Authority, tmp_path: Path
) -> None:
    theirs = Authority(tmp_path / "theirs")
    served, old, new = authority.issue("controller"), authority.issue("operator"), theirs.issue("operator")
    async with serving(peer, party(tls=served)) as (_, address):
        await call(address, RpcSection(tls=old))
        for ours, replacement in zip(_files(served), _files(theirs.issue("controller")), strict=True):
            os.replace(replacement, ours)
        new_roots = served.ca_file  # now their roots
        await call(
            address,
            RpcSection(tls=TlsSection(certificate_file=new.certificate_file, key_file=new.key_file, ca_file=new_roots)),
        )


async def test_half_a_rotation_keeps_the_old_certificate(peer: Peer, authority: Authority) -> None:
    served, caller = authority.issue("controller"), authority.issue("operator")
    async with serving(peer, party(tls=served)) as (_, address):
        served.key_file.unlink()
        await call(address, RpcSection(tls=caller))


async def test_a_bearer_token_is_refused_on_plaintext() -> None:
    with pytest.raises(ConfigError, match="never sent in the clear"):
        open_channel("127.0.0.1:50051", RpcSection(), bearer_token=lambda: "secret")


async def test_calling_beyond_loopback_in_plaintext_is_refused_unless_behind_a_mesh() -> None:
    with pytest.raises(ConfigError, match=r"has no TLS; set rpc.tls, or .*ca_file"):
        open_channel("reward.example:50051", RpcSection())
    await open_channel("reward.example:50051", RpcSection(behind_mesh=True)).close()


async def test_a_missing_file_is_named(authority: Authority) -> None:
    tls = authority.issue("operator")
    tls.key_file.unlink()
    with pytest.raises(ConfigError, match=r"rpc.tls.key_file: cannot read .*operator.key"):
        open_channel("127.0.0.1:50051", RpcSection(tls=tls))


def _files(tls: TlsSection) -> list[Path]:
    return [tls.key_file, tls.certificate_file, tls.ca_file]
