"""Certificates, authorities and tokens of environments: what is called with them, what is refused at the start."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands.check import find_problems
from rolecall.environment.client import environment_channel
from rolecall.environment.server import SERVICE_NAME, EnvironmentServicer, description
from rolecall.environment.sessions import Sessions
from rolecall.errors import ConfigError, EnvironmentAwayError
from rolecall.rpc.listening import rpc_section
from rolecall.rpc.server import Server
from rolecall.settings import EnvironmentSection, RpcSection, TlsSection, load_settings
from rolecall.v1.environment_pb2_grpc import add_EnvironmentServiceServicer_to_server
from tests.contract.environment_peers import Counting, client_of, environment, task
from tests.contract.peer import Authority
from tests.twins.launched import write_light_config

SECRET = "s3cret-of-the-environment"


def server_of(tls: TlsSection) -> RpcSection:
    return rpc_section(tls.certificate_file, tls.key_file, behind_mesh=False)


async def test_an_environment_of_somebody_elses_is_played_in_over_tls_with_its_own_authority_and_token(
    tmp_path: Path,
) -> None:
    authority, run = Authority(tmp_path / "tls"), Authority(tmp_path / "run")
    (tmp_path / "token").write_text(f"{SECRET}\n")
    ours = RpcSection(tls=run.issue("rollout-0"))  # a run with certificates of its own, which the environment knows not
    reached: dict[str, Any] = {"ca_file": authority.ca_file, "bearer_token_file": tmp_path / "token"}
    async with environment(token=SECRET, rpc=server_of(authority.issue("environment"))) as (address, _):
        for rpc in (RpcSection(), ours):
            async with client_of(address, rpc, **reached) as client:
                session = client.session(f"run/7/{rpc is ours}/a-1", "run/7", 1)
                await session.reset(task(), 1)
                answer = await session.step("end 0.5", is_cut=False)
                assert answer.reward.value == 0.5
                session.leave()
        with pytest.raises(EnvironmentAwayError, match="CERTIFICATE_VERIFY_FAILED"):
            async with client_of(address, **{**reached, "ca_file": run.ca_file}):
                pass
        with pytest.raises(EnvironmentAwayError, match="needs its bearer token") as refused:
            async with client_of(address, ca_file=authority.ca_file):
                pass
        (tmp_path / "token").write_text("wrong\n")
        with pytest.raises(EnvironmentAwayError):
            async with client_of(address, **reached):
                pass
        assert SECRET not in refused.value.message


async def test_an_environment_with_a_certificate_of_the_runs_authority_is_reached_as_the_roles_are(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "tls")
    async with environment(rpc=server_of(authority.issue("environment"))) as (address, _):
        async with client_of(address, RpcSection(tls=authority.issue("rollout-0"))) as client:
            assert client.spec.name == "counting"


async def test_an_environment_that_asks_for_a_certificate_is_shown_the_runs_own_and_none_by_roots_alone(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "tls")
    served, ours = authority.issue("environment"), authority.issue("rollout-0")
    sessions = Sessions(Counting, description("mutual", (0, 1)))
    server = Server(RpcSection(tls=served), "127.0.0.1:0", client_certificates=True)
    server.add(add_EnvironmentServiceServicer_to_server, EnvironmentServicer(sessions), SERVICE_NAME)
    address = await server.start()
    try:
        async with client_of(address, RpcSection(tls=ours)) as client:
            assert client.spec.name == "mutual"
        with pytest.raises(EnvironmentAwayError):
            async with client_of(address, RpcSection(tls=ours), ca_file=authority.ca_file):
                pass
    finally:
        await sessions.close()
        await server.drain(0.0)


def test_files_that_are_missing_or_no_credentials_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for fields, told in (
        ({"ca_file": tmp_path / "none"}, "ca_file: cannot read"),
        ({"ca_file": tmp_path / "empty"}, "ca_file: .*empty holds no certificate"),
        ({"bearer_token_file": tmp_path / "none"}, "bearer_token_file: cannot read"),
        ({"bearer_token_file": tmp_path / "empty"}, "bearer_token_file: .*empty is empty"),
    ):
        with pytest.raises(ConfigError, match=told):
            environment_channel(EnvironmentSection(address="h:1", **fields), RpcSection())
        override = (
            f"environments.game={{address: 'h:1', {', '.join(f'{name}: {path}' for name, path in fields.items())}}}"
        )
        problems = find_problems(load_settings(write_light_config(tmp_path), [override]), io.StringIO())
        assert [problem for problem in problems if problem.startswith(f"environments.game: {told.split(':')[0]}: ")], (
            problems
        )


async def test_check_asks_an_environment_with_its_authority_and_token_and_prints_no_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "wrong").write_text("wrong")
    async with environment(token=SECRET, rpc=server_of(authority.issue("environment"))) as (address, _):
        for token, told in (
            ("token", f"environments.game.address {address} answers"),
            ("wrong", "refuses the credentials"),
        ):
            section = f"{{address: '{address}', ca_file: {authority.ca_file}, bearer_token_file: {tmp_path / token}}}"
            settings = load_settings(write_light_config(tmp_path), [f"environments.game={section}"])
            out = io.StringIO()
            problems = await asyncio.to_thread(find_problems, settings, out)
            assert told in out.getvalue() + "".join(problems)
            assert SECRET not in out.getvalue() + "".join(problems)
