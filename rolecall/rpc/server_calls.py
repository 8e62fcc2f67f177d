"""The interceptor around every method of a server: a caller that may not is refused, errors become statuses, the
caller's deadline is noted for child calls.

It is one of the three places where any exception is caught.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, TypeAlias

import grpc
from opentelemetry import trace

from rolecall.errors import DeadlineError, ExhaustedError, RoleCallError
from rolecall.rpc import deadlines, identity, status

logger = logging.getLogger(__name__)
# Generic in the published types only, not at run time.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


MAX_STREAMS = 256
"""Bound on streams under way at a server (of its MAX_CALLS calls): watchers, and Train."""


class ServerCalls(grpc.aio.ServerInterceptor):
    """RoleCallError -> its status with ErrorInfo; TimeoutError -> DEADLINE_EXCEEDED; anything else -> INTERNAL, its
    traceback in the log.

    Bounds streams apart from other calls: they last, and however many watch, there is room for a heartbeat.
    """

    def __init__(self, identify: identity.Identify | None = None) -> None:
        """identify: None where every service is public."""
        self._identify = identify
        self._streams = _Streams()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Method | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Method | None":
        # Any: the published types of a method's functions are those of the synchronous server.
        handler: Any = await continuation(handler_call_details)  # bounded: a look-up in this process
        if handler is None:  # no such method; gRPC answers UNIMPLEMENTED by itself
            return None
        method = str(handler_call_details.method)
        known = self._identify
        wires = (handler.request_deserializer, handler.response_serializer)
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, method, known), *wires)
            case False, True:
                return grpc.unary_stream_rpc_method_handler(
                    _streaming(handler.unary_stream, method, known, self._streams), *wires
                )
            case _:  # reflection, which streams both ways; Decoding refuses what takes a stream and answers once
                return grpc.stream_stream_rpc_method_handler(
                    _streaming(handler.stream_stream, method, known, self._streams), *wires
                )


class _Streams:
    """A count of the streams under way."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Inside it there is one more. ExhaustedError past MAX_STREAMS."""
        if self._count >= MAX_STREAMS:
            raise ExhaustedError(f"{MAX_STREAMS} streams are open already; end some, or ask without a stream")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


def _streaming(behaviour: Any, method: str, known: identity.Identify | None, streams: _Streams) -> Any:
    """grpc.aio knows two kinds of streaming methods: generators, and coroutines that call context.write (health's
    Watch).
    """
    return (
        _unary(behaviour, method, known, streams.one_more)
        if inspect.iscoroutinefunction(behaviour)
        else _streamed(behaviour, method, known, streams.one_more)
    )


def _unary(
    behaviour: Callable[[Any, _Context], Awaitable[Any]],
    method: str,
    known: identity.Identify | None,
    admitted: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    async def call(request: Any, context: _Context) -> Any:
        deadlines.inherit(context.time_remaining())
        try:
            identity.admit(method, known, context)
            with admitted():
                return await behaviour(request, context)  # bounded: by the caller's deadline, at which gRPC cancels it
        except grpc.aio.BaseError:  # gRPC's own: the call was aborted, or its caller left
            raise
        except Exception as error:
            await _abort(context, method, error)

    return call


def _streamed(
    behaviour: Callable[[Any, _Context], AsyncIterator[Any]],
    method: str,
    known: identity.Identify | None,
    admitted: Callable[[], AbstractContextManager[None]],
) -> Any:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        deadlines.inherit(context.time_remaining())
        try:
            identity.admit(method, known, context)
            with admitted():
                async for response in behaviour(
                    request, context
                ):  # bounded: by the caller's deadline, at which gRPC cancels it
                    yield response
        except grpc.aio.BaseError:  # gRPC's own: the call was aborted, or its caller left
            raise
        except Exception as error:
            await _abort(context, method, error)

    return call


async def _abort(context: _Context, method: str, error: Exception) -> NoReturn:
    trace.get_current_span().record_exception(error)
    match error:
        case RoleCallError():
            known = error
            logger.debug("%s: %s: %s", method, type(error).__name__, error)
        case TimeoutError():
            known = DeadlineError(f"{method} waited in vain: {error or 'a wait inside it timed out'}")
        case _:
            logger.error("%s failed", method, exc_info=error)
            known = RoleCallError(
                f"{method} failed with {type(error).__name__}: {error}", exception=type(error).__name__
            )
    await context.abort(status.code_of(known), status.short_message(known), status.trailing_metadata(known))
