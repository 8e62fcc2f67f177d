"""The weight channel between two machines, as far as the network goes: the actor and one rollout in one network
namespace, another rollout at the end of a cable in a namespace of its own, where no memory is shared.
"""

import shutil
from pathlib import Path

import pytest

from tests.forks import Talking
from tests.integration.test_weights_ports import has_namespaces
from tests.integration.weights_machines import publish_to_two_machines

pytestmark = pytest.mark.skipif(
    not has_namespaces() or shutil.which("ip") is None,
    reason="this machine lets nobody make a network namespace (unshare --net), or has no `ip`",
)


def test_a_fleet_of_which_one_rollout_is_elsewhere_gets_all_its_weights_over_gloo(tmp_path: Path) -> None:
    process = Talking(tmp_path / "log", publish_to_two_machines, True)
    sent, here, there = (process.line() for _ in range(3))
    assert here == there == {"channel": "GlooChannel", "digest": sent["digest"]}


def test_where_shared_memory_was_asked_for_the_rollout_elsewhere_names_itself(tmp_path: Path) -> None:
    process = Talking(tmp_path / "log", publish_to_two_machines, False)
    sent, here, there = (process.line() for _ in range(3))
    assert (sent["error"], here["error"]) == ("CHANNEL_BROKEN", "CHANNEL_BROKEN")
    assert there["error"] == "NOT_ON_THIS_DEVICE"
    assert "does not see the memory of the actor's machine" in sent["message"]


def test_with_a_root_on_either_machine_no_weight_leaves_one(tmp_path: Path) -> None:
    process = Talking(tmp_path / "log", publish_to_two_machines, False, 2)
    sent, here, there = (process.line() for _ in range(3))
    assert here == there == {"channel": "SharedReceiver", "digest": sent["digest"]}
