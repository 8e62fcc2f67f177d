"""Between two turns of an episode: right for templates that are prefix-stable, refused in words for others."""

from pathlib import Path

import pytest

from rolecall.data.continuation import Continuation
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import InvalidInputError
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer

OPEN = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
CLOSE = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SAYS = "{{ message['content'] }}"
LAST_THOUGHT_ONLY = (
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message['content'] }}{% endif %}"
)


def continuation(folder: Path, template: str | None = None) -> tuple[ChatTokenizer, Continuation]:
    fast = write_tokenizer(folder)
    if template is not None:
        fast.chat_template = template
        fast.save_pretrained(folder)
    tokenizer = ChatTokenizer(folder)
    return tokenizer, Continuation(tokenizer)


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_chatml_is_prefix_stable_and_its_words_are_appended(tmp_path: Path, role: str) -> None:
    tokenizer, continued = continuation(tmp_path)
    assert continued.problem(role) is None
    between = f"<|im_start|>{role}\nhi<|im_end|>\n<|im_start|>assistant\n"
    heard = [{"role": role, "content": "hi"}]
    assert tokenizer.spell(continued.ids(EOS_TOKEN_ID, heard)) == f"\n{between}", "the end was sampled"
    assert tokenizer.spell(continued.ids(7, heard)) == f"<|im_end|>\n{between}", "a turn that was cut gets its end"


def test_whole_conversations_are_what_the_template_renders(tmp_path: Path) -> None:
    tokenizer, continued = continuation(tmp_path)
    turns = [{"role": "user", "content": "a"}]
    ids = tokenizer.encode(tokenizer.render(turns))
    for number in range(5):
        said = [{"role": "assistant", "content": f"says {number}"}]
        heard = [{"role": "user", "content": f"hears {number}"}] * (1 + number % 2)
        ids += [*tokenizer.encode_plain(f"says {number}"), EOS_TOKEN_ID]
        ids += continued.ids(ids[-1], heard)
        turns += [*said, *heard]
        assert ids == tokenizer.encode(tokenizer.render(turns))


def test_a_message_that_spells_special_tokens_is_text(tmp_path: Path) -> None:
    tokenizer, continued = continuation(tmp_path)
    ids = continued.ids(EOS_TOKEN_ID, [{"role": "user", "content": "<|im_end|>!"}, {"role": "user", "content": "b"}])
    assert ids.count(EOS_TOKEN_ID) == 2, "the ends of the two messages alone"
    assert "<|im_end|>!<|im_end|>" in tokenizer.spell(ids)


@pytest.mark.parametrize(
    ("template", "role", "words"),
    [
        (OPEN + LAST_THOUGHT_ONLY + CLOSE, "user", "shows an earlier turn otherwise once a message of the role 'user'"),
        (OPEN + "{{ message['content'] | upper }}" + CLOSE, "user", "as it was said"),
        (OPEN + "{{ loop.index }}" + SAYS + CLOSE, "user", "different things before a message"),
        ("{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + OPEN + SAYS + CLOSE,
         "tool", "cannot be used with messages of the role 'tool'"),
    ],
)  # fmt: skip
def test_a_template_that_is_not_prefix_stable_is_refused_and_says_what_breaks_it(
    tmp_path: Path, template: str, role: str, words: str
) -> None:
    _, continued = continuation(tmp_path, template)
    assert words in (continued.problem(role) or "")
    with pytest.raises(InvalidInputError, match="the chat template"):
        continued.ids(EOS_TOKEN_ID, [{"role": role, "content": "hi"}])


def test_a_template_that_goes_on_otherwise_with_tools_is_refused_for_them_alone(tmp_path: Path) -> None:
    reminds = "{% if tools %}Mind your tools.{% endif %}"
    _, continued = continuation(tmp_path, f"{OPEN}{SAYS}{CLOSE.replace('assistant', reminds + 'assistant')}")
    assert continued.problem("tool") is None
    assert "puts different things before a message" in str(continued.problem("tool", with_tools=True))
