"""What a replica makes of its workers' reports of one load."""

from typing import Any

import pytest

from rolecall.errors import ChannelBrokenError, TornWeightsError, WeightsMismatchError
from rolecall.weights.report import agreed_report, wire_error
from rolecall.weights.transferred import Transferred


def worker(digest: str = "d", **more: Any) -> dict[str, Any]:
    arrived = {"fingerprints": {"q": 1, "k": 2}, "digest": digest, "num_bytes": 8, "wire_bytes": 6, "transfer_s": 0.5}
    return {"state": "loaded", "error": None, "arrived": arrived, "unread": [], **more}


def test_workers_that_agree_make_one_report() -> None:
    arrived = agreed_report(7, [worker(), worker()])
    assert arrived == Transferred({"q": 1, "k": 2}, "d", num_bytes=8, wire_bytes=6, transfer_s=0.5)
    assert list(arrived.fingerprints) == ["q", "k"]


@pytest.mark.parametrize("torn_is_last", [True, False])
def test_one_torn_worker_tears_the_replica_whatever_the_others_say(torn_is_last: bool) -> None:
    broken = wire_error(ChannelBrokenError("the epoch is over"))
    untouched, torn = worker(error=broken, arrived=None), worker(error=broken, arrived=None, state="torn")
    with pytest.raises(TornWeightsError, match="the epoch is over") as raised:
        agreed_report(7, [untouched, torn] if torn_is_last else [torn, untouched])
    assert raised.value.details["cause"] == ChannelBrokenError.reason


def test_an_error_before_anything_was_touched_keeps_its_kind() -> None:
    with pytest.raises(ChannelBrokenError, match="over"):
        agreed_report(7, [worker(), worker(error=wire_error(ChannelBrokenError("over")))])


def test_workers_that_received_different_weights_are_refused() -> None:
    with pytest.raises(WeightsMismatchError, match="different weights"):
        agreed_report(7, [worker("d"), worker("e")])


def test_stages_leave_each_other_what_is_the_others() -> None:
    agreed_report(7, [worker(unread=["k"]), worker(unread=["q"])])
    agreed_report(7, [worker(unread=["k", "q"]), worker(unread=["q"]), worker(unread=["k"])])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_tensor_that_every_worker_left_unread_is_named_and_tears_the_replica(num_workers: int) -> None:
    with pytest.raises(TornWeightsError, match="no worker of the engine has a place for k; the model and the actor"):
        agreed_report(7, [worker(unread=["k"]), worker(unread=["q", "k"])][:num_workers])
    names = [f"k{number}" for number in range(5)]
    with pytest.raises(TornWeightsError, match="a place for k0, k1, k2 and 2 more;"):
        agreed_report(7, [worker(unread=names), worker(unread=names)])
