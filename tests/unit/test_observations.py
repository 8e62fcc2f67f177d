"""What is left out of an environment's long answers: the named part, counted, and whole characters."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.data.tokenizer import ChatTokenizer
from services.rollout.turns.observations import Observations, Side
from tests.tiny_tokenizer import write_tokenizer

MARKER = re.compile(r"\[([\d,]+) tokens left out\]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer(folder)


def shortened(tokenizer: ChatTokenizer, text: str, max_tokens: int | None, cut: Side = "middle") -> tuple[str, int]:
    told = {"role": "tool", "content": text}
    (message,), num_left_out = Observations(tokenizer, max_tokens, cut).shortened([told])
    assert message["role"] == "tool"
    return message["content"], num_left_out


@pytest.mark.parametrize(
    ("cut", "read"),
    [
        ("left", "[5 tokens left out]fghij"),
        ("middle", "abc[5 tokens left out]ij"),
        ("right", "abcde[5 tokens left out]"),
    ],
)
def test_the_named_part_is_left_out_and_a_marker_says_how_much(tokenizer: ChatTokenizer, cut: Side, read: str) -> None:
    assert shortened(tokenizer, "abcdefghij", 5, cut) == (read, 5)


def test_what_fits_and_what_nobody_bounds_stays(tokenizer: ChatTokenizer) -> None:
    assert shortened(tokenizer, "abcde", 5) == ("abcde", 0)
    assert shortened(tokenizer, "x" * 5000, None) == ("x" * 5000, 0)
    assert shortened(tokenizer, "x" * 5000, 10)[0] == "xxxxx[4,990 tokens left out]xxxxx"


def test_the_longest_are_read_in_pieces_and_cut_where_they_would_be(tokenizer: ChatTokenizer) -> None:
    text = f"ab{'x' * (2**18 + 100)}yz"
    assert shortened(tokenizer, text, 4) == ("ab[262,244 tokens left out]yz", 2**18 + 100)


def test_each_message_has_its_own_length_and_the_sum_is_counted(tokenizer: ChatTokenizer) -> None:
    told = [{"role": "tool", "content": text} for text in ("abcd", "ab", "abcdef")]
    read, num_left_out = Observations(tokenizer, 2, "right").shortened(told)
    assert [message["content"] for message in read] == ["ab[2 tokens left out]", "ab", "ab[4 tokens left out]"]
    assert num_left_out == 6


@pytest.mark.parametrize(
    ("cut", "read"),
    [
        ("left", ["[6 tokens left out]", None, "g", None, "hij"]),
        ("middle", ["ab[6 tokens left out]", None, None, "ij"]),
        ("right", ["abc", None, "d[6 tokens left out]", None]),
    ],
)
def test_the_text_around_images_is_cut_as_one_and_they_stay(
    tokenizer: ChatTokenizer, cut: Side, read: list[str | None]
) -> None:
    image, texts = {"type": "image"}, [{"type": "text", "text": text} for text in ("abc", "defg", "hij")]
    told = {"role": "tool", "content": [texts[0], image, texts[1], image, texts[2]]}
    (message,), num_left_out = Observations(tokenizer, 4, cut).shortened([told])
    assert ([part.get("text") for part in message["content"]], num_left_out) == (read, 6)
    assert Observations(tokenizer, 10, cut).shortened([told]) == ([told], 0)


def test_a_special_token_that_is_spelled_counts_as_its_letters(tokenizer: ChatTokenizer) -> None:
    assert shortened(tokenizer, "a<|im_end|>", 11) == ("a<|im_end|>", 0)
    assert shortened(tokenizer, "a<|im_end|>b", 11, "right") == ("a<|im_end|>[1 tokens left out]", 1)


@given(
    text=st.text(st.sampled_from("a ä漢😀\n"), max_size=40),
    max_tokens=st.integers(1, 30),
    cut=st.sampled_from(["left", "middle", "right"]),
)
def test_what_is_read_is_the_texts_own_beginning_and_end(
    tokenizer: ChatTokenizer, text: str, max_tokens: int, cut: Side
) -> None:
    read, num_left_out = shortened(tokenizer, text, max_tokens, cut)
    assert (read, num_left_out) == shortened(tokenizer, text, max_tokens, cut), "and always the same"
    num_tokens = len(tokenizer.encode_plain(text))
    assert num_left_out == max(0, num_tokens - max_tokens)
    if not num_left_out:
        assert read == text
        return
    head, told, tail = MARKER.split(read)
    assert int(told) == num_left_out
    assert text.startswith(head)
    assert text.endswith(tail)
    kept = len(tokenizer.encode_plain(head)) + len(tokenizer.encode_plain(tail))
    assert max_tokens - 6 <= kept <= max_tokens, "but for the tokens of a character that was cut through, at both ends"
    assert not (head if cut == "left" else tail if cut == "right" else "")
