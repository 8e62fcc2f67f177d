"""Real trainers in processes of their own that can be killed at exact instants.

The controller reaches a trainer through a `Gateway`, which sees every call and answer, keeps the inputs of every step
and kills the trainer when told to. Trainers are forked, so that a killed one is soon back.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rolecall.rpc.callers import Caller
from rolecall.store.sealed import read_sealed
from rolecall.v1 import training_pb2
from tests.fixtures_store import StoreUnderTest
from tests.forks import forked_role
from tests.twins.callers import shown

CALL_TIMEOUT_S = 200.0
STREAMED = ("Train", "SaveCheckpoint")
UNDER_WAY_S = {"Train": 0.02, "PublishWeights": 0.003, "SaveCheckpoint": 0.003}
"""How far into a call the trainer dies: a Train takes a tenth of a second or so, the others are short. On a busy
machine it may have ended by then.
"""
TRAINED_COLUMNS = ("token_ids", "response_mask", "rollout_logprobs", "reward", "loss_mask", "advantages")


CONTROLLER = shown(Caller.CONTROLLER)


@dataclass(frozen=True)
class Instant:
    """When a trainer dies: at the n-th time that a call is "sent" to it, is "under way" in it, or is "answered" by it.
    Answers of a dead one are lost.
    """

    call: str
    side: str
    count: int = 1


@dataclass
class Gateway:
    """Between the controller and one trainer. Calls and answers pass as bytes."""

    role: str
    address: str
    """Where the trainer listens."""
    store: StoreUnderTest
    config: Path
    kills: list[Instant] = field(default_factory=list)
    inputs: dict[int, list[str]] = field(default_factory=dict)
    """Step -> digest of the columns that it was trained on, each time it was."""
    batches: dict[int, set[str]] = field(default_factory=dict)
    """Step -> digests of sealed batches that Train named."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    async def start(self) -> str:
        """Starts the trainer and listens; the address for the controller."""
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    def start_trainer(self) -> None:
        """A new process of the role."""
        # Any: calls of bytes, for which there are no stubs.
        self._calls: Any = grpc.aio.insecure_channel(
            self.address, [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
        )
        log, store = self.config.with_name(f"{self.role}.log"), {"ROLECALL_STORE_URL": self.store.url}
        self._process = forked_role(self.role, log, store, str(self.config))

    async def close(self) -> None:
        """Kills the trainer."""
        await self._kill()
        await self._server.stop(None)

    async def unary(self, path: str, request: bytes, context: Any) -> bytes:
        """Passes a call on."""
        name = path.rpartition("/")[2]
        await self._at(name, "sent", context)
        try:
            answer = await self._watched(
                name,
                asyncio.ensure_future(_only(self._called(self._calls.unary_unary(path), request))),
            )
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        await self._at(name, "answered", context)
        return answer

    async def streamed(self, path: str, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Passes a Train or a SaveCheckpoint on; what comes before its last message is kept from the controller."""
        name = path.rpartition("/")[2]
        if name == "Train":
            await asyncio.to_thread(self._note, training_pb2.TrainRequest.FromString(request))
        await self._at(name, "sent", context)
        try:
            event = await self._watched(
                name,
                asyncio.ensure_future(_last(self._called(self._calls.unary_stream(path), request))),
            )
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        await self._at(name, "answered", context)
        yield event

    def _called(self, method: Any, request: bytes) -> Any:
        return method(request, timeout=CALL_TIMEOUT_S, metadata=CONTROLLER)

    async def _watched(self, name: str, call: "asyncio.Task[bytes]") -> bytes:
        """What `call` answers; the trainer dies in the middle of it when that was asked for."""
        if self._is_asked_for(name, "under way"):
            await asyncio.sleep(UNDER_WAY_S[name])
            await self._replace()
        return await call

    def _note(self, request: training_pb2.TrainRequest) -> None:
        batch = read_sealed(self.store.connection, self.store.run, request.step)
        state = hashlib.blake2b(digest_size=16)
        for ref, row in zip(
            batch.rows, self.store.rows.read(list(batch.rows), TRAINED_COLUMNS, ("values", "returns")), strict=True
        ):
            state.update(ref.id.encode())
            for column in sorted(row):
                state.update(column.encode() + row[column].tobytes())
        self.inputs.setdefault(request.step, []).append(state.hexdigest())
        self.batches.setdefault(request.step, set()).update({request.digest, batch.digest})

    async def _at(self, name: str, side: str, context: Any) -> None:
        """The instant (call, side): the trainer dies here when that was asked for."""
        if self._is_asked_for(name, side):
            await self._replace()
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self.role} was killed when {name} was {side}")

    def _is_asked_for(self, name: str, side: str) -> bool:
        self.counts[name, side] = count = self.counts.get((name, side), 0) + 1
        instant = Instant(name, side, count)
        if instant not in self.kills:
            return False
        self.kills.remove(instant)
        return True

    async def _replace(self) -> None:
        await self._kill()
        self.start_trainer()

    async def _kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)  # bounded: it was killed
        await self._calls.close()


async def _only(call: Any) -> bytes:
    answer: bytes = await call
    return answer


async def _last(events: AsyncIterator[bytes]) -> bytes:
    answer = b""
    async for event in events:
        answer = event
    return answer


async def _abort(context: Any, error: grpc.aio.AioRpcError) -> None:
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        path, gateway = str(handler_call_details.method), self._gateway

        async def unary(request: bytes, context: Any) -> bytes:
            return await gateway.unary(path, request, context)

        async def streamed(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async for event in gateway.streamed(path, request, context):
                yield event

        if path.rpartition("/")[2] in STREAMED:
            return grpc.unary_stream_rpc_method_handler(streamed)
        return grpc.unary_unary_rpc_method_handler(unary)
