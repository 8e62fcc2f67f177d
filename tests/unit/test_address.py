"""What an address is, and which ones stay on this machine."""

import pytest

from rolecall.address import endpoints_of, host_of, is_loopback
from rolecall.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "stays"),
    [
        ("127.0.0.1:9000", True),
        ("localhost:9000", True),
        ("[::1]:9000", True),
        ("unix:/run/actor.sock", True),
        ("ipv4:127.0.0.1:9000,127.0.0.2:9000", True),
        ("ipv4:127.0.0.1:9000,10.0.0.2:9000", False),
        ("ipv4:10.0.0.2:9000,127.0.0.1:9000", False),
        ("dns:///localhost:9000", True),
        ("dns:///actor.cluster:9000", False),
        ("0.0.0.0:9000", False),
    ],
)
def test_an_address_stays_on_this_machine_when_every_endpoint_of_it_does(address: str, stays: bool) -> None:
    assert is_loopback(address) is stays


def test_an_address_of_several_replicas_has_an_endpoint_each() -> None:
    assert endpoints_of("ipv4:10.0.0.1:9000,10.0.0.2:9000") == ["10.0.0.1:9000", "10.0.0.2:9000"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:port", ":", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        host_of(address)
