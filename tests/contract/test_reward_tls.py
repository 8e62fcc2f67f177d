"""Certificates, authorities and tokens of reward services: what is called with them, what is refused at the start."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import ConfigError
from rolecall.reward import Score, Scorer, description, new_server, one_by_one
from rolecall.rpc.listening import rpc_section
from rolecall.scoring.client import open_client
from rolecall.scoring.scores import Failure
from rolecall.settings import RewardSection, RpcSection
from tests.contract.peer import Authority
from tests.contract.reward_peers import items_of


async def test_a_whole_reward_service_of_somebody_elses_is_called_over_tls_with_its_own_authority(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "tls")
    tls = authority.issue("scorer")
    (tmp_path / "token").write_text("s3cret\n")
    spec = description("half", (0, 1), ("response_text",), {}, token_rewards=False, max_items=0)
    rpc = rpc_section(tls.certificate_file, tls.key_file, behind_mesh=False)
    server = new_server(Scorer(spec, one_by_one(lambda item: 0.5, spec), bearer_token="s3cret"), "localhost:0", rpc)
    address = await server.start()
    section = RewardSection(
        address=address,
        ca_file=authority.ca_file,
        bearer_token_file=tmp_path / "token",
        timeout_s=5.0,
        max_attempts=1,
    )
    try:
        client, channel = open_client(section, address, RpcSection())
        assert await client.score(items_of("a")) == [Score(0.5)]
        (tmp_path / "token").write_text("another\n")
        (refused,) = await client.score(items_of("a"))
        assert isinstance(refused, Failure)
        assert (refused.code, refused.retryable) == ("UNAUTHENTICATED", True)
        (tmp_path / "token").write_text("s3cret\n")
        assert await client.score(items_of("a")) == [Score(0.5)], "a token is read again when it was replaced"
        await channel.close()
        stranger = Authority(tmp_path / "theirs")
        client, channel = open_client(section.model_copy(update={"ca_file": stranger.ca_file}), address, RpcSection())
        (failure,) = await client.score(items_of("a"))
        assert isinstance(failure, Failure)
        assert failure.retryable
        assert "CERTIFICATE_VERIFY_FAILED" in failure.message
        await channel.close()
    finally:
        await server.drain(0.0)


def test_roots_that_are_no_certificates_are_said_at_once(tmp_path: Path) -> None:
    for text in ("", "garbage", "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"):
        (tmp_path / "ca.pem").write_text(text)
        with pytest.raises(ConfigError, match=r"ca_file: .*ca\.pem holds no certificate"):
            open_client(RewardSection(address="h:1", ca_file=tmp_path / "ca.pem"), "h:1", RpcSection())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"ca_file": "system", "components": {"c": {"scorer": {"kind": "json"}}}}, "need address"),
        ({"bearer_token_file": "token", "components": {"c": {"scorer": {"kind": "json"}}}}, "need address"),
        ({"address": "h:1", "tls": True}, "Extra inputs are not permitted"),
    ],
)
def test_tls_of_the_reward_service_is_whole_or_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardSection.model_validate(section)


def test_a_token_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path / "empty"):
        (tmp_path / "empty").write_text(" \n")
        with pytest.raises(ConfigError, match="bearer_token_file"):
            open_client(RewardSection(address="h:1", bearer_token_file=path), "h:1", RpcSection())


def test_half_a_certificate_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        rpc_section(tmp_path / "cert.pem", None, behind_mesh=False)
    with pytest.raises(ConfigError, match="the fields are"):
        description("x", (0, 1), ["answer"], {}, token_rewards=False, max_items=0)  # type: ignore[list-item]
