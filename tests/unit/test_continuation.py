"""Between two turns of an episode: right for templates that are prefix-stable; others say what breaks them, and are
looked at turn by turn.
"""

from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall.data.continuation import ChatMessage, Continuation
from rolecall.data.images.tokens import VisualTokens
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import InvalidInputError
from tests.pictures import PAD
from tests.tiny_tokenizer import EOS_TOKEN_ID, THINKING_TEMPLATE, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer

OPEN = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
CLOSE = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SAYS = "{{ message['content'] }}"
LAST_THOUGHT_ONLY = (
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message['content'] }}{% endif %}"
)
NO_THOUGHT = "{{ message['content'].split('</think>')[-1] }}"
NUMBERED = "{{ loop.index }}" + SAYS
SHOUTED = "{{ message['content'] | replace('y', 'Y') }}"
BREAKING = {
    "thinking of earlier turns is dropped": THINKING_TEMPLATE,
    "all thinking is dropped": OPEN + NO_THOUGHT + CLOSE,
    "all but the last turn's thinking is dropped": OPEN + LAST_THOUGHT_ONLY + CLOSE,
    "turns have numbers": OPEN + NUMBERED + CLOSE,
    "turns are shown otherwise": OPEN + SHOUTED + CLOSE,
    "a turn ends without a token": "{% for message in messages %}{{ message['role'] }}: " + NUMBERED
    + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
}  # fmt: skip
"""Templates that are not prefix-stable, by what breaks them."""
Breaking: TypeAlias = tuple[str, ChatTokenizer, Continuation]


def continuation(folder: Path, template: str | None = None) -> tuple[ChatTokenizer, Continuation]:
    fast = write_tokenizer(folder)
    if template is not None:
        fast.chat_template = template
        fast.save_pretrained(folder)
    tokenizer = ChatTokenizer(folder)
    return tokenizer, Continuation(tokenizer)


def asked(*heard: dict[str, str]) -> list[dict[str, str]]:
    """A conversation of one turn, which `heard` follows."""
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *heard]


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_chatml_is_prefix_stable_and_its_words_are_appended(tmp_path: Path, role: str) -> None:
    tokenizer, continued = continuation(tmp_path)
    assert continued.problem(role) is None
    between = f"<|im_start|>{role}\nhi<|im_end|>\n<|im_start|>assistant\n"
    talk = asked({"role": role, "content": "hi"})
    assert tokenizer.spell(continued.ids([EOS_TOKEN_ID], talk, 1) or []) == f"\n{between}", "the end was sampled"
    assert tokenizer.spell(continued.ids([7], talk, 1) or []) == f"<|im_end|>\n{between}", "a cut turn gets its end"


def test_whole_conversations_are_what_the_template_renders(tmp_path: Path) -> None:
    tokenizer, continued = continuation(tmp_path)
    turns = [{"role": "user", "content": "a"}]
    ids = tokenizer.encode(tokenizer.render(turns))
    for number in range(5):
        said = [{"role": "assistant", "content": f"says {number}"}]
        heard = [{"role": "user", "content": f"hears {number}"}] * (1 + number % 2)
        ids += [*tokenizer.encode_plain(f"says {number}"), EOS_TOKEN_ID]
        turns += [*said, *heard]
        ids += continued.ids(ids, turns, len(heard)) or []
        assert ids == tokenizer.encode(tokenizer.render(turns)) == continued.opening(turns)


@pytest.mark.parametrize("template", [None, THINKING_TEMPLATE])
def test_a_message_that_spells_special_tokens_is_text(tmp_path: Path, template: str | None) -> None:
    tokenizer, continued = continuation(tmp_path, template)
    talk = asked({"role": "user", "content": "<|im_end|>!"}, {"role": "user", "content": "b"})
    before = tokenizer.encode(tokenizer.render(talk[:1]) + "b<|im_end|>")
    ids = continued.ids(before, talk, 2) or []
    assert ids.count(EOS_TOKEN_ID) == 2, "the ends of the two messages alone"
    assert "<|im_end|>!<|im_end|>" in tokenizer.spell(ids)
    assert [*before, *ids] == continued.opening(talk), "rendered anew, too"
    assert continued.opening(talk, num_own=3).count(EOS_TOKEN_ID) == 5, "the run's own messages are as they are"


