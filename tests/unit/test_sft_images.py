"""Images in examples of `rolecall sft`: what rows may say, which tokens they become, what is refused or left out."""

import errno
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from rolecall.data import sft_examples
from rolecall.data.continuation import Continuation
from rolecall.data.images.files import ImageFile
from rolecall.data.images.limits import check_sft_images
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.images.spool import Spool
from rolecall.data.images.tokens import require_visual_tokens, run_lengths
from rolecall.data.sft_examples import Example, TokenizedExamples, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, DiskFullError, InvalidInputError, StorageUnavailableError
from rolecall.settings import SftDataSection, SftSettings
from tests.pictures import PAD, picture, write_seeing
from tests.tiny_tokenizer import EOS_TOKEN_ID, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer
from tests.unit.test_images import load as load_prompts
from tests.unit.test_sft_examples import load as load_texts

WIDE, TALL = 10, 8
"""Tokens of the pictures."""
THINKING = (
    "{% set last = namespace(asked=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}"
    "{% endfor %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is not string %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% elif message.role == 'assistant' and loop.index0 < last.asked %}"
    "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with images that drops thinking from turns before the last question."""
BLIND_TO_TOOLS = VISION_TEMPLATE.replace(
    "part.type == 'image'", "message.role == 'tool' %}{% elif part.type == 'image'"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wide.png").write_bytes(picture(40, 16))
    (tmp_path / "tall.png").write_bytes(picture(16, 32))
    (tmp_path / "broken.png").write_bytes(picture(40, 40)[:20])
    return tmp_path


def load(folder: Path, *rows: Any, **fields: Any) -> list[Example]:
    return load_texts(folder, *rows, **{"images_field": "images", **fields})


def tokens(
    folder: Path, examples: Iterable[Example], longest: int = 1000, template: str = "", spool: Spool | None = None
) -> TokenizedExamples:
    path = write_seeing(folder / "model")
    if template:
        write_tokenizer(path, template, VISION_TOKENS)
    return tokenize(examples, ChatTokenizer(path), EOS_TOKEN_ID, longest, require_visual_tokens(path), spool)


def asked(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


IMAGE = {"type": "image"}


# --- rows -------------------------------------------------------------------------------------------


def test_a_prompt_is_that_of_a_run_and_the_response_follows_it(folder: Path) -> None:
    row = {"prompt": "<image>how <image>?", "images": ["wide.png", "tall.png"], "response": "an <image> tag"}
    examples = tokens(folder, load(folder, row, {"prompt": "none", "response": "b"}))
    (segment,), (other,) = examples.rows
    tokenizer = ChatTokenizer(folder / "model")
    encoder = PromptEncoder(tokenizer, require_visual_tokens(folder / "model"))
    prompt, files = encoder.encode(load_prompts(folder / "train.jsonl")[0])
    response = [*tokenizer.encode("an <image> tag"), EOS_TOKEN_ID]
    assert segment["token_ids"].tolist() == [*prompt, *response], "in a response it is text"
    assert segment["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(response)
    assert run_lengths(segment["token_ids"].tolist(), PAD) == [WIDE, TALL]
    shown, none = examples.images
    assert [image.read() for image in shown.files] == files
    assert shown.where == f"{folder / 'train.jsonl'}, line 1"
    assert (none.files, PAD in other["token_ids"]) == ((), False)


def test_a_mark_in_an_assistants_turn_is_an_image_in_a_prompt_and_letters_in_a_conversation(folder: Path) -> None:
    talk = [asked("a"), said("write <image>"), asked("b")]
    prompt = {"prompt": talk, "images": ["wide.png"], "response": "c"}
    (row,), (other,) = tokens(folder, load(folder, prompt, {"prompt": [*talk, said("c")]})).rows
    assert [run_lengths(each["token_ids"].tolist(), PAD) for each in (row, other)] == [[WIDE], []]
    encoder = PromptEncoder(ChatTokenizer(folder / "model"), require_visual_tokens(folder / "model"))
    load(folder, prompt)
    ids, _ = encoder.encode(load_prompts(folder / "train.jsonl")[0])
    assert row["token_ids"][: len(ids)].tolist() == ids, "as in a run"


def test_parquet_holds_the_bytes_of_images(folder: Path) -> None:
    rows = [
        {"prompt": [asked(IMAGE, text("how?"))], "images": [{"bytes": picture(40, 16), "path": "x"}], "response": "a"},
        {"prompt": [asked(text("and?"))], "images": [], "response": "b"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "p.parquet")
    section = SftDataSection(train=(folder / "p.parquet",), batch_size=1, images_field="images")
    examples = tokens(folder, load_examples(section.train, section, "data.train"))
    assert [run_lengths(row["token_ids"].tolist(), PAD) for (row,) in examples.rows] == [[WIDE], []]
    assert [image.read() for image in examples.images[0].files] == [picture(40, 16)]


def test_images_that_a_data_set_holds_as_bytes_are_put_away_and_read_one_by_one(folder: Path) -> None:
    files = [picture(40, 16, seed) for seed in range(5)]
    rows = [{"prompt": "<image><image>", "images": [{"bytes": file}] * 2, "response": "a"} for file in files]
    rows[2]["images"] = [{"bytes": b"broken"}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "p.parquet")
    section = SftDataSection(train=(folder / "p.parquet",), batch_size=1, images_field="images")
    found = []
    for writes in (False, True):
        with Spool(folder / "spool", writes=writes) as spool:
            found.append(tokens(folder, load_examples(section.train, section, "data.train"), spool=spool))
        assert (folder / "spool").exists() == writes
    one, other = found
    assert one.images == other.images, "ranks that write none find them in the same places"
    kept = [image for row in one.images for image in row.files]
    assert not any(image.data for image in kept)
    order = [5, 0, 7, 2, 1, 3, 6, 4]
    whole = [file for file in (*files[:2], *files[3:]) for _ in range(2)]
    assert [kept[place].read() for place in order] == [whole[place] for place in order]
    assert (folder / "spool").stat().st_size == sum(map(len, whole))
    (folder / "spool").write_bytes(b"")
    with pytest.raises(InvalidInputError, match="spool has 0 bytes and had"):
        kept[0].read()
    by_path = ImageFile(1, folder / "wide.png")
    with Spool(folder / "none", writes=True) as spool:
        assert spool.put(by_path) is by_path
    assert not (folder / "none").exists()


def test_a_full_disk_beneath_images_that_are_put_away_is_told_in_words() -> None:
    with pytest.raises(DiskFullError, match="no space to put images away in /dev/full"):
        with Spool(Path("/dev/full"), writes=True) as spool:
            spool.put(ImageFile(5, data=b"bytes"))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "<image>", "response": "a"}, r"line 1, field 'prompt': the messages show 1 images.*'images' has 0"),
        (
            {"prompt": "a", "images": ["wide.png"], "response": "a"},
            "the messages show 0 images.* has 1; show each once",
        ),
        ({"prompt": "<image>", "images": ["x"], "response": "a"}, r"line 1, field 'images', image 1: there is no file"),
        ({"prompt": [asked("<image>"), said("<image>")]}, "the messages show 1 images.*'images' has 0"),
        (
            {"prompt": [asked("a"), said([IMAGE])], "images": ["wide.png"]},  # type: ignore[arg-type]
            "line 1, field 'prompt', message 2: the assistant shows an image, and its turns are text",
        ),
        ({"prompt": [asked({"type": "video"}), said("a")]}, r"message 1: a part of a message is neither"),
    ],
)
def test_a_row_with_more_images_or_fewer_is_refused_by_its_line(folder: Path, row: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(folder, row)


def test_without_the_setting_a_mark_is_text_and_lists_are_refused(folder: Path) -> None:
    (example,) = load(folder, {"prompt": "<image>", "images": ["x"], "response": "b"}, images_field=None)
    assert (example.messages[0]["content"], example.images) == ("<image>", ())
    with pytest.raises(ConfigError, match="message 1: its content is no text"):
        load(folder, {"prompt": [asked(text("a")), said("b")]}, images_field=None)


def test_a_system_prompt_that_shows_an_image_is_refused_by_its_name() -> None:
    with pytest.raises(ValidationError, match="system_prompt: it says <image>"):
        SftDataSection(train=(Path("x"),), batch_size=1, images_field="images", system_prompt="<image>")


# --- what is left out -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "<image>", "images": ["broken.png"], "response": "a"}, "an image cannot be read"),
        ({"prompt": "<|image_pad|>", "response": "a"}, "1 tokens that stand for an image .* and 0 images"),
        ({"prompt": "a", "response": "<|image_pad|>"}, "what is trained spells the token of an image"),
        ({"prompt": [asked("a"), said("<|image_pad|>")]}, "what is trained spells the token of an image"),
        (
            {"prompt": [asked("a"), said("<|image_pad|>", weight=0), asked("b"), said("c")]},
            "1 tokens that stand for an image .* and 0 images",
        ),
    ],
)
def test_an_example_that_cannot_be_shown_is_left_out_told_and_counted(folder: Path, row: Any, why: str) -> None:
    shown = {"prompt": "<image>", "images": ["wide.png"], "response": "a"}
    examples = tokens(folder, load(folder, row, shown))
    assert len(examples.rows) == len(examples.images) == 1
    assert examples.num_too_long == 0
    (told,) = examples.unshown
    assert told.startswith(f"{folder / 'train.jsonl'}, line 1")
    assert re.search(why, told)


