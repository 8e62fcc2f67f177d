"""The service's end of a load: the calls of vLLM's engine that join an epoch and receive a version.

The workers' end is receiver.py. Neither decides to serve: the caller compares what was received with what the actor
sent, and resumes.

Every worker of an `AsyncLLM`, i.e. every TP rank of every stage, takes a rank of its own:

    AsyncEngineArgs(
        ..., load_format="dummy", weight_transfer_config=WeightTransferConfig(backend="rolecall"),
        worker_extension_cls="rolecall.weights.receiver.WorkerExtension")

    # All ranks have met when it returns. StaleEpochError, ChannelBrokenError.
    await join_epoch(llm, epoch=3, address="127.0.0.1:41234", rank=1, world_size=2, timeout_s=60, backend="gloo")
    # Always pause: updating while requests run kills the engine.
    await llm.pause_generation(mode="keep")
    # Concurrently with the actor's publish. TornWeightsError, StaleVersionError, StaleEpochError, ChannelBrokenError.
    received = await receive_version(llm, epoch=3, policy_version=7, bucket_timeout_s=30)
    ... compare received.fingerprints and received.digest with the actor's, run the probe, attest ...
    await llm.resume_generation()

`receive_version` asks every worker to receive (`collective_rpc("receive_version")`) and for its report
(`weights_report`); then update_weight_version(str(policy_version)), which names the spans of completions, and
reset_prefix_cache, which leaves what paused requests hold. vLLM's own update of weights is three calls; whoever is
cancelled between them leaves an engine that refuses all updates to come. The first weights
(load_format="dummy") come the same way. After TornWeightsError serve nothing; the next successful receive_version, over
a new epoch, heals it. A newer `join_epoch` aborts the epoch before, wherever a worker may be stuck in it. Neither call
blocks the event loop; `join_epoch` does not block the engine either.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from rolecall.errors import ChannelBrokenError
from rolecall.settings import WeightBackend
from rolecall.weights.receiver import InitInfo, UpdateInfo
from rolecall.weights.report import agreed_report, raise_reported
from rolecall.weights.transferred import Transferred

_JOIN_POLL_S = 0.02
"""Seconds between two looks at whether the workers have met."""


class EngineCalls(Protocol):
    """The calls of `AsyncLLM` that make up a load."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls `method` on every worker and returns their answers."""

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        """Calls Receiver.init_transfer_engine on every worker."""

    async def update_weight_version(self, new_version: str) -> None:
        """Names the weights in the spans of completions."""

    async def reset_prefix_cache(self) -> bool:
        """Forgets what older weights computed."""


async def join_epoch(
    llm: EngineCalls,
    *,
    epoch: int,
    address: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    backend: WeightBackend,
    on_answer: Callable[[], None] = lambda: None,
) -> int:
    """Joins epoch `epoch` with every worker, the first as `rank`, until all ranks of the epoch have met. Returns how
    many ranks the replica took.

    Requests go on meanwhile. `on_answer` is called whenever the workers have answered: they live, whoever else may be
    late. StaleEpochError, ChannelBrokenError.
    """
    deadline = time.monotonic() + timeout_s + 1.0
    info = InitInfo(
        epoch=epoch, address=address, rank=rank, world_size=world_size, timeout_s=timeout_s, backend=backend
    )
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=asdict(info)))
    while True:
        workers = await llm.collective_rpc("weights_joined")
        on_answer()
        for worker in workers:
            raise_reported(worker["error"])
        if all(worker["done"] for worker in workers):
            return len(workers)
        if time.monotonic() > deadline:
            raise ChannelBrokenError(
                f"the workers did not meet the other ranks of weight-channel epoch {epoch} within {timeout_s:g} s"
            )
        await asyncio.sleep(_JOIN_POLL_S)


async def receive_version(llm: EngineCalls, *, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
    """Receives and loads one version over the joined epoch, concurrently with the actor's publish. Requests must be
    paused and stay paused until the report was compared. It may be cancelled: the next one heals what it left.

    StaleEpochError, StaleVersionError, ChannelBrokenError before anything was touched; TornWeightsError when a worker's
    load did not finish; WeightsMismatchError when the workers of the replica differ.
    """
    info = asdict(UpdateInfo(epoch=epoch, policy_version=policy_version, bucket_timeout_s=bucket_timeout_s))
    await llm.collective_rpc("receive_version", kwargs=info)
    reports = await llm.collective_rpc("weights_report")
    report = agreed_report(policy_version, reports)
    await llm.update_weight_version(str(policy_version))
    await llm.reset_prefix_cache()
    return report