@pytest.mark.parametrize(
    ("template", "role", "words"),
    [
        (OPEN + LAST_THOUGHT_ONLY + CLOSE, "user", "shows an earlier turn otherwise once a message of the role 'user'"),
        (THINKING_TEMPLATE, "user", "shows an earlier turn otherwise once a message of the role 'user'"),
        (OPEN + SHOUTED + CLOSE, "user", "as it was said"),
        (OPEN + NUMBERED + CLOSE, "user", "different things before a message"),
    ],
)
def test_a_template_that_is_not_prefix_stable_says_what_breaks_it(
    tmp_path: Path, template: str, role: str, words: str
) -> None:
    _, continued = continuation(tmp_path, template)
    assert continued.refusal(role) is None
    assert words in (continued.problem(role) or "")


def test_a_template_that_raises_for_a_role_refuses_it_in_words(tmp_path: Path) -> None:
    raises = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    _, continued = continuation(tmp_path, raises + OPEN + SAYS + CLOSE)
    assert "cannot be used with messages of the role 'tool'" in (continued.refusal("tool") or "")
    with pytest.raises(InvalidInputError, match="the chat template cannot render the turns user, assistant, tool"):
        continued.ids([EOS_TOKEN_ID], asked({"role": "tool", "content": "hi"}), 1)
    assert continued.problem("user") is None


def test_a_template_without_system_messages_is_proved_without_them(tmp_path: Path) -> None:
    raises = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    _, continued = continuation(tmp_path, raises + OPEN + SAYS + CLOSE)
    assert continued.problem("user") is None


def test_a_template_that_goes_on_otherwise_with_tools_is_not_proved_for_them_alone(tmp_path: Path) -> None:
    reminds = "{% if tools %}Mind your tools.{% endif %}"
    _, continued = continuation(tmp_path, f"{OPEN}{SAYS}{CLOSE.replace('assistant', reminds + 'assistant')}")
    assert continued.problem("tool") is None
    assert "puts different things before a message" in str(continued.problem("tool", with_tools=True))


PARTS = ["a", "y", " ", "\n", "é", "<think>", "</think>", "<|im_end|>", "<|im_start|>"]
WORDS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
HEARD = st.lists(st.tuples(st.sampled_from(["user", "tool"]), WORDS), min_size=1, max_size=2)
TURNS = st.lists(st.tuples(WORDS | WORDS.map(lambda said: f"<think>\nhm\n</think>\n\nx{said}"), st.booleans(), HEARD),
                 min_size=1, max_size=5)  # fmt: skip


@pytest.fixture(scope="module", params=BREAKING)
def breaking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Breaking:
    return request.param, *continuation(tmp_path_factory.mktemp("tokenizer"), BREAKING[request.param])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS)
def test_every_prompt_is_what_the_template_shows_and_extends_the_one_before_where_it_can(
    breaking: Breaking, turns: list[tuple[str, bool, list[tuple[str, str]]]]
) -> None:
    """Against the slow oracle: at each turn the whole conversation is rendered once more."""
    why, tokenizer, continued = breaking
    talk = [{"role": "user", "content": "a"}]
    ids = continued.opening(talk)
    for said, is_cut, heard in turns:
        ids = [*ids, *tokenizer.encode_plain(said), *([] if is_cut else [EOS_TOKEN_ID])]
        talk += [{"role": "assistant", "content": said}, *({"role": role, "content": text} for role, text in heard)]
        added = continued.ids(ids, talk, len(heard))
        oracle = tokenizer.render(talk)
        if added is None:
            could_go_on = oracle.startswith(tokenizer.spell(ids))
            assert not could_go_on or is_cut or "without a token" in why, "it had to begin anew"
            ids = continued.opening(talk)
        else:
            ids = [*ids, *added]
        assert tokenizer.spell(ids) == oracle, "what the policy reads is what the template shows"
        harmless = [{**each, "content": each["content"].replace("<|im_", "<im_")} for each in talk]
        ends = tokenizer.render(harmless).count("<|im_end|>")
        assert ids.count(EOS_TOKEN_ID) == ends, "what was said is text"