def test_what_is_said_to_the_assistant_later_may_spell_the_token_of_an_image(folder: Path) -> None:
    row = {"prompt": [asked("<image>"), said("b"), asked("<|image_pad|>"), said("c")], "images": ["wide.png"]}
    examples = tokens(folder, load(folder, row))
    assert examples.unshown == ()
    assert run_lengths(examples.rows[0][0]["token_ids"].tolist(), PAD) == [WIDE]


def test_images_in_messages_that_the_template_does_not_show_leave_the_example_out(folder: Path) -> None:
    row = {"prompt": [asked("a"), said("b"), asked(IMAGE, role="tool"), said("c")], "images": ["wide.png"]}
    examples = load(folder, row)
    assert len(tokens(folder, examples).rows) == 1
    blind = tokens(folder, examples, template=BLIND_TO_TOOLS)
    assert "0 tokens that stand for an image" in blind.unshown[0]


def test_images_count_with_their_tokens_where_an_example_is_too_long(folder: Path) -> None:
    row = {"prompt": "<image>", "images": ["wide.png"], "response": "a"}
    (whole,) = tokens(folder, load(folder, row)).rows[0]
    longest = len(whole["token_ids"])
    assert len(tokens(folder, load(folder, row), longest).rows) == 1
    assert tokens(folder, load(folder, row), longest - 1).num_too_long == 1


