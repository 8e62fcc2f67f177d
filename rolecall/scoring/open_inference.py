"""Models behind the Open Inference Protocol (KServe v2) over gRPC, asked in the JSON that it has over HTTP.

Owns the messages and the methods' names. What tensors mean is its caller's.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np

from rolecall.errors import NotFoundError, ScorerError, VersionMismatchError
from rolecall.rpc import deadlines
from rolecall.rpc.channel import open_channel
from rolecall.settings import RpcSection, ScorerServer
from rolecall.v1 import open_inference_pb2 as messages

_SERVICE = "/inference.GRPCInferenceService"
_DTYPES = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
"""Types of the outputs that are read."""


class InferenceCarrier:
    """Calls of one model over gRPC; `close` at the end."""

    def __init__(self, scorer: ScorerServer, rpc: RpcSection, token: Callable[[], str] | None) -> None:
        """The model at the address grpc://host:port/model. ConfigError for unreadable roots, and where it would not be
        called safely.
        """
        url = urlsplit(scorer.address)
        self._model = url.path.strip("/")
        self._address = scorer.address
        self._channel = open_channel(
            url.netloc,
            rpc,
            tls=scorer.tls,
            bearer_token=token,
            ca_file=None if scorer.ca_file == "system" else scorer.ca_file,
            ours=False,
        )
        self._metadata: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = self._channel.unary_unary(
            f"{_SERVICE}/ModelMetadata",
            messages.ModelMetadataRequest.SerializeToString,
            messages.ModelMetadataResponse.FromString,
        )
        self._infer: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = self._channel.unary_unary(
            f"{_SERVICE}/ModelInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelInferResponse.FromString,
        )

    def encoded(self, body: Any) -> messages.ModelInferRequest:
        """Returns the request of an inference of tensors of text."""
        return messages.ModelInferRequest(
            model_name=self._model,
            inputs=[
                messages.InferTensor(
                    name=tensor["name"],
                    datatype=tensor["datatype"],
                    shape=tensor["shape"],
                    contents=messages.InferTensorContents(bytes_contents=[text.encode() for text in tensor["data"]]),
                )
                for tensor in body["inputs"]
            ],
            outputs=[messages.InferRequestedOutput(name=output["name"]) for output in body["outputs"]],
        )

    async def call(self, path: str, body: messages.ModelInferRequest | None, timeout_s: float) -> Any:
        """The model's metadata where `body` is None, else its answer to the inference `body`. VersionMismatchError when
        the server knows no such model.
        """
        timeout_s = deadlines.child_timeout_s(timeout_s)
        try:
            if body is None:
                found = await self._metadata(messages.ModelMetadataRequest(name=self._model), timeout=timeout_s)
                return {"inputs": _as_json(found.inputs), "outputs": _as_json(found.outputs)}
            return _answer(await self._infer(body, timeout=timeout_s))
        except NotFoundError as error:
            raise VersionMismatchError(f"{self._address}: {error.message}") from error

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()


def _as_json(tensors: Any) -> list[dict[str, Any]]:
    return [{"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} for tensor in tensors]


def _answer(response: messages.ModelInferResponse) -> Any:
    """The answer of an inference, its tensors of numbers flat. ScorerError when it holds no such tensors."""
    raw = list(response.raw_output_contents) or [b""] * len(response.outputs)
    if len(raw) != len(response.outputs):
        raise ScorerError(f"its answer has raw contents of {len(raw)} outputs, and {len(response.outputs)} outputs")
    return {
        "outputs": [
            {"name": output.name, "data": _elements(output, data)}
            for output, data in zip(response.outputs, raw, strict=True)
        ]
    }


def _elements(output: messages.InferTensor, raw: bytes) -> list[float]:
    if output.datatype not in _DTYPES:
        raise ScorerError(f"its output {output.name!r} is of {output.datatype}; one of {sorted(_DTYPES)} is read")
    if not raw:
        return [*output.contents.fp32_contents, *output.contents.fp64_contents]
    dtype = np.dtype(_DTYPES[output.datatype])
    if len(raw) % dtype.itemsize:
        raise ScorerError(f"its output {output.name!r} has {len(raw)} bytes, which are no whole {output.datatype}")
    return [float(number) for number in np.frombuffer(raw, dtype)]
