"""What makes one tokenizer the same as another: what it does, and not how its files are written."""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolecall.data.tokenizer import ChatTokenizer
from tests.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def edit(path: Path, name: str, **values: Any) -> None:
    """Changes a JSON file, whose keys then stand in another order and on one line."""
    tree = json.loads((path / name).read_text()) | values
    (path / name).write_text(json.dumps(dict(sorted(tree.items(), reverse=True))))


def merging(fast: PreTrainedTokenizerFast, path: Path) -> None:
    """Saves it with a merge of its own tokens, whose result it has."""
    fast.save_pretrained(path)
    tree = json.loads((path / "tokenizer.json").read_text())
    tree["model"]["vocab"] |= {"it": len(fast)}
    tree["model"]["merges"] = [["i", "t"]]
    (path / "tokenizer.json").write_text(json.dumps(tree))


def test_another_copy_saved_otherwise_is_the_same_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "one")
    one = ChatTokenizer(tmp_path / "one")

    again = tmp_path / "again"
    one.backend.save_pretrained(again)
    for name in ("tokenizer.json", CONFIG):
        edit(again, name)
    edit(
        again,
        CONFIG,
        model_max_length=77,
        name_or_path="elsewhere",
        transformers_version="0.1",
        clean_up_tokenization_spaces=True,
    )
    assert ChatTokenizer(again).digest == one.digest

    edit(again, CONFIG, chat_template=(again / TEMPLATE).read_text())  # where older releases keep it
    (again / TEMPLATE).unlink()
    assert ChatTokenizer(again).digest == one.digest

    edit(again, CONFIG, chat_template=None)
    (own := tmp_path / "own.jinja").write_text(CHAT_TEMPLATE)
    assert ChatTokenizer(again, template=own).digest == one.digest
    assert ChatTokenizer(again, renders=False).digest != one.digest
    own.write_text(f"{CHAT_TEMPLATE}\n")  # which Jinja drops
    assert ChatTokenizer(again, template=own).digest == one.digest

    edit(again, CONFIG, chat_template=[{"name": "default", "template": CHAT_TEMPLATE}])
    assert ChatTokenizer(again).digest == one.digest
    edit(again, CONFIG, chat_template=[{"name": "tool_use", "template": CHAT_TEMPLATE}])
    assert ChatTokenizer(again).digest != one.digest


@pytest.mark.parametrize("other", ["added", "special", "order", "split", "form", "merge", "template"])
def test_what_makes_other_tokens_or_text_is_another_tokenizer(tmp_path: Path, other: str) -> None:
    fast = write_tokenizer(tmp_path / "one")
    one, path = ChatTokenizer(tmp_path / "one"), tmp_path / "other"
    match other:
        case "added":
            fast.add_tokens(["<tool>"])
        case "special":
            fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "é"]})
        case "split":
            fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
            )
        case "form":
            fast.backend_tokenizer.normalizer = normalizers.NFC()
        case "template":
            fast.chat_template = f"{CHAT_TEMPLATE} "
    fast.save_pretrained(path)
    if other == "order":
        write_tokenizer(path, more_tokens=["<tool>"])
    if other == "merge":
        merging(fast, path)
    assert ChatTokenizer(path).digest != one.digest


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "single_word"])
def test_an_added_token_found_otherwise_is_another_tokenizer(tmp_path: Path, flag: str) -> None:
    write_tokenizer(tmp_path)
    one, tree = ChatTokenizer(tmp_path), json.loads((tmp_path / "tokenizer.json").read_text())
    tree["added_tokens"][1][flag] ^= True
    edit(tmp_path, "tokenizer.json", **tree)
    assert ChatTokenizer(tmp_path).digest != one.digest


def test_special_tokens_that_are_read_as_text_are_another_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    one = ChatTokenizer(tmp_path)
    edit(tmp_path, CONFIG, split_special_tokens=True)
    assert ChatTokenizer(tmp_path).digest != one.digest


@pytest.mark.parametrize("is_read", [True, False])
def test_a_special_token_counts_where_a_template_reads_it(tmp_path: Path, is_read: bool) -> None:
    write_tokenizer(tmp_path, f"{{{{ eos_token }}}}{CHAT_TEMPLATE}" if is_read else CHAT_TEMPLATE)
    one = ChatTokenizer(tmp_path)
    edit(tmp_path, CONFIG, eos_token="<|pad|>")
    assert (ChatTokenizer(tmp_path).digest != one.digest) == is_read


@pytest.mark.parametrize("num_more", [300, 1300])
def test_a_model_of_the_family_takes_ids_for_the_same_text_whatever_tokens_it_adds(
    tmp_path: Path, num_more: int
) -> None:
    pieces = [f"<{number}>" for number in range(num_more)]
    fast = write_tokenizer(tmp_path / "one", more_tokens=pieces)
    one = ChatTokenizer(tmp_path / "one")
    fast.add_tokens(["<tool>"])
    fast.chat_template = None
    fast.save_pretrained(tmp_path / "teacher")
    teacher = ChatTokenizer(tmp_path / "teacher", renders=False)
    assert teacher.digest != one.digest
    assert teacher.ids_digest == one.ids_digest
    write_tokenizer(tmp_path / "stranger", more_tokens=["<tool>", *pieces])
    assert ChatTokenizer(tmp_path / "stranger").ids_digest != one.ids_digest


def test_a_vocabulary_is_read_once_for_a_digest(tmp_path: Path) -> None:
    """A large one takes a tenth of a second."""
    write_tokenizer(tmp_path, more_tokens=[f"<{number}>" for number in range(1300)])
    one, num_reads = ChatTokenizer(tmp_path), 0

    def count(_frame: FrameType, event: str, called: Any) -> None:
        nonlocal num_reads
        num_reads += event == "c_call" and called.__name__ == "get_vocab"

    sys.setprofile(count)
    try:
        assert one.digest != one.ids_digest
    finally:
        sys.setprofile(None)
    assert num_reads == 2