def test_an_image_whose_disk_is_away_is_no_broken_one(folder: Path) -> None:
    image = ImageFile(1, folder / "gone.png")
    with pytest.raises(StorageUnavailableError, match=r"gone\.png cannot be read: No such file"):
        image.size()
    assert ImageFile(1, folder / "wide.png").size() == ImageFile(1, data=picture(40, 16)).size() == (40, 16)


def test_a_disk_that_is_away_for_a_while_at_the_start_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sft_examples, "RETRY_S", 0.01)
    real: dict[str, Any] = {"stat": Path.stat, "open": Path.open}
    asked_for = dict.fromkeys(real, 0)

    def away_once(name: str) -> Any:
        def answer(path: Path, *arguments: Any, **more: Any) -> Any:
            asked_for[name] += path.name == "wide.png"
            if path.name == "wide.png" and asked_for[name] == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            return real[name](path, *arguments, **more)

        return answer

    for name in real:
        monkeypatch.setattr(Path, name, away_once(name))
    row = {"prompt": "<image>", "images": ["wide.png"], "response": "a"}
    assert len(tokens(folder, load(folder, row)).rows) == 1
    assert asked_for == {"stat": 2, "open": 2}
    assert caplog.text.count("wide.png cannot be read: Stale file handle") == 2


