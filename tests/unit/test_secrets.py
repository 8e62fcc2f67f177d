"""No password stands in config.yaml: those of URLs are refused with where to put them, the store's is left out."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from rolecall.errors import ConfigError
from rolecall.launcher.plan import write_config
from rolecall.settings import StoreSection, load_settings
from tests.conftest import MakeSettings


def run(url: str) -> dict[str, Any]:
    return {"run": {"name": "test", "dir": "run", "num_steps": 1, "checkpoint_url": url}}


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        (run("s3://key:pa55word@bucket/runs"), "AWS_SECRET_ACCESS_KEY"),
        (run("ftp://user:pa55word@host/runs"), "FSSPEC_FTP_PASSWORD"),
        ({"trackers": {"mlflow_uri": "https://user:pa55word@mlflow.example"}}, "MLFLOW_TRACKING_PASSWORD"),
        ({"trackers": {"mlflow_uri": "https://token@mlflow.example"}}, "MLFLOW_TRACKING_TOKEN"),
    ],
)
def test_a_password_in_a_url_is_refused_with_where_it_belongs(
    make_settings: MakeSettings, sections: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValidationError, match=remedy):
        make_settings(**sections)


@pytest.mark.parametrize(
    "url", ["s3://bucket/runs", "abfs://container@account.dfs.core.windows.net/runs", "/mnt/a:b@c/runs"]
)
def test_urls_without_a_password_are_taken(make_settings: MakeSettings, url: str) -> None:
    assert make_settings(**run(url)).run.checkpoint_url == url


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr/etpw@10.0.0.1:6379/0",
        "redis://:s3cr?et@host:6379/0",
        "redis://user:s3cr#et@host:6379",
        "redis://:1234/s3cr@host:6379/0",
        "redis://user:1234?s3cr@host:6379",
        "redis://user:1234#s3cr@host:6379",
        "rediss://u:s3cr[ss@host:6379",
        "redis://u:s3cr\u2100x@host:6379/0",
        "redis+cluster://:s3cr/et@127.0.0.1:7000",
        "redis+cluster://a:1,b:s3cr",
        "redis+sentinel://u:s3cr/et@h:26379/main",
        "redis+sentinel://u:s3cr#et@h:26379/main",
        "unix://:s3cr/et@/run/store.sock",
        "unix://localhost/run/store.sock",
        "s3cr@host:6379",
        "http://user:s3cr@host:6379",
    ],
)
def test_a_store_url_that_cannot_be_read_is_refused_with_nothing_of_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("run: {name: test, dir: run, num_steps: 1}\n")
    monkeypatch.setenv("ROLECALL_STORE_URL", url)
    with pytest.raises(ConfigError) as refused:
        load_settings(config)
    line = next(line for line in refused.value.message.splitlines() if line.startswith("  store.url: "))
    assert ("percent-encoded" in line and "a socket has no host: unix:///path" in line) or "write redis://" in line
    assert "s3cr" not in refused.value.message
    assert "1234" not in refused.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis:///1",
        "redis://user:p%2Fw@[::1]:6379/0?ssl_ca_certs=/etc/a@b.pem&",
        "rediss://:p@w@host:6379",
        "redis+sentinel://me:mine@a:1,b:2/main?username=s&password=p@w",
        "redis+cluster://me:mine@a:1,b",
        "unix:///run/a@b/store.sock?db=1",
        "unix://me:mine@/run/store.sock",
    ],
)
def test_store_urls_that_can_be_read_are_taken(url: str) -> None:
    assert StoreSection(url=SecretStr(url)).url == SecretStr(url)


def test_the_stores_password_is_in_no_file(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(
        store={"url": "redis://user:pa55word@host:6379"}, trackers={"mlflow_uri": "https://mlflow.example"}
    )
    settings.run.dir.mkdir()
    text = write_config(settings).read_text()
    assert "pa55word" not in text
    assert "https://mlflow.example" in text
