"""No password stands in config.yaml: those of URLs are refused with where to put them, the store's is left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolecall.launcher.plan import write_config
from rolecall.settings import RunSettings

MakeSettings = Callable[..., RunSettings]


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


def test_the_stores_password_is_in_no_file(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(
        store={"url": "redis://user:pa55word@host:6379"}, trackers={"mlflow_uri": "https://mlflow.example"}
    )
    settings.run.dir.mkdir()
    text = write_config(settings).read_text()
    assert "pa55word" not in text
    assert "https://mlflow.example" in text