def test_memory_that_a_process_lacks_is_no_fault_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spent(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.Image.open", spent)
    with pytest.raises(MemoryError):
        tokens(folder, load(folder, {"prompt": "<image>", "images": ["wide.png"], "response": "a"}))


def test_the_digest_tells_an_image_of_another_length(folder: Path) -> None:
    row = {"prompt": "<image>", "images": ["wide.png"], "response": "a"}
    digests = set()
    for seed in (0, 1):
        (folder / "wide.png").write_bytes(picture(40, 16, seed) + bytes(seed))
        digests.add(tokens(folder, load(folder, row)).digest)
    assert len(digests) == 2


# --- conversations ----------------------------------------------------------------------------------


def test_a_conversation_with_images_has_the_tokens_of_an_episode_that_shows_them(folder: Path) -> None:
    """Held to what a rollout puts between turns, image for image."""
    talk = [
        asked(IMAGE, text("what?")),
        said("wide"),
        asked("and this, <image>?"),
        said("tall"),
        asked(IMAGE, text("again"), IMAGE, role="tool"),
        said("both"),
    ]
    row = {"prompt": talk, "images": ["wide.png", "tall.png", "tall.png", "wide.png"]}
    ((segment,),) = tokens(folder, load(folder, row)).rows
    tokenizer, numbers = ChatTokenizer(folder / "model"), [WIDE, TALL, TALL, WIDE]
    continuation = Continuation(tokenizer, visual_tokens=require_visual_tokens(folder / "model"))
    told: list[dict[str, Any]] = [dict(message) for message in load(folder, row)[0].messages]
    ids = continuation.opening(told[:1], num_own=1, image_tokens=numbers[:1])
    expected = [0] * len(ids)
    for turn, num_shown in ((1, 1), (3, 2), (5, 4)):
        if turn > 1:
            added = continuation.ids(ids, told[:turn], 1, image_tokens=numbers[:num_shown])
            assert added is not None
            ids, expected = ids + added, expected + [0] * len(added)
        spoken = [*tokenizer.encode(told[turn]["content"]), EOS_TOKEN_ID]
        ids, expected = ids + spoken, expected + [1] * len(spoken)
    assert segment["token_ids"].tolist() == ids
    assert segment["loss_mask"].tolist() == expected


def test_each_segment_shows_the_images_of_its_conversation_so_far(folder: Path) -> None:
    thought = "<think>hm</think>"
    talk = [asked("<image>"), said(f"{thought}a"), asked("<image>"), said(f"{thought}b")]
    (row,) = tokens(folder, load(folder, {"prompt": talk, "images": ["wide.png", "tall.png"]}), template=THINKING).rows
    assert [run_lengths(segment["token_ids"].tolist(), PAD) for segment in row] == [[WIDE], [WIDE, TALL]]
    for segment in row:
        ids = segment["token_ids"]
        assert not segment["loss_mask"][ids == PAD].any()
        spoken = ChatTokenizer(folder / "model").spell(ids[segment["loss_mask"] != 0].tolist())
        assert spoken in (f"{thought}a<|im_end|>", f"{thought}b<|im_end|>")


# --- models -----------------------------------------------------------------------------------------


def settings_of(path: Path, model: dict[str, Any], **data: Any) -> SftSettings:
    return SftSettings.model_validate(
        {
            "run": {"name": "warm", "dir": str(path / "run"), "num_steps": 1},
            "model": {"path": str(path), **model},
            "data": {"train": str(path / "train.jsonl"), "batch_size": 2, **data},
        }
    )


def test_a_tower_is_trained_where_images_are_shown_and_it_is_not_asked_to_stay(tmp_path: Path) -> None:
    frozen = {
        (asks, field): settings_of(tmp_path, {"freeze_vision_tower": asks}, images_field=field).freezes_vision_tower
        for asks in (False, True)
        for field in (None, "images")
    }
    assert frozen == {(False, None): True, (False, "images"): False, (True, None): True, (True, "images"): True}


@pytest.mark.parametrize(
    ("sees", "model", "data", "complaint"),
    [
        (False, {}, {"images_field": "images"}, r"data\.images_field: model\.path \S+ is no model that sees images"),
        (False, {"freeze_vision_tower": True}, {}, r"freeze_vision_tower: model\.path \S+ has no vision tower"),
        (True, {"dtype": "float16"}, {"images_field": "images"}, "dtype float16: .* vision towers were not tried"),
    ],
)
def test_what_a_model_has_not_is_refused(
    tmp_path: Path, sees: bool, model: dict[str, Any], data: dict[str, Any], complaint: str
) -> None:
    write_seeing(tmp_path, {} if sees else {"model_type": "qwen3"})
    with pytest.raises(ConfigError, match=complaint):
        check_sft_images(settings_of(tmp_path, model, **data))
    assert check_sft_images(settings_of(tmp_path, {})) is None
