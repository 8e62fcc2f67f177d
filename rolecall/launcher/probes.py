"""Questions to the controller, the store and model servers whether they live, and the verdict on one that falls silent.

Kills nothing: `supervisor.py` does, with the verdict.
"""

import asyncio
import http.client
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolecall.errors import NotFoundError, NotOnThisDeviceError, RoleCallError, StoreUnavailableError
from rolecall.launcher.processes import Start
from rolecall.rpc.channel import open_channel
from rolecall.rpc.options import LIVENESS
from rolecall.settings import RpcSection, RunSettings
from rolecall.store.embedded import EmbeddedStore

PROBE_TIMEOUT_S = 2.0
FIRST_PROBE_S = 0.25
"""Pause between probes of a controller that has not answered yet."""
MAX_SILENCE_S = 10.0
"""Seconds without an answer from a controller that once answered, after which it is taken for hung."""
STORE_PROBE_S = 1.0
MAX_STORE_SILENCE_S = 5.0
"""Seconds without an answer after which the store is taken for hung; those in which it waits for its disk do not count.
A checkpoint that is written to the same disk may hold up a sync for longer.
"""
SERVER_PROBE_S = 2.0
MAX_SERVER_SILENCE_S = 60.0
"""Seconds without an answer from a model server that once answered, after which it is taken for hung: it tokenizes many
long questions in the thread that answers.
"""


class Probes:
    """The tasks that ask, one for each start of the controller, the store or a model server; `condemn` is called with
    the name of one that fell silent and with what is said of it.
    """

    def __init__(self, resolved: RunSettings, condemn: Callable[[str, str], None]) -> None:
        self.heard_at = time.monotonic()
        """Monotonic seconds of the controller's last message, or of the beginning."""
        self._resolved = resolved
        self._condemn = condemn
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list["asyncio.Task[None]"]:
        """The tasks under way."""
        return list(self._tasks.values())

    def heard(self) -> None:
        """Counts a message of the controller as an answer."""
        self.heard_at = time.monotonic()

    def ask_controller(self, start: Start) -> None:
        """Asks the controller that `start` is, until `end`."""
        self._tasks[start.worker.name] = asyncio.create_task(self._ask_controller(start))

    def ask_store(self, name: str, store: EmbeddedStore) -> None:
        """Asks `store`, in this start of it, until `end`."""
        self._tasks[name] = asyncio.create_task(self._ask_store(name, store))

    def ask_model_server(self, start: Start) -> None:
        """Asks the model server that `start` is, until `end`."""
        self._tasks[start.worker.name] = asyncio.create_task(self._ask_model_server(start))

    def end(self, name: str) -> None:
        """Asks `name` no more."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    async def _ask_controller(self, start: Start) -> None:
        """Asks the controller whether it lives, its messages being answers, too; condemns it when it falls silent, or
        is not heard within start_timeout_s.

        The seconds of probes that had no answer are summed: a launcher that was itself stopped for a while has not
        heard silence.
        """
        silent_s, limit_s, period_s, heard_at = (
            0.0,
            self._resolved.controller.start_timeout_s,
            FIRST_PROBE_S,
            self.heard_at,
        )
        assert self._resolved.controller.address is not None
        async with open_channel(self._resolved.controller.address, self._resolved.rpc) as channel:
            stub = cast(Any, health_pb2_grpc.HealthStub)(channel)  # its published types lack the calls
            while silent_s < limit_s:
                began = time.monotonic()
                if await _is_alive(stub):
                    silent_s, limit_s, period_s = 0.0, MAX_SILENCE_S, PROBE_TIMEOUT_S
                else:
                    silent_s += min(max(time.monotonic() - began, period_s), PROBE_TIMEOUT_S)
                if self.heard_at > heard_at:  # also while no probe was under way
                    heard_at = self.heard_at
                    silent_s, limit_s, period_s = 0.0, MAX_SILENCE_S, PROBE_TIMEOUT_S
                await asyncio.sleep(max(0.0, began + period_s - time.monotonic()))
        self._condemn(start.worker.name, f"{start.worker.name} did not answer for {limit_s:g} s and was killed")

    async def _ask_model_server(self, start: Start) -> None:
        """Asks as `_ask_controller` does: it has controller.start_timeout_s to load its model."""
        name, silent_s, limit_s = start.worker.name, 0.0, self._resolved.controller.start_timeout_s
        section = self._resolved.reward.servers[name]
        assert section.address is not None
        async with open_channel(section.address, RpcSection(), tls=False, ours=False) as channel:
            stub = cast(Any, health_pb2_grpc.HealthStub)(channel)  # its published types lack the calls
            while silent_s < limit_s:
                began = time.monotonic()
                if await (_speaks_http(section.address) if section.served is None else _is_alive(stub)):
                    silent_s, limit_s = 0.0, MAX_SERVER_SILENCE_S
                else:
                    silent_s += SERVER_PROBE_S
                await asyncio.sleep(max(0.0, began + SERVER_PROBE_S - time.monotonic()))
        self._condemn(name, f"{name} did not answer for {limit_s:g} s and was killed")

    async def _ask_store(self, name: str, store: EmbeddedStore) -> None:
        """Asks as `_ask_controller` does, for one start of the store."""
        try:
            await asyncio.to_thread(store.wait_until_ready)
            silent_s = 0.0
            while silent_s < MAX_STORE_SILENCE_S:
                began = time.monotonic()
                try:
                    await asyncio.to_thread(store.ping)
                    silent_s = 0.0
                except StoreUnavailableError:
                    silent_s += 0.0 if store.waits_for_disk else STORE_PROBE_S
                await asyncio.sleep(max(0.0, began + STORE_PROBE_S - time.monotonic()))
            self._condemn(name, f"the store did not answer for {MAX_STORE_SILENCE_S:g} s and was killed")
        except StoreUnavailableError as error:
            self._condemn(name, error.message)


async def _is_alive(stub: Any) -> bool:
    """Whether a gRPC server answers within PROBE_TIMEOUT_S."""
    try:
        # an answer, too, of a server without this service or name
        with suppress(NotOnThisDeviceError, NotFoundError):
            await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=PROBE_TIMEOUT_S)
    except RoleCallError:
        return False
    return True


async def _speaks_http(address: str) -> bool:
    """Whether an HTTP server at `address` says anything within PROBE_TIMEOUT_S."""
    return await asyncio.to_thread(_answers, address)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
