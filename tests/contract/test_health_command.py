"""`rolecall health` tells a probe whether a role can do its job, with the role's own TLS, and loads nothing heavy."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from rolecall.rpc.server import Server
from rolecall.settings import RpcSection, TlsSection
from tests.contract.peer import Authority


def config(folder: Path, address: str, tls: TlsSection | None = None) -> Path:
    """A file with no more than the command reads."""
    tree = {"controller": {"bind": f"0.0.0.0:{address.rpartition(':')[2]}"}}
    if tls is not None:
        tree["rpc"] = {"tls": tls.model_dump(mode="json")}  # type: ignore[dict-item]
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@asynccontextmanager
async def role(tls: TlsSection) -> AsyncIterator[tuple[Server, str]]:
    """A server with nothing but its health."""
    server = Server(RpcSection(tls=tls), "127.0.0.1:0")
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.drain(0.1)


async def health(*words: object) -> tuple[int, str]:
    """Exit code and all that the command says."""
    command = [sys.executable, "-m", "rolecall", "health", *map(str, words)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


async def test_a_role_is_asked_with_its_own_certificates(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ours").issue("controller")
    async with role(tls) as (server, address):
        file = config(tmp_path, address, tls)
        assert await health("controller", file) == (1, "controller: NOT_SERVING\n")
        assert await health("controller", file, "--live") == (0, "controller: SERVING\n")
        await server.set_serving(True)
        assert await health("controller", file) == (0, "controller: SERVING\n")
        code, said = await health("controller", config(tmp_path, address))
        assert code == 1
        assert "does not say that it is healthy" in said


async def test_an_address_is_asked_with_the_certificates_of_a_folder(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ours").issue("operator")
    for name, file in (("tls.crt", tls.certificate_file), ("tls.key", tls.key_file), ("ca.crt", tls.ca_file)):
        (tmp_path / name).write_bytes(file.read_bytes())
    async with role(tls) as (server, address):
        await server.set_serving(True)
        assert await health(address, "--tls", tmp_path) == (0, f"{address}: SERVING\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["actor"], "RUN is missing"),
        (["actor", "none.yaml"], "none.yaml"),
        (["actor", "run.yaml"], "actor.bind"),
        (["actor", "run.yaml", "--actor.bind", "nowhere"], "nowhere"),
        (["reference", "run.yaml"], "--name"),
        (["controler", "run.yaml"], "controler"),
        (["controller", "run.yaml", "--rpc.tls.ca_file", "ca.pem"], "rpc.tls.key_file"),
    ],
)
def test_what_cannot_be_asked_exits_with_2_and_says_what_to_mend(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rolecall.commands.cli import main

    monkeypatch.chdir(config(tmp_path, "localhost:1").parent)
    assert main(["health", *words]) == 2
    assert named in capsys.readouterr().err


def test_it_loads_neither_torch_nor_pydantic_nor_what_traces(tmp_path: Path) -> None:
    file = config(tmp_path, "localhost:1")
    code = (
        f"import sys; from rolecall.commands import cli; code = cli.main(['health', 'controller', {str(file)!r}]); "
        "print(code, sorted({'torch', 'pydantic', 'opentelemetry', 'numpy', 'redis'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "1 []"
