"""What ActorService promises of the weights that it publishes, over a real connection, store and model."""

import asyncio
import threading
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from rolecall.errors import (
    ChannelBrokenError,
    OutOfOrderError,
    StaleEpochError,
    StaleVersionError,
)
from rolecall.rpc.channel import open_channel
from rolecall.store.rows import Rows
from rolecall.v1 import actor_pb2, actor_pb2_grpc, weights_pb2
from rolecall.v1.training_pb2 import (
    GetTrainerInfoRequest,
)
from rolecall.weights.backends import decode_backend
from rolecall.weights.channel import join
from rolecall.weights.deltas.base import Base
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.weights.transferred import Transferred
from rolecall.wire import decode_tensor
from tests.fixtures_store import StoreUnderTest
from tests.twins.callers import party
from tests.twins.run import ServedActor, served
from tests.twins.served import PROBE, MakeRun, publish_request, served_actor, true_logprobs
from tests.twins.trainer import ActorTwin
from tests.waiting import until

WITHIN_S = 60.0


def receive(opened: weights_pb2.OpenWeightChannelResponse, epoch: int) -> tuple[dict[str, torch.Tensor], str]:
    """One transfer of a channel of two ranks, as a rollout would take it."""
    rendezvous = Rendezvous(opened.address, epoch, 1, 10.0)
    channel = join(rendezvous, 2, decode_backend(opened.backend), torch.device("cpu"), 10.0)
    reception = Reception(channel, agreed_manifest(rendezvous, 10.0), 10.0)
    received = {name: tensor for bucket in reception for name, tensor in bucket}
    return received, reception.result().digest


async def test_published_weights_are_those_of_the_step_with_their_probe(
    store: StoreUnderTest, make_run: MakeRun, model: Path
) -> None:
    ctl = store.ledger.ctl
    async with served_actor(make_run(), store) as (_, actor):
        opened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=2, timeout_s=10), timeout=10
        )
        published, (received, digest) = await asyncio.gather(
            actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=30),
            asyncio.to_thread(receive, opened, 1),
        )
        info = await actor.GetInfo(GetTrainerInfoRequest(), timeout=30)
        with pytest.raises(StaleVersionError):
            await actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=30)
        with pytest.raises(OutOfOrderError):
            await actor.PublishWeights(publish_request(ctl, step=1, version=6), timeout=30)
        with pytest.raises(StaleEpochError):
            await actor.OpenWeightChannel(
                weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=2, timeout_s=10), timeout=10
            )
    expected = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert set(received) == set(expected)
    assert all(torch.equal(received[name], expected[name]) for name in expected)
    assert (published.digest, info.policy_version) == (digest, 5)
    np.testing.assert_allclose(
        decode_tensor(published.probe.logprobs, "probe"), true_logprobs(model, PROBE, 1.0), atol=1e-4
    )
    assert not published.probe.HasField("again")


async def test_a_publish_compiles_nothing(
    store: StoreUnderTest, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rollouts wait for the manifest within a deadline that knows the probe's arithmetic alone."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward  # no kernels, which take minutes

    monkeypatch.setattr("torch.compile", partial(torch.compile, backend=backend))
    settings = make_run(actor={"torch_compile": True})
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": "bfloat16"})})
    ctl = store.ledger.ctl
    async with served_actor(settings, store) as (_, actor):
        num_at_start = len(compiled)
        opened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=2, timeout_s=10), timeout=10
        )
        published, _ = await asyncio.gather(
            actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=30),
            asyncio.to_thread(receive, opened, 1),
        )
    assert published.probe.HasField("again")
    assert len(compiled) == num_at_start > 0


async def test_the_last_version_goes_out_again_over_another_epoch_while_the_weights_are_the_same(
    store: StoreUnderTest, make_run: MakeRun
) -> None:
    ctl = store.ledger.ctl
    async with served_actor(make_run(), store) as (_, actor):

        async def publish(epoch: int, version: int) -> str:
            opened = await actor.OpenWeightChannel(
                weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=epoch, world_size=2, timeout_s=10), timeout=10
            )
            request = publish_request(ctl, step=0, version=version, epoch=epoch)
            published, (_, digest) = await asyncio.gather(
                actor.PublishWeights(request, timeout=30), asyncio.to_thread(receive, opened, epoch)
            )
            assert published.digest == digest
            return digest

        assert await publish(1, 5) == await publish(2, 5) == await publish(3, 6)
        with pytest.raises(StaleVersionError, match="never go back"):
            await actor.PublishWeights(publish_request(ctl, step=0, version=5, epoch=3), timeout=30)


@pytest.mark.parametrize(
    ("configured", "answered"),
    [
        (None, weights_pb2.WEIGHT_BACKEND_SHARED),
        ("shared", weights_pb2.WEIGHT_BACKEND_SHARED),
        ("gloo", weights_pb2.WEIGHT_BACKEND_GLOO),
    ],
)
async def test_the_actor_says_by_which_way_its_weights_come(
    store: StoreUnderTest,
    make_run: MakeRun,
    configured: str | None,
    answered: weights_pb2.WeightBackend.ValueType,
) -> None:
    ctl, run = store.ledger.ctl, make_run()
    run = run.model_copy(update={"weights": run.weights.model_copy(update={"backend": configured})})
    async with served_actor(run, store) as (_, actor):
        opened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=2, timeout_s=10), timeout=10
        )
        published, (_, digest) = await asyncio.gather(
            actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=30),
            asyncio.to_thread(receive, opened, 1),
        )
    assert (opened.backend, published.digest) == (answered, digest)


