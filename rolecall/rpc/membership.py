"""The membership of a worker in a run: it joins the controller and says that it lives, from an OS thread with a
connection of its own.

The thread keeps the heartbeat apart from the event loop, so that a long import or a busy loop is not death; the
progress counter it carries says whether the worker moves, so that a heartbeat alone is not life: while there is work
(`busy`), or while the event loop stands still, the controller expects it to grow. What silence and stillness mean, the
controller decides. Its verdict that this process hangs is final, and carried out here.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc

from rolecall.address import is_loopback
from rolecall.contract import contract_version
from rolecall.errors import (
    ConfigError,
    InvalidInputError,
    RoleCallError,
    UnauthenticatedError,
    UnavailableError,
    UnknownWorkerError,
    VersionMismatchError,
    WorkerLostError,
)
from rolecall.rpc import status, tls
from rolecall.rpc.channel import channel_credentials
from rolecall.rpc.identity import Party
from rolecall.rpc.options import channel_options
from rolecall.rpc.role_process import way_out
from rolecall.rpc.tokens import HEADER
from rolecall.settings import RunSettings, parent_to_die_with
from rolecall.v1 import controller_pb2

logger = logging.getLogger(__name__)
_SERVICE = "/rolecall.v1.ControllerService/"
_RETRY_S = 0.25
_MAX_RETRY_S = 2.0
_REFUSALS = (VersionMismatchError, InvalidInputError, ConfigError, UnauthenticatedError, WorkerLostError)
"""Answers to Join that no waiting will change. A fenced or failing controller is waited for: another may take its
place.
"""
_MAX_CALL_S = 2.0
"""Longest wait for an answer to one heartbeat: a lost one must leave time for the next within the lease."""
_T = TypeVar("_T")


class Pulse(Protocol):
    """A place where a worker shows what it does and that it moves: its `Membership`, or a small twin in tests."""

    phase: str
    """The work in hand, in a word or two."""
    busy: bool
    """Whether there is work in hand: only then must `progress` be called now and then."""

    def progress(self) -> None:
        """Counts up; any thread may call."""


class Membership:
    """The link of this worker process to the run, made and started inside its event loop. `start` returns at once;
    `joined` waits, `failed` is for `role_process.serve`.

    Joining is retried while the controller is away, up to controller.start_timeout_s; a refusal (another run, another
    release) fails at once. Once joined, an absent controller is waited for without end, and a restarted one is joined
    again: it may be replaced at any instant. When the run is over, a worker that no launcher ends does so by itself.
    When the controller has given this incarnation up, `failed` is set and, in a role's own process, the process ends
    within a second whatever its other threads do.
    """

    def __init__(
        self,
        settings: RunSettings,
        role: controller_pb2.Role.ValueType,
        worker: str,
        incarnation: str,
        address: str,
        num_weight_ranks: int = 0,
        on_gpus: bool = False,
        image_processor: str = "",
        tokenizer: str = "",
        launched: bool | None = None,
    ) -> None:
        """address: where this worker's own service answers. image_processor, tokenizer: as in JoinRequest. launched:
        whether a launcher ends this process; None: as its environment says. ConfigError when controller.address is not
        set.
        """
        if settings.controller.address is None:
            raise ConfigError(
                "controller.address is not set; a worker that runs alone needs --controller.address HOST:PORT"
            )
        self._target = settings.controller.address
        self._settings = settings
        self._request = controller_pb2.JoinRequest(
            run=settings.run.name,
            role=role,
            worker=worker,
            incarnation=incarnation,
            address=address,
            num_weight_ranks=num_weight_ranks,
            version=contract_version(),
            on_gpus=on_gpus,
            image_processor=image_processor,
            tokenizer=tokenizer,
        )
        self._launched = parent_to_die_with() is not None if launched is None else launched
        rpc = settings.rpc
        token = rpc.token_for(loopback=is_loopback(self._target)) if isinstance(rpc, Party) else None
        self._metadata = ((HEADER, token),) if token is not None else ()
        self._renewal = None if rpc.tls is None else tls.Renewal(rpc.tls)
        self.phase = "starting"
        """What the worker is doing, for people; set it freely, from any thread."""
        self.busy = False
        """Whether it has work in hand, so that `progress` must be called now and then; set it freely, from any thread.
        """
        self._progress = 0
        self._loop_turned = True
        self._ctl = 0
        self._heard = False
        self._is_over = False
        """Whether the controller said that the run is over: it may be gone at any time."""
        self._stopping = threading.Event()
        self._leaves = False
        self._channel: grpc.Channel | None = None
        self._thread = threading.Thread(target=self._live, name="membership", daemon=True)
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception when the controller refuses this worker, gave it up or cannot be found in time; a result
        when the run is over, where no launcher ends this process.
        """
        self._joined = asyncio.Event()
        self._leave = way_out(worker)

    @property
    def ctl(self) -> int:
        """Fencing number of the controller last heard; 0 before the first Join."""
        return self._ctl

    def progress(self) -> None:
        """Says that work moved on. Any thread may call; a count lost between two does no harm."""
        self._progress += 1

    def start(self) -> None:
        """Begins to join and to send heartbeats."""
        self._thread.start()

    async def joined(self) -> None:
        """Returns when the controller has accepted this worker; raises what `failed` holds when it never will."""
        waiting = asyncio.ensure_future(self._joined.wait())
        ends: list[asyncio.Future[Any]] = [waiting, self.failed]
        try:
            # bounded: by nothing, on purpose: a worker waits for its controller until it is stopped
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.failed.done():
            self.failed.result()

    async def leave(self) -> None:
        """Tells the controller that this worker was asked to end, and ends the heartbeats; within _MAX_CALL_S, a
        heartbeat under way included. A controller that does not hear it finds out by the silence. Safe to repeat.
        """
        self._leaves = True
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _MAX_CALL_S)
        self.stop()

    def stop(self) -> None:
        """Ends the heartbeats, one under way included. Blocks on nothing, safe to repeat."""
        self._stopping.set()
        if self._channel is not None:
            self._channel.close()

    def _live(self) -> None:
        try:
            self._channel = self._connect(channel_credentials(self._target, self._settings.rpc))
            try:
                period_s = self._join(self._settings.controller.start_timeout_s)
                self._tell(self._joined.set)
                while not self._stopping.wait(period_s):
                    period_s = self._beat(period_s)
                if self._leaves:
                    with suppress(RoleCallError):
                        self._send_beat(leaving=True)
            finally:
                self._channel.close()
        except Exception as error:  # entry point of the thread: whatever ends it must end the role
            if not self._stopping.is_set():
                self._tell(self._fail, error)
                if isinstance(error, WorkerLostError):
                    self._leave(error)

    def _newest(self) -> grpc.Channel:
        """The channel, made anew when the certificates were replaced."""
        assert self._channel is not None
        credentials = None if self._renewal is None else self._renewal.credentials()
        if credentials is not None:
            self._channel.close()
            self._channel = self._connect(credentials)
            if self._stopping.is_set():  # since we looked: nobody else closes this one
                self._channel.close()
        return self._channel

    def _connect(self, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        options = channel_options((), loopback=is_loopback(self._target))
        if credentials is None:
            return grpc.insecure_channel(
                self._target, options
            )  # bounded: every call of the heartbeat names its timeout
        return grpc.secure_channel(
            self._target, credentials, options
        )  # bounded: every call of the heartbeat names its timeout

    def _join(self, within_s: float | None) -> float:
        """Joins and returns the seconds between heartbeats; retries what may pass, for `within_s` or without end."""
        deadline = None if within_s is None else time.monotonic() + within_s
        pause_s = _RETRY_S
        while True:
            join = self._newest().unary_unary(
                _SERVICE + "Join", controller_pb2.JoinRequest.SerializeToString, controller_pb2.JoinResponse.FromString
            )
            try:
                response = self._call(join, self._request, "Join")
            except _REFUSALS:
                raise
            except RoleCallError as error:
                if deadline is not None and time.monotonic() + pause_s > deadline:
                    raise UnavailableError(
                        f"not joined to a controller at {self._target} within {within_s:g} s: {error.message}",
                        target=self._target,
                    ) from error
                if self._stopping.wait(pause_s):
                    raise
                pause_s = min(pause_s * 2, _MAX_RETRY_S)
                continue
            self._ctl, self._heard = response.ctl, True
            logger.debug("joined %s as %s.%s", self._target, self._request.worker, self._request.incarnation)
            return response.heartbeat_s or self._settings.controller.heartbeat_s

    def _beat(self, period_s: float) -> float:
        busy = self.busy or not self._loop_turned
        self._loop_turned = False
        self._tell(self._turned)
        try:
            answer = self._send_beat(busy=busy)
            self._ctl = answer.ctl
        except UnknownWorkerError:
            logger.info("joining again: the controller at %s does not know this worker", self._target)
            return self._join(None)
        except WorkerLostError:
            raise
        except RoleCallError as error:
            if self._heard and not self._is_over:
                logger.warning("heartbeats are not heard; waiting for the controller: %s", error.message)
            self._heard = False
            return period_s
        if not self._heard:
            logger.info("heartbeats are heard again")
        self._heard, self._is_over = True, answer.over
        if answer.over and not self._launched:
            logger.info("the run is over")
            self._stopping.set()
            self._tell(self._end)
        return period_s

    def _send_beat(self, *, busy: bool = False, leaving: bool = False) -> controller_pb2.HeartbeatResponse:
        beat = self._newest().unary_unary(
            _SERVICE + "Heartbeat",
            controller_pb2.HeartbeatRequest.SerializeToString,
            controller_pb2.HeartbeatResponse.FromString,
        )
        request = controller_pb2.HeartbeatRequest(
            worker=self._request.worker,
            incarnation=self._request.incarnation,
            progress=self._progress,
            phase=self.phase,
            busy=busy,
            leaving=leaving,
        )
        return self._call(beat, request, "Heartbeat")

    def _call(self, method: Callable[..., _T], request: Any, name: str) -> _T:
        timeout_s = min(_MAX_CALL_S, self._settings.controller.lease_s)
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise status.to_error(
                error.code(), error.details(), error.trailing_metadata(), target=self._target, method=_SERVICE + name
            ) from error

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            logger.debug("membership ended after its event loop")

    def _turned(self) -> None:
        self._loop_turned = True

    def _end(self) -> None:
        if not self.failed.done():
            self.failed.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
