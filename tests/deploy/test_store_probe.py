"""The liveness probe of the store on a cluster, as the kubelet runs it, against real servers."""

import signal
import subprocess
import sys

import pytest
import yaml

from tests.deploy.kubernetes_objects import ROOT, of_kind
from tests.servers import PlainServer, PlainServers


@pytest.fixture
def store(servers: PlainServers) -> PlainServer:
    """A server that wants a password, as the users of the run's store have one."""
    return servers.start(requirepass="secret")


def is_live(port: int) -> bool:
    """Whether the probe of the base says so of the server at `port`."""
    objects = list(yaml.safe_load_all((ROOT / "base" / "store.yaml").read_text()))
    (container,) = of_kind(objects, "StatefulSet")["store"]["spec"]["template"]["spec"]["containers"]
    probe = container["livenessProbe"]
    _, *words = probe["exec"]["command"]
    command = [sys.executable, *(word.replace("6379", str(port)) for word in words)]
    return subprocess.run(command, capture_output=True, timeout=probe["timeoutSeconds"]).returncode == 0


def test_a_store_that_hangs_is_not_live_and_one_that_wants_a_password_is(store: PlainServer) -> None:
    """The kernel takes connections for a process that stands still."""
    assert is_live(store.port)
    store.signal(signal.SIGSTOP)
    assert not is_live(store.port)
    store.signal(signal.SIGCONT)
    assert is_live(store.port)
    store.kill()
    assert not is_live(store.port)
