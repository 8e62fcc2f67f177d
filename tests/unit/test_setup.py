"""Where uv takes packages from in set-up: pip's sources, and no others."""

import pytest

from tools.setup import sources_of_pip


@pytest.fixture(autouse=True)
def no_index_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)


def test_uv_is_given_the_sources_of_pip_and_no_password_of_theirs_among_its_arguments() -> None:
    arguments, environment = sources_of_pip(
        {
            "global.index-url": "https://overruled/simple",
            "install.index-url": "https://me:secret@mirror/simple",
            "global.extra-index-url": "\nhttps://one/simple\nhttps://two/simple",
            ":env:.find-links": "/wheels https://me:secret@mirror/wheels",
            "global.trusted-host": "mirror one:8080",
            "global.only-binary": ":all:",
            "global.cert": "/my certificates/ca.pem",
            "global.timeout": "60",
        }
    )
    assert arguments == ["--only-binary=:all:", "--allow-insecure-host=mirror", "--allow-insecure-host=one:8080"]
    assert environment == {
        "UV_DEFAULT_INDEX": "https://me:secret@mirror/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,https://me:secret@mirror/wheels",
        "SSL_CERT_FILE": "/my certificates/ca.pem",
    }


@pytest.mark.parametrize(("said", "arguments"), [("1", ["--no-index"]), ("True", ["--no-index"]), ("0", []), ("", [])])
def test_uv_asks_no_index_where_pip_may_not(said: str, arguments: list[str]) -> None:
    assert sources_of_pip({":env:.no-index": said}) == (arguments, {})
