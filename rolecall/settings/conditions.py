"""Conditions on the fields of prompts: the `when` of a section that is for some prompts alone."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

FieldValue: TypeAlias = StrictBool | StrictInt | StrictFloat | StrictStr
"""A value of a prompt's field: text, a number, true or false."""
Conditions: TypeAlias = dict[str, FieldValue | Annotated[tuple[FieldValue, ...], Field(min_length=1)]]
"""Fields of the data set, each with the value that it must hold, or with several of which it must hold one."""


def holds(when: Conditions, metadata: Mapping[str, object]) -> bool:
    """Whether a prompt with these fields meets all conditions."""
    return all(any(_equal(metadata.get(field), value) for value in _values(wanted)) for field, wanted in when.items())


def may_meet(one: Conditions, other: Conditions) -> bool:
    """Whether a prompt can meet the conditions of both: no field that both name must hold other values for each."""
    return all(
        any(_equal(found, wanted) for found in _values(one[field]) for wanted in _values(other[field]))
        for field in one.keys() & other.keys()
    )


def _values(wanted: FieldValue | tuple[FieldValue, ...]) -> tuple[FieldValue, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _equal(found: object, wanted: FieldValue) -> bool:
    """Whether a field's value is the wanted one. 1 and 1.0 are equal, which a message does not tell apart; true is no
    number.
    """
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted
