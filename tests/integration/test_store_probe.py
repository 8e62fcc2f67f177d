"""An external store that cannot be used is told within seconds, with what to do, before anything is started."""

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import redis
from pydantic import SecretStr

from rolecall.errors import ConfigError
from rolecall.settings import StoreSection
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.probe import find_store
from tests.contract.peer import Authority
from tests.ports import free_port

PASSWORD = "pa55word"


def serve_tls(authority: Authority, opened: ExitStack) -> int:
    """A port that speaks TLS and hangs up after it."""
    pair, context = authority.issue("store"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate_file, pair.key_file)
    listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError), context.wrap_socket(connection, server_side=True):
                    pass

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def serve_pages(opened: ExitStack) -> int:
    """A port on which a web server answers."""
    server = opened.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler))
    opened.callback(server.shutdown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, store_server: EmbeddedStore) -> Iterator[dict[str, str]]:
    """What the URLs below name."""
    folder, port = tmp_path_factory.mktemp("stores"), free_port()
    options = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--requirepass",
        PASSWORD,
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--logfile", str(folder / "log")]
    with ExitStack() as opened:
        server = opened.enter_context(subprocess.Popen([store_server.binary, *options, *durable]))
        opened.callback(server.terminate)
        with redis.Redis(
            port=port, password=PASSWORD, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), 200)
        ) as client:
            client.ping()
        (folder / "garbage.pem").write_text("no certificate\n")
        (folder / "theirs").mkdir()
        silent = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield {
            "store": f"127.0.0.1:{port}",
            "tls": f"127.0.0.1:{serve_tls(Authority(folder / 'ours'), opened)}",
            "silent": f"127.0.0.1:{silent.getsockname()[1]}",
            "web": f"127.0.0.1:{serve_pages(opened)}",
            "nobody": f"127.0.0.1:{free_port()}",
            "theirs": str(Authority(folder / "theirs").ca_file),
            "garbage": str(folder / "garbage.pem"),
            "none": str(folder / "none.pem"),
        }


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://{nobody}", "{nobody} cannot be reached (Connection refused); start the server, or correct the URL"),
        ("redis://{silent}", "{silent} did not answer within 3 s; is it the right address"),
        ("redis://no-such-host.invalid:6379", "no-such-host.invalid:6379 names a host that is not known"),
        (
            "redis://{store}",
            "{store}: the store refuses this user: Authentication required.; check the user, password and rights",
        ),
        ("redis://:wrong@{store}", "{store}: the store refuses this user: invalid username-password pair"),
        (
            "rediss://{store}",
            "{store} did not answer within 3 s; is it the right address, does a firewall let it through, does it "
            "speak TLS?",
        ),
        ("redis://:secret@{tls}", "if it speaks TLS, write rediss://"),
        (
            "redis://:secret@{web}",
            "{web} answers, but not as Redis does; correct the host and the port of the URL, or",
        ),
        ("redis+cluster://:secret@{web}", "{web} answers, but not as Redis does; correct the host and the port"),
        (
            "rediss://{tls}",
            "{tls} shows a certificate that is not trusted (unable to get local issuer certificate); end the URL "
            "with ?ssl_ca_certs=FILE",
        ),
        ("rediss://{tls}?ssl_ca_certs={theirs}", "{tls} shows a certificate that is not trusted"),
        (
            "rediss://{tls}?ssl_ca_certs={garbage}",
            "cannot agree on TLS (NO_CERTIFICATE_OR_CRL_FOUND); correct the files that the URL names",
        ),
        ("rediss://{tls}?ssl_ca_certs={none}", "a file that the URL names is not there"),
        ("unix:///no/such.sock", "/no/such.sock cannot be reached (No such file or directory)"),
        ("redis+cluster://{nobody}", "{nobody} cannot be reached (Connection refused)"),
        ("redis+sentinel://{nobody}/main", "No master found for 'main'"),
        ("redis://:secret@{nobody}?ssl_ca_cert=/roots", "unexpected keyword argument 'ssl_ca_cert'"),
        ("rediss://:secret@{nobody}?ssl_ca_cert=/roots", "unexpected keyword argument 'ssl_ca_cert'"),
        ("redis://:secret@{nobody}?ssl_ca_certs={theirs}", "unexpected keyword argument 'ssl_ca_certs'"),
        ("rediss+sentinel://{nobody}/main?ssl_ca_cert=/roots", "unexpected keyword argument 'ssl_ca_cert'"),
        ("rediss://:secret@{nobody}?ssl_cert_reqs=maybe", "Requirements Flag: maybe"),
        ("redis+cluster://:secret@{nobody}?ssl_ca_cert=/roots", "unexpected keyword argument 'ssl_ca_cert'"),
        ("rediss+cluster://:secret@{nobody}?ssl_ca_cert=/roots", "unexpected keyword argument 'ssl_ca_cert'"),
        ("redis+cluster://:secret@{nobody}?ssl_ca_certs={theirs}", "unexpected keyword argument 'ssl_ca_certs'"),
        ("rediss+cluster://:secret@{nobody}?ssl_cert_reqs=maybe", "Requirements Flag: maybe"),
        ("rediss+cluster://:secret@{nobody}?ssl_min_version=3", "does not read ssl_min_version; leave it out"),
        ("redis+sentinel://:secret@{nobody}/main?pasword=p", "does not read pasword; leave it out"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_with_its_place_and_what_to_do(
    places: dict[str, str], url: str, told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        find_store(StoreSection(url=SecretStr(url.format(**places))))
    assert refused.value.message.startswith("store.url: ")
    assert told.format(**places) in refused.value.message
    assert "secret" not in refused.value.message
    assert "<" not in refused.value.message, "no object of a library's"


def test_a_store_that_can_be_used_is_named_without_its_password(places: dict[str, str]) -> None:
    assert find_store(StoreSection(url=SecretStr(f"redis://:{PASSWORD}@{places['store']}"))) == (places["store"], ())
