"""Interceptors around every call of a channel: a deadline always, and statuses back into the exceptions the server
raised.

Only the two kinds of methods that rolecall.v1 has are known: unary, and server streaming.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc.aio import AioRpcError, ClientCallDetails

from rolecall.errors import DeadlineError, RoleCallError, UnavailableError
from rolecall.rpc import deadlines, status
from rolecall.rpc.callers import callers_of
from rolecall.rpc.tokens import HEADER

UNREADABLE = "bytes that are not its message; most often a text in it is no UTF-8, as when an emoji was cut in two"
"""What a server answered that ended a call with OK and whose answer cannot be parsed; gRPC returns None for it."""


class _Calls:
    def __init__(self, target: str, default_timeout_s: float, token: str | None = None) -> None:
        """token: shown where a method has a rule of who may call it, and to no other service."""
        self._target = target
        self._default_timeout_s = default_timeout_s
        self._token = token

    def _with_deadline(self, details: ClientCallDetails) -> ClientCallDetails:
        timeout_s = deadlines.child_timeout_s(self._default_timeout_s if details.timeout is None else details.timeout)
        if timeout_s <= 0:
            method = method_of(details)
            raise DeadlineError(
                f"{method} on {self._target} was not called: the caller's own deadline has passed",
                target=self._target,
                method=method,
            )
        return ClientCallDetails(
            details.method, timeout_s, self._with_token(details), details.credentials, details.wait_for_ready
        )

    def _with_token(self, details: ClientCallDetails) -> grpc.aio.Metadata | None:
        if self._token is None or callers_of(method_of(details)) is None:
            return details.metadata
        return grpc.aio.Metadata(*(details.metadata or ()), (HEADER, self._token))

    def _to_error(self, error: AioRpcError, details: ClientCallDetails) -> RoleCallError:
        return status.to_error(
            error.code(), error.details(), error.trailing_metadata(), target=self._target, method=method_of(details)
        )


class UnaryCalls(_Calls, grpc.aio.UnaryUnaryClientInterceptor):
    """The deadline and the exceptions of unary calls."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[ClientCallDetails, Any], Any],
        client_call_details: ClientCallDetails,
        request: Any,
    ) -> Any:
        call = await continuation(
            self._with_deadline(client_call_details), request
        )  # bounded: by the deadline that it is given here
        try:
            response = await call  # bounded: by the deadline that it was given above
        except AioRpcError as error:
            raise self._to_error(error, client_call_details) from error
        if response is None:
            method = method_of(client_call_details)
            raise RoleCallError(f"{self._target} answered {method} with {UNREADABLE}", target=self._target)
        return response


class AbandonedCalls(grpc.aio.UnaryUnaryClientInterceptor):
    """The end of abandoned unary calls, innermost of all interceptors: a call whose caller is cancelled ends at the
    server, too. Interceptors that wait for a call's status (those of tracing) would otherwise leave it running.
    """

    async def intercept_unary_unary(
        self,
        continuation: Callable[[ClientCallDetails, Any], Any],
        client_call_details: ClientCallDetails,
        request: Any,
    ) -> Any:
        call = await continuation(client_call_details, request)  # bounded: by the deadline that UnaryCalls gave it
        try:
            await call.code()  # bounded: by the deadline that UnaryCalls gave it
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call


class StreamCalls(_Calls, grpc.aio.UnaryStreamClientInterceptor):
    """The deadline and the exceptions of calls that stream their responses."""

    async def intercept_unary_stream(
        self,
        continuation: Callable[[ClientCallDetails, Any], Any],
        client_call_details: ClientCallDetails,
        request: Any,
    ) -> AsyncIterator[Any]:
        call = await continuation(
            self._with_deadline(client_call_details), request
        )  # bounded: by the deadline that it is given here
        return self._responses(call, client_call_details)

    async def _responses(self, call: Any, details: ClientCallDetails) -> AsyncIterator[Any]:
        try:
            async for response in call:  # bounded: by the deadline that the call was given
                yield response
        except AioRpcError as error:
            raise self._to_error(error, details) from error
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise UnavailableError(
                f"the connection to {self._target} was closed under {method_of(details)}", target=self._target
            ) from error
        finally:
            call.cancel()  # a reader that stops early frees the server at once


def is_being_cancelled() -> bool:
    """Whether a CancelledError is this task's own. Else it is that of a call whose channel was closed, which must not
    end whoever awaits it as if they were cancelled.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def method_of(details: ClientCallDetails) -> str:
    """The full name of the method that is called."""
    method: str | bytes = details.method  # gRPC hands over bytes, whatever its types say
    return method.decode() if isinstance(method, bytes) else method
