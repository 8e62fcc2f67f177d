"""`weights.ports` in a network namespace of its own, as a pod has one: what listens keeps to it, or nothing starts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rolecall.errors import ConfigError
from rolecall.rpc.listening import require_ports
from rolecall.settings import WeightsSection
from tests.forks import Talking
from tests.integration.weights_receivers import listening_ports


def has_namespaces() -> bool:
    """Whether this machine lets its users make network namespaces."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "--net", "--map-root-user", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not has_namespaces(), reason="this machine lets nobody make a network namespace (unshare --net)")
def test_rendezvous_ranks_and_collectives_listen_inside_the_range_alone(tmp_path: Path) -> None:
    process = Talking(tmp_path / "log", listening_ports, "29500-29599")
    said = process.line()
    assert said["agreed"]
    assert len(said["listening"]) == 5, "the rendezvous, rank 0's watch, and the three ranks of the channel"
    assert all(29500 <= port <= 29599 for port in said["listening"])
    process.process.join(30)
    assert process.process.exitcode == 0


def test_a_range_that_the_kernel_does_not_keep_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r'set net\.ipv4\.ip_local_port_range to "1024 1025"'):
        require_ports(WeightsSection(ports="1024-1025"))
    require_ports(WeightsSection())
    require_ports(WeightsSection(ports="1024-65535"))


@pytest.mark.parametrize("text", ["29500", "29599-29500", "80-90", "29500-70000", "a-b", "-"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write first-last between 1024 and 65535"):
        WeightsSection(ports=text)