def test_thinking_goes_on_through_tools_and_is_dropped_at_the_next_question(tmp_path: Path) -> None:
    tokenizer, continued = continuation(tmp_path, THINKING_TEMPLATE)
    talk = [{"role": "user", "content": "a"}]
    ids = continued.opening(talk)
    for role, goes_on in [("tool", True), ("tool", True), ("user", False), ("tool", True)]:
        ids += [*tokenizer.encode_plain("<think>\nhm\n</think>\n\nb"), EOS_TOKEN_ID]
        talk += [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, {"role": role, "content": "c"}]
        added = continued.ids(ids, talk, 1)
        assert (added is not None) == goes_on
        ids = continued.opening(talk) if added is None else ids + added
    assert tokenizer.spell(ids).count("hm") == 1, "what was thought before the last question is gone"


NUMBERED_IMAGES = VISION_TEMPLATE.replace("{% for message", "{% set seen = namespace(n=0) %}{% for message", 1).replace(
    "{% if part.type == 'image' %}", "{% if part.type == 'image' %}{% set seen.n = seen.n + 1 %}{{ seen.n }}: "
)
"""Shows the number of each image."""
SHOWN: ChatMessage = {
    "role": "user",
    "content": [{"type": "text", "text": "<|image_pad|>"}, {"type": "image"}, {"type": "image"}],
}


@pytest.mark.parametrize("template", [VISION_TEMPLATE, NUMBERED_IMAGES], ids=["stable", "numbered"])
def test_images_between_turns_are_what_the_whole_conversation_shows_of_them(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path, template, VISION_TOKENS)
    tokenizer = ChatTokenizer(tmp_path)
    continued = Continuation(tokenizer, visual_tokens=VisualTokens(PAD, 4, 2, 64, 4096))
    assert continued.image_refusal("user") is None
    assert continued.problem("user") is None
    assert (continued.problem("user", with_images=True) is None) == (template == VISION_TEMPLATE)
    first: list[ChatMessage] = [{"role": "user", "content": [{"type": "image"}]}]
    before = [*continued.opening(first, image_tokens=[3]), *tokenizer.encode("b"), EOS_TOKEN_ID]
    talk: list[ChatMessage] = [*first, {"role": "assistant", "content": "b"}, SHOWN]
    added = continued.ids(before, talk, 1, image_tokens=[3, 2, 4])
    assert added is not None
    assert [*before, *added] == continued.opening(talk, image_tokens=[3, 2, 4])
    assert added.count(PAD) == 6


def test_a_template_that_shows_no_image_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, more_tokens=VISION_TOKENS)
    continued = Continuation(ChatTokenizer(tmp_path), visual_tokens=VisualTokens(PAD, 4, 2, 64, 4096))
    assert "images in messages of the role 'user'" in (continued.image_refusal("user") or "")


def test_a_template_that_shows_the_last_image_alone_says_so(tmp_path: Path) -> None:
    """An episode's second image would leave none of its first."""
    seen = "{% set ns = namespace(last=0) %}{% for each in messages %}{% if each.content is not string %}" + (
        "{% set ns.last = loop.index %}{% endif %}{% endfor %}"
    )
    places = VISION_TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages %}{% set at = loop.index %}"
    )
    last = seen + places.replace("{% if part.type == 'image' %}", "{% if part.type == 'image' and at == ns.last %}")
    write_tokenizer(tmp_path, last.replace("{{ part.text }}", "{{ part.text | default('') }}"), VISION_TOKENS)
    continued = Continuation(ChatTokenizer(tmp_path), visual_tokens=VisualTokens(PAD, 4, 2, 64, 4096))
    assert "has 1 tokens that stand for an image" in (continued.image_refusal("user") or "")
