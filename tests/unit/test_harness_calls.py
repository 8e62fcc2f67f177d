"""What clients send: calls of tools, which are the policy's own words where the value is the same, and images."""

from typing import Any

import pytest

from services.rollout.harness.calls import (
    ChatCall,
    Files,
    RefusedError,
    Reply,
    call_id,
    called,
    content_of,
    digests_of,
    file_in,
    text_of,
)

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


def content(*parts: str | bytes) -> tuple[Any, Files]:
    """What is read of texts and images."""
    given = [{"type": "text", "text": part} if isinstance(part, str) else {"file": part} for part in parts]
    files = Files()
    return content_of(given, ("text",), lambda part: part.get("file"), files), files


def test_content_is_compared_by_what_it_says_and_shows_however_it_is_parted() -> None:
    whole, files = content("ab", b"1", "c", b"2", b"1")
    assert [part["type"] for part in whole] == ["text", "image", "text", "image", "image"]
    assert digests_of({"content": whole}) == [*files, next(iter(files))]
    assert list(files.values()) == [b"1", b"2"]
    assert content("a", "", "b", b"1", "", "c", b"2", "", b"1", "")[0] == whole
    assert content("ab", b"1", "c", b"1", b"2")[0] != whole
    assert content("ab", b"3", "c", b"2", b"3")[0] != whole
    assert content("a", "b") == ("ab", {})
    assert content(b"1", "") == (whole[1:2], {next(iter(files)): b"1"})


def test_text_shows_no_image() -> None:
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ("text",)) == "ab"
    with pytest.raises(RefusedError, match="a part of a message is 'image_url', which is not read here"):
        text_of([{"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ=="}}], ("text",))


@pytest.mark.parametrize("head", ["data:image/png;base64", "data:;base64", "data:image/jpeg;charset=x;base64"])
def test_a_url_that_holds_its_file_is_read(head: str) -> None:
    assert file_in(f"{head},YWI=") == b"ab"


@pytest.mark.parametrize("url", ["https://a/b.png", "http://a", "file:///a", "data:image/png,ab", "YWI=", "", None, 3])
def test_any_other_url_is_refused_and_nothing_is_fetched(url: Any) -> None:
    with pytest.raises(RefusedError, match="nothing is fetched here") as caught:
        file_in(url)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
