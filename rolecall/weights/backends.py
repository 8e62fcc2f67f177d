"""The back ends of the weight channel as the actor names them to the rollouts. Needs no torch.

Their names and the rule that chooses one are in rolecall/settings/services.py, what each does in channel.py.
"""

from typing import get_args

from rolecall.errors import InvalidInputError
from rolecall.settings import WeightBackend
from rolecall.v1 import weights_pb2

_ON_THE_WIRE: dict[WeightBackend, weights_pb2.WeightBackend.ValueType] = {
    name: weights_pb2.WeightBackend.Value(f"WEIGHT_BACKEND_{name.upper()}") for name in get_args(WeightBackend)
}
_BY_WIRE = {value: name for name, value in _ON_THE_WIRE.items()}


def encode_backend(backend: WeightBackend) -> weights_pb2.WeightBackend.ValueType:
    """Returns the wire's value of `backend`."""
    return _ON_THE_WIRE[backend]


def decode_backend(value: weights_pb2.WeightBackend.ValueType) -> WeightBackend:
    """Returns the back end that `value` names. InvalidInputError when it names none."""
    if value not in _BY_WIRE:
        raise InvalidInputError(f"backend {value} is not one; send what the actor's OpenWeightChannel answered")
    return _BY_WIRE[value]
