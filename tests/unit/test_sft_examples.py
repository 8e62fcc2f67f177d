"""Examples of `rolecall sft`: what is read, what the loss is on, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from rolecall.data.sft_examples import Example, end_of_response, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from rolecall.settings import SftDataSection
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer

ASKED = {"role": "user", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALLED = {
    "role": "assistant",
    "content": "let me see",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return path


def load(tmp_path: Path, *rows: Any, **fields: Any) -> list[Example]:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_examples(file, SftDataSection(train=file, batch_size=1, **fields), "data.train"))


def test_the_loss_is_on_the_response_and_the_token_that_ends_it(model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model)
    ((row,),) = tokenize(load(tmp_path, {"prompt": "sort: 21", "response": "12"}), tokenizer, EOS_TOKEN_ID, 100).rows
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": "sort: 21"}]))
    assert row["token_ids"].tolist() == [*prompt, *tokenizer.encode("12"), EOS_TOKEN_ID]
    assert row["loss_mask"].tolist() == [0] * len(prompt) + [1, 1, 1]
    assert row["response_mask"].tolist() == row["loss_mask"].tolist()


def test_a_response_that_ends_itself_is_not_ended_twice(model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model)
    ((row,),) = tokenize(load(tmp_path, {"prompt": "a", "response": "b<|im_end|>"}), tokenizer, EOS_TOKEN_ID, 100).rows
    assert row["token_ids"].tolist().count(EOS_TOKEN_ID) == 2  # the prompt's own turn, and the response's


def test_a_response_that_goes_on_after_its_end_is_refused(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b<|im_end|>\n"}]
    with pytest.raises(ConfigError, match=r"line 2: the response spells the token that ends it, 'b<.im_end.>.n'"):
        tokenize(load(tmp_path, *rows), ChatTokenizer(model), EOS_TOKEN_ID, 100)


def test_prompts_and_responses_may_be_messages(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (found,) = load(
        tmp_path,
        {"question": turns, "answer": [{"role": "assistant", "content": "d"}]},
        prompt_field="question",
        response_field="answer",
    )
    assert found.messages == tuple(turns)
    assert found.response == "d"


def test_a_prompt_that_ends_with_the_assistant_and_has_no_response_is_a_conversation(
    model: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = ChatTokenizer(model)
    talk, row = load(tmp_path, {"prompt": turns}, {"prompt": "a", "response": "b"}, system_prompt="ours")
    ((one,), (other,)) = tokenize([talk, row], tokenizer, EOS_TOKEN_ID, 1000).rows
    assert all(one[name].tolist() == other[name].tolist() for name in one), "what it says is the same"
    assert talk.messages[0] == {"role": "system", "content": "ours"}
    again = [*turns, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    assert [load(tmp_path, {"prompt": again, "response": "e"})[0].response] == ["e"], "with a response, a prompt"


def test_conversations_of_parquet_are_those_of_json_lines_without_the_nulls_that_its_structs_add(
    tmp_path: Path,
) -> None:
    def row(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        properties = {each: {"type": "string"} for each in arguments}
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        return {"prompt": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}

    rows = [row("weather", city="Paris"), row("add", x="1", y=["2"]), row("wait")]
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    section = SftDataSection(train=file, batch_size=1)
    plain = [(each.messages, each.tools) for each in load(tmp_path, *rows)]
    assert [(each.messages, each.tools) for each in load_examples(file, section, "data.train")] == plain
    (example,) = load(tmp_path, row("weather", city=None))
    assert example.messages[-1]["tool_calls"][0]["function"]["arguments"] == {"city": None}, "as it was written"


def test_what_a_template_cannot_show_names_its_line_and_field(model: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": tools}
    with pytest.raises(ConfigError, match=r"line 1, field 'prompt': the chat template does not show the tools"):
        tokenize(load(tmp_path, row), ChatTokenizer(model), EOS_TOKEN_ID, 1000)


def test_a_system_prompt_goes_before_prompts_without_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]
    first, second = load(
        tmp_path, {"prompt": "a", "response": "b"}, {"prompt": own, "response": "b"}, system_prompt="ours"
    )
    assert first.messages[0] == {"role": "system", "content": "ours"}
    assert second.messages[0] == {"role": "system", "content": "mine"}


def test_what_is_too_long_is_refused_and_counted_and_never_cut(model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model)
    found = load(tmp_path, {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b" * 200})
    (short,) = tokenize(found[:1], tokenizer, EOS_TOKEN_ID, 1000).rows[0]
    examples = tokenize(found, tokenizer, EOS_TOKEN_ID, len(short["token_ids"]))
    assert examples.num_too_long == 1
    assert [row["token_ids"].tolist() for (row,) in examples.rows] == [short["token_ids"].tolist()]
    assert tokenize(found, tokenizer, EOS_TOKEN_ID, len(short["token_ids"]) - 1).rows == ()


def test_the_digest_is_of_what_is_trained_on(model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model)

    def digest(*responses: str) -> str:
        return tokenize(
            load(tmp_path, *({"prompt": "a", "response": response} for response in responses)),
            tokenizer,
            EOS_TOKEN_ID,
            60,
        ).digest

    assert digest("b", "c") == digest("b", "c") == digest("b", "x" * 200, "c")
    assert len({digest("b", "c"), digest("c", "b"), digest("bc")}) == 3


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "a"}, r"line 1: no field 'response'.*data\.response_field"),
        ({"response": "a"}, r"line 1: no field 'prompt'.*data\.prompt_field"),
        (
            {"prompt": [{"role": "user", "content": "a"}]},
            "no field 'response'.*no conversation that ends with a message",
        ),
        ({"prompt": "a", "response": ""}, "field 'response': empty"),
        ({"prompt": "a", "response": 7}, "field 'response': a int"),
        ({"prompt": "a", "response": [{"role": "user", "content": "b"}]}, "one message of the assistant"),
        ({"prompt": 7, "response": "b"}, "field 'prompt'"),
        ({"prompt": [ASKED, CALLED], "response": "b"}, "line 1, field 'prompt': a message has tool_calls"),
        ({"prompt": "a", "response": [CALLED]}, "line 1, field 'response': a message has tool_calls"),
        (
            {"prompt": "a", "response": [{"role": "assistant", "content": "b", "reasoning_content": "c"}]},
            "line 1, field 'response': a message has reasoning_content",
        ),
        ({"prompt": "a", "response": "b", "tools": TOOLS}, "line 1, field 'tools': tools are not shown beside"),
        ({"prompt": "a", "response": "b", "tools": json.dumps(TOOLS)}, "line 1, field 'tools': tools are not shown"),
    ],
)
def test_a_row_that_is_no_example_is_named(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, row)


@pytest.mark.parametrize("none", [None, [], "[]"])
def test_fields_of_conversations_that_hold_nothing_pass(tmp_path: Path, none: object) -> None:
    answer: dict[str, object] = {"role": "assistant", "content": "b", "tool_calls": [], "reasoning_content": None}
    (found,) = load(tmp_path, {"prompt": [ASKED], "response": [answer], "tools": none})
    assert (found.response, found.tools) == ("b", ())


def test_a_missing_or_empty_file_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"evaluation\.path"):
        next(load_examples(tmp_path / "none.jsonl", SftDataSection(train=tmp_path, batch_size=1), "evaluation.path"))


@pytest.mark.parametrize(
    ("stops", "after", "expected"),
    [([2], "<|im_end|>\n", 2), ([2, 0], "<|im_end|>\n", 2), ([0], "<|im_end|>\n", 0), ([0, 2], "\n", 2), ([1], "", 1)],
    ids=["the template's", "of several", "one where rollouts stop", "the tokenizer's", "the model's"],
)
def test_a_response_ends_where_rollouts_stop_and_as_the_template_says_if_they_stop_there(
    tmp_path: Path, stops: list[int], after: str, expected: int
) -> None:
    fast: PreTrainedTokenizerFast = write_tokenizer(tmp_path)
    fast.chat_template = "{% for message in messages %}{{ message['content'] + " + json.dumps(after) + " }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert end_of_response(tmp_path, ChatTokenizer(tmp_path)) == expected
