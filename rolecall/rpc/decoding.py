"""The interceptor that reads requests: what cannot be read is the caller's mistake and is answered as one.

gRPC itself would answer UNKNOWN and log a traceback for each. Innermost, so that who may not call is refused unread.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from rolecall.errors import InvalidInputError
from rolecall.rpc.options import MAX_MESSAGE_BYTES

_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

MAX_PARTS = MAX_MESSAGE_BYTES // 32
"""Bound on the elements of a list in a request. What means something takes more bytes; empty ones take two, and as
objects a hundred times that.
"""


class Decoding(grpc.aio.ServerInterceptor):
    """Bytes that are no message of the method's, or one of more than MAX_PARTS parts -> InvalidInputError."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Method | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Method | None":
        # Any: the published types of a method's functions are those of the synchronous server.
        handler: Any = await continuation(handler_call_details)  # bounded: a look-up in this process
        if handler is None:  # no such method; gRPC answers UNIMPLEMENTED by itself
            return None
        read, write = _reader(str(handler_call_details.method), handler), handler.response_serializer
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                return grpc.unary_unary_rpc_method_handler(_reading(handler.unary_unary, read), None, write)
            case False, True:
                return grpc.unary_stream_rpc_method_handler(_reading(handler.unary_stream, read), None, write)
            case True, True:  # reflection
                each = _each(read)
                return grpc.stream_stream_rpc_method_handler(_reading(handler.stream_stream, each), None, write)
        raise NotImplementedError(f"{handler_call_details.method} takes a stream and answers once; read it here, too")


def _reader(method: str, handler: Any) -> Callable[[bytes], Message]:
    def message(data: bytes) -> Message:
        try:
            found: Message = handler.request_deserializer(data)
        except DecodeError as error:
            raise InvalidInputError(
                f"{method} was sent {len(data)} bytes that are not its request ({error}); send the message that its "
                "proto file says"
            ) from error
        for field, value in found.ListFields():
            if field.is_repeated and len(value) > MAX_PARTS:
                raise InvalidInputError(f"{field.name} has {len(value)} elements; send at most {MAX_PARTS} at a time")
        return found

    return message


def _each(read: Callable[[bytes], Any]) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
    async def messages(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:  # bounded: by the caller's deadline, at which gRPC cancels it
            yield read(data)

    return messages


def _reading(behaviour: Any, read: Callable[[Any], Any]) -> Any:
    """`behaviour` of what `read` makes of a request's bytes. Of the two kinds of streaming methods that grpc.aio knows,
    generators and coroutines, it stays what it is.
    """
    if inspect.iscoroutinefunction(behaviour):

        async def call(request: Any, context: Any) -> Any:
            return await behaviour(read(request), context)  # bounded: by the caller's deadline

        return call
    return lambda request, context: behaviour(read(request), context)
