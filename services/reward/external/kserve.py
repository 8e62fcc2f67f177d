"""A model behind the Open Inference Protocol (KServe v2), as KServe, Triton and MLServer serve it: tensors of text in,
a tensor of numbers out.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from rolecall.errors import ConfigError, RoleCallError, ScorerError
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import Item
from services.reward.external.batches import Batches, numbers_in, text_before

_NUMBERS = ("FP16", "FP32", "FP64")
_TEXTS: dict[str, Callable[[Item], str]] = {
    "response": lambda item: item.response_text,
    "response_text": lambda item: item.response_text,
    "prompt": text_before,
    "ground_truth": lambda item: item.ground_truth,
}
"""Names of input tensors, and the text of an item that each is given."""


class _Tensor(BaseModel):
    """A tensor in a model's metadata."""

    name: str
    datatype: str
    shape: list[int]


class _Metadata(BaseModel):
    """The tensors that a model takes and gives."""

    inputs: list[_Tensor]
    outputs: list[_Tensor]


class _Output(BaseModel):
    """A tensor in an answer."""

    name: str
    data: list[Any]


class _Inferred(BaseModel):
    """The answer to one call."""

    outputs: list[_Output]


class KServe(Batches):
    """A model that says by its metadata what it takes. Input tensors of text are told by their names, `response`,
    `prompt` and `ground_truth`; one that is alone is the response. The output is its one tensor of numbers, or the one
    called `score` or `reward`.
    """

    def __init__(self, name: str, bounds: tuple[float, float] | None, server: JsonServer) -> None:
        super().__init__(name, bounds, server)
        self._inputs: list[tuple[_Tensor, Callable[[Item], str]]] = []
        self._output = ""

    async def look(self) -> None:
        """Reads what the model takes and gives. ConfigError when that is no scorer."""
        try:
            found = _Metadata.model_validate(await self._server.look())
        except ValidationError as error:
            raise ConfigError(
                "its address is no model's: it must be the URL of one, as in http://host:8080/v2/models/name or "
                "grpc://host:8081/name"
            ) from error
        self._inputs = [(tensor, _text_for(tensor, alone=len(found.inputs) == 1)) for tensor in found.inputs]
        numbers = [tensor.name for tensor in found.outputs if tensor.datatype in _NUMBERS]
        named = numbers if len(numbers) == 1 else [name for name in numbers if name in ("score", "reward")]
        if len(named) != 1:
            raise ConfigError(
                f"the model gives {[tensor.name for tensor in found.outputs]}; one output must be of {_NUMBERS}, or be "
                "called score or reward"
            )
        (self._output,) = named

    async def score(self, items: Sequence[Item]) -> list[float | RoleCallError]:
        """One answer per item."""
        inputs = [
            {
                "name": tensor.name,
                "shape": [len(items), *([1] * (len(tensor.shape) - 1))],
                "datatype": "BYTES",
                "data": [text_of(item) for item in items],
            }
            for tensor, text_of in self._inputs
        ]
        answer = await self._server.post("/infer", {"inputs": inputs, "outputs": [{"name": self._output}]})
        try:
            outputs = {output.name: output.data for output in _Inferred.model_validate(answer).outputs}
        except ValidationError as error:
            raise ScorerError(f"its answer is no inference: {error.errors()[0]['msg']}") from error
        if self._output not in outputs:
            raise ScorerError(f"its answer lacks the output {self._output!r}; it has {sorted(outputs)}")
        flat = [row[0] if isinstance(row, list) and len(row) == 1 else row for row in outputs[self._output]]
        return numbers_in(flat, items, self._output)


def _text_for(tensor: _Tensor, *, alone: bool) -> Callable[[Item], str]:
    text_of = _TEXTS.get(tensor.name, _TEXTS["response"] if alone else None)
    if text_of is None or tensor.datatype != "BYTES":
        raise ConfigError(
            f"the model takes {tensor.name!r} of {tensor.datatype}; inputs must be BYTES, called "
            f"{sorted(_TEXTS)}, or one alone"
        )
    return text_of
