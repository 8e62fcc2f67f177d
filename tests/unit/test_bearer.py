"""A bearer token is the file's as it stands at a call."""

import logging
from pathlib import Path

import pytest

from rolecall.errors import ConfigError
from rolecall.rpc.tls import BearerToken, read_token, token_of


def test_a_token_that_is_replaced_is_read_again_and_one_that_is_gone_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, new = tmp_path / "token", tmp_path / "new"
    file.write_text(" first\n")
    token = BearerToken(file)
    assert token() == "first"
    new.write_text("other\n")
    new.replace(file)  # as a cluster renews its secrets
    assert token() == "other"
    with caplog.at_level(logging.WARNING):
        for broken in (lambda: file.write_text(""), file.unlink):
            broken()
            assert token() == token() == "other"
    assert [record.message.partition(":")[0] for record in caplog.records] == ["keeping the old bearer token"] * 2
    file.write_text("last")
    assert token() == "last"


def test_a_file_without_a_token_is_refused_at_the_start(tmp_path: Path) -> None:
    assert token_of(None) is None
    assert read_token(None) is None
    with pytest.raises(ConfigError, match="bearer_token_file: cannot read"):
        token_of(tmp_path / "absent")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty; write the token into it"):
        read_token(tmp_path / "empty")
