"""The ways that do not leave a GPU's memory: NCCL's calls and its abort, and transfers between two processes over NCCL
and through slots on the device. Skipped without a CUDA device.

Where there is one GPU, the processes are two hosts to NCCL, which else refuses two ranks on it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rolecall.errors import ChannelBrokenError
from rolecall.settings import WeightBackend
from rolecall.weights.channel import join
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.weights.rendezvous import RendezvousServer
from tests.forks import Talking
from tests.integration.weights_receivers import MEET_S, further_root, receiver, seeded_weights
from tests.nccl_hosts import as_host

pytestmark = pytest.mark.gpu
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch")
SHARES_GPU = torch.cuda.device_count() < 2


@pytest.fixture(autouse=True)
def root_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process needs before its first communicator."""
    for name, value in (as_host("root") if SHARES_GPU else {}).items():
        monkeypatch.setenv(name, value)


@needs_a_gpu
def test_a_lone_rank_broadcasts_over_nccl_and_closes() -> None:
    device = torch.device("cuda", 0)
    host = RendezvousServer("127.0.0.1")  # it ends with its last reference
    rendezvous = host.enter(1)
    channel = join(rendezvous, 1, "nccl", device, MEET_S)
    bucket = torch.arange(1000, dtype=torch.uint8, device=device)
    expected = bucket.clone()
    channel.broadcast(bucket, MEET_S).wait(MEET_S)
    assert torch.equal(bucket, expected)
    channel.close()
    channel.close()
    rendezvous.close()


@needs_a_gpu
def test_a_rank_that_waits_for_a_peer_is_freed_by_its_deadline_and_by_an_abort() -> None:
    device = torch.device("cuda", 0)
    host = RendezvousServer("127.0.0.1")
    late = host.enter(1)
    with pytest.raises(ChannelBrokenError, match="did not meet"):
        join(late, 2, "nccl", device, 2.0)
    late.close()
    aborted = host.enter(2)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, aborted, 2, "nccl", device, MEET_S)
        time.sleep(1)
        start = time.monotonic()
        aborted.abort("the test says so")
        with pytest.raises(ChannelBrokenError, match="the test says so"):
            joining.result(timeout=MEET_S)
        assert time.monotonic() - start < MEET_S / 2
    aborted.close()


@needs_a_gpu
def test_where_one_receiver_is_on_cpus_all_take_the_weights_from_host_memory(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    named = [(f"w{i}", torch.randn(1000, 1000, device=device)) for i in range(16)]
    root = Publisher(device)
    address = root.open(1, 3, "127.0.0.1", "shared", MEET_S)
    others = [
        Talking(tmp_path / place, receiver, address, 1, rank, 3, 30.0, None, "shared", place)
        for rank, place in ((1, "cuda:0"), (2, "cpu"))
    ]
    try:
        manifest = build_manifest(named, 2**20)
        sent = root.publish(iter(named), manifest, epoch=1, policy_version=1, bucket_timeout_s=30)
        said = [other.line() for other in others]
        assert [(each["digest"], each["device"]) for each in said] == [(sent.digest, "cpu")] * 2
    finally:
        for other in others:
            other.kill()
    root.close()


@needs_a_gpu
def test_with_a_root_on_each_gpu_every_receiver_takes_the_weights_from_its_own(tmp_path: Path) -> None:
    """Where there is one GPU, both roots are on it."""
    places = ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"]
    root, weights = Publisher(torch.device(places[0])), seeded_weights(places[0])
    address = root.open(1, 3, "127.0.0.1", "shared", MEET_S, num_roots=2)
    further = Talking(tmp_path / "further", further_root, address, 3, places[1])
    others = [
        Talking(tmp_path / str(rank), receiver, address, 1, rank, 3, 30.0, None, "shared", place)
        for rank, place in enumerate(places, start=1)
    ]
    try:
        manifest = build_manifest(weights, 2**20)
        sent = root.publish(iter(weights), manifest, epoch=1, policy_version=1, bucket_timeout_s=30)
        assert further.line() == "sent"
        said = [other.line() for other in others]
        assert [(each["digest"], each["device"]) for each in said] == [(sent.digest, place) for place in places]
    finally:
        for process in (further, *others):
            process.kill()
    root.close()


@needs_a_gpu
@pytest.mark.parametrize("backend", ["nccl", "shared"])
def test_two_processes_agree_on_what_was_sent_and_a_killed_receiver_breaks_its_epoch_alone(
    tmp_path: Path, backend: WeightBackend
) -> None:
    device = torch.device("cuda", 0)
    named = [(f"w{i}", torch.randn(1000, 1000, device=device).to(torch.bfloat16)) for i in range(64)]
    manifest = build_manifest(named, 16 * 2**20)
    root = Publisher(device)
    apart = backend == "nccl" and not SHARES_GPU
    place, environment = ("cuda:1", {}) if apart else ("cuda:0", as_host("receiver"))
    for epoch, stop_after in ((1, None), (2, 2), (3, None)):
        address = root.open(epoch, 2, "127.0.0.1", backend, MEET_S)
        log = tmp_path / f"{epoch}.log"
        other = Talking(log, receiver, address, epoch, 1, 2, 30.0, stop_after, backend, place, environment)
        try:
            if stop_after is None:
                sent = root.publish(iter(named), manifest, epoch=epoch, policy_version=epoch, bucket_timeout_s=30)
                said = other.line()
                assert (said["digest"], said["device"]) == (sent.digest, place)
                continue
            with ThreadPoolExecutor(1) as pool:
                publishing = pool.submit(
                    root.publish, iter(named), manifest, epoch=epoch, policy_version=epoch, bucket_timeout_s=10
                )
                assert other.line() == {"stopped": 2}
                other.kill()
                with pytest.raises(ChannelBrokenError):
                    publishing.result(timeout=MEET_S)
        finally:
            other.kill()
    root.close()
