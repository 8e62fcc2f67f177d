"""Ports that cannot be had: named with their setting and why, before a run begins and by the server that needed one."""

import asyncio
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.commands.check import find_problems, require
from rolecall.errors import ConfigError
from rolecall.rpc.listening import advertised, why_not
from rolecall.rpc.server import Server
from rolecall.settings import RpcSection, load_settings
from tests.twins.launched import write_light_config


@pytest.fixture
def taken() -> Iterator[str]:
    """An address of loopback that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_why_an_address_cannot_be_listened_on(taken: str, tmp_path: Path) -> None:
    assert why_not(taken).startswith("is in use: another process listens there; stop it, or choose another port")
    assert why_not("192.0.2.1:50051") == "is not an address of this machine; use 127.0.0.1, 0.0.0.0 or one of its own"
    assert why_not("no-such-host.invalid:1").startswith("names a host that is not known")
    assert why_not("127.0.0.1:0") == why_not("localhost:0") == why_not(f"unix:{tmp_path}/s") == ""
    assert why_not(f"unix:{tmp_path}/none/s").endswith("/none, which does not exist; make it")
    assert why_not("unix:/" + "d" * 200).endswith("a socket's may have 107; choose a shorter one")


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("controller.bind", []),
        ("reward.bind", []),
        ("critic.bind", ["algorithm.advantage={kind: gae}"]),
        ("references.ref.bind", ["algorithm.kl={reference: ref, kl_coef: 0.1}"]),
        ("rollout.bind", ["rollout.num_replicas=1"]),
    ],
)
def test_a_port_in_use_is_named_with_its_setting_before_anything_starts(
    tmp_path: Path, taken: str, setting: str, more: list[str]
) -> None:
    config = write_light_config(tmp_path)
    settings = load_settings(config, [*more, f"{setting}={taken}"])
    (told,) = find_problems(settings, io.StringIO())
    assert told.startswith(
        f"{setting} {taken} is in use: another process listens there; stop it, or choose another port"
    )
    with pytest.raises(ConfigError, match=f"{setting} {taken} is in use"):
        require(settings, io.StringIO())


def test_one_port_for_two_roles_and_for_several_replicas_is_refused(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    # no port that the kernel gives to connections: they come and go beside this test
    both = ["controller.bind=127.0.0.1:23456", "reward.bind=127.0.0.1:23456"]
    (told,) = find_problems(load_settings(config, both), io.StringIO())
    assert told == "reward.bind 127.0.0.1:23456 is controller.bind's, too; give each its own port, or 0 for a free one"
    (told,) = find_problems(
        load_settings(config, ["rollout.num_replicas=2", "rollout.bind=127.0.0.1:23456"]), io.StringIO()
    )
    assert (
        told == "rollout.bind 127.0.0.1:23456 is the address of every replica's, too; give each its own port, or 0 for "
        "a free one"
    )


async def test_the_server_that_finds_its_port_taken_names_the_setting(taken: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"cannot listen on {taken} \(actor\.bind\): it is in use: another process listens there"
    ):
        await Server(RpcSection(), taken, setting="actor.bind").start()


async def test_a_port_that_is_given_up_in_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.rpc.server._PORT_PATIENCE_S", 60.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = Server(RpcSection(), address)
        starting = asyncio.ensure_future(server.start())
        await asyncio.sleep(0.5)
        assert not starting.done()
    assert await starting == address
    await server.drain(0.0)


def test_a_role_whose_port_is_taken_ends_for_good_and_names_the_setting(tmp_path: Path, taken: str) -> None:
    command = [sys.executable, "-m", "services.reward", str(write_light_config(tmp_path)), "--reward.bind", taken]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, "restarting cannot help"
    assert ended.stderr.splitlines()[-1].startswith(
        f"reward failed: cannot listen on {taken} (reward.bind): it is in use: another process listens there; stop it"
    )


def test_what_listens_everywhere_is_announced_by_the_address_that_its_peer_sees() -> None:
    assert advertised("0.0.0.0:9005", None, "192.0.2.1:9000").endswith(":9005")
    assert advertised("0.0.0.0:9005", None, "192.0.2.1:9000") != "0.0.0.0:9005"
    assert advertised("0.0.0.0:9005", "pod-3", "192.0.2.1:9000") == "pod-3:9005"
    assert advertised("10.0.0.4:9005", None, "192.0.2.1:9000") == "10.0.0.4:9005"
    assert advertised("unix:/run/rollout.sock", None, "192.0.2.1:9000") == "unix:/run/rollout.sock"
    with pytest.raises(ConfigError, match=r"rollout\.advertise_host"):
        advertised("0.0.0.0:9005", None, "controller.invalid:9000")
