"""Calls of tools that clients send back: the policy's own words where the value is the same."""

from typing import Any

import pytest

from services.rollout.harness.calls import ChatCall, Reply, call_id, called

ID = call_id(3, 1)


def sent_back(arguments: str, name: str = "add", said: str = '{"a": 1.0, "b": [true, null]}') -> dict[str, Any]:
    """What a call of `said` is after a client sent it back with these arguments."""
    calls = [
        {"id": call_id(3, index), "type": "function", "function": {"name": "add", "arguments": said}}
        for index in range(2)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    answered = {3: (ChatCall(messages=()), Reply(3, message, "tool_calls", 1, 1))}
    back = called(ID, name, arguments, answered)
    assert back["id"] == ID
    function: dict[str, Any] = back["function"]
    return function


def test_ids_of_calls_have_nine_letters_and_digits() -> None:
    ids = {call_id(number, index) for number in (1, 12, 99_999) for index in (0, 1, 99)}
    assert len(ids) == 9
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in ids)


@pytest.mark.parametrize("written", ['{"b":[true,null],"a":1}', '{"a": 1e0, "b": [true, null]}'])
def test_an_equal_value_is_the_policys_own_words(written: str) -> None:
    assert sent_back(written)["arguments"] == '{"a": 1.0, "b": [true, null]}'


@pytest.mark.parametrize(
    "written", ['{"a": 1, "b": [1, null]}', '{"a": true, "b": [true, null]}', '{"a": "1"}', "{", "[" * 100_000]
)
def test_any_other_value_stays_what_the_client_sent(written: str) -> None:
    assert sent_back(written)["arguments"] == written


def test_another_name_is_another_call() -> None:
    assert sent_back("{}", name="sub", said="{}") == {"name": "sub", "arguments": "{}"}