async def test_with_deltas_weights_that_did_not_change_do_not_travel_again(
    store: StoreUnderTest, make_run: MakeRun
) -> None:
    ctl, run = store.ledger.ctl, make_run()
    run = run.model_copy(update={"weights": run.weights.model_copy(update={"backend": "gloo", "deltas": True})})

    def receive_twice(address: str) -> list[Transferred]:
        rendezvous, base = Rendezvous(address, 1, 1, 10.0), Base()
        channel = join(rendezvous, 2, "gloo", torch.device("cpu"), 10.0)
        arrived = []
        for _ in range(2):
            reception = Reception(channel, agreed_manifest(rendezvous, 10.0), 20.0, base)
            for _ in reception:
                pass
            arrived.append(reception.result())
        return arrived

    async with served_actor(run, store) as (_, actor):
        opened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=2, timeout_s=10), timeout=10
        )
        receiving = asyncio.create_task(asyncio.to_thread(receive_twice, opened.address))
        sent = [
            await actor.PublishWeights(publish_request(ctl, step=0, version=version), timeout=30) for version in (5, 6)
        ]
        arrived = await receiving
    assert [each.digest for each in sent] == [each.digest for each in arrived]
    assert [each.wire_bytes for each in sent] == [each.wire_bytes for each in arrived]
    assert sent[0].wire_bytes > sent[0].num_bytes == sent[1].num_bytes > 100 * sent[1].wire_bytes > 0


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.2), ("float16", 0.02)])
async def test_in_16_bits_the_probe_is_computed_twice_and_differs_by_rounding(
    store: StoreUnderTest, make_run: MakeRun, model: Path, dtype: str, most: float
) -> None:
    ctl = store.ledger.ctl
    run = make_run()
    run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": dtype})})
    async with served_actor(run, store) as (_, actor):
        await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=1, timeout_s=10), timeout=10
        )
        published = await actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=30)
    first, second = decode_tensor(published.probe.logprobs, "first"), decode_tensor(published.probe.again, "second")
    assert 0 < np.abs(first - second).max() < most
    np.testing.assert_allclose(second, true_logprobs(model, PROBE, 1.0), atol=most)


async def test_a_publish_whose_caller_leaves_frees_the_actor_and_its_receivers(
    store: StoreUnderTest, make_run: MakeRun
) -> None:
    ctl = store.ledger.ctl
    async with served_actor(make_run(), store) as (rig, actor):
        opened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=3, timeout_s=60), timeout=10
        )
        waiting = Rendezvous(opened.address, 1, 1, 10.0)  # the second receiver never comes
        publishing = asyncio.create_task(one(actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=60)))
        await until(lambda: rig.calls.device_thread.num_waiting == 1)
        await asyncio.sleep(0.5)  # it comes to wait for the receivers
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        async with asyncio.timeout(40):  # they would wait for 60 s
            await until(lambda: waiting.broken is not None)
            with pytest.raises(ChannelBrokenError, match="its caller left"):
                await actor.PublishWeights(publish_request(ctl, step=0, version=6), timeout=30)
        waiting.close()
        reopened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=2, world_size=2, timeout_s=10), timeout=10
        )
        published, (_, digest) = await asyncio.gather(
            actor.PublishWeights(publish_request(ctl, step=0, version=7, epoch=2), timeout=30),
            asyncio.to_thread(receive, reopened, 2),
        )
    assert published.digest == digest


async def one(call: Any) -> Any:
    """A call as a task."""
    return await call


class SendingOnAllRanks(ActorTwin):
    """An actor whose first publish lasts until its epoch is ended, and which notes what came in which order."""

    all_ranks_send = True

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.said: list[str] = []
        self.is_sending, self._ended = threading.Event(), threading.Event()

    def end_before(self, epoch: int) -> None:
        self.said.append(f"end before {epoch}")
        if epoch > 1:
            self._ended.set()

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        self.said.append(f"open {request.epoch}")
        return super().open_channel(request)

    def send(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        self.is_sending.set()
        assert self._ended.wait(WITHIN_S)
        self.said.append("the ranks are free")
        raise ChannelBrokenError("a receiver is gone")


async def test_ranks_that_all_send_open_an_epoch_once_they_are_free_of_the_one_before(store: StoreUnderTest) -> None:
    """The time to meet begins when they can come: the rest of a model may take longer to gather than that."""
    ctl = store.ledger.ctl

    def request(epoch: int) -> weights_pb2.OpenWeightChannelRequest:
        return weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=epoch, world_size=2, timeout_s=10)

    async with AsyncExitStack() as stack:
        servicer = ServedActor(store, stack, "memory://checkpoints")
        actor = SendingOnAllRanks(store.rows)
        servicer.restart(actor)
        address = await served(
            stack, actor_pb2_grpc.add_ActorServiceServicer_to_server, servicer, "rolecall.v1.ActorService"
        )
        channel = open_channel(address, party())
        stack.push_async_callback(channel.close)
        stub = actor_pb2_grpc.ActorServiceStub(channel)
        await stub.OpenWeightChannel(request(1), timeout=WITHIN_S)
        publishing = asyncio.ensure_future(stub.PublishWeights(publish_request(ctl, 0, 1), timeout=WITHIN_S))
        await asyncio.to_thread(actor.is_sending.wait, WITHIN_S)
        await stub.OpenWeightChannel(request(2), timeout=WITHIN_S)
        with pytest.raises(ChannelBrokenError):
            await publishing
    assert actor.said == ["end before 1", "open 1", "end before 2", "the ranks are free", "open 2"]
