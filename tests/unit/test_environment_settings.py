"""What the settings and `rolecall check` refuse of a run whose policy acts in an environment."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rolecall.data.continuation import Continuation
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.images.tokens import image_processor_of, read_processor_digest
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.checks import explain_environments, run_problem
from rolecall.errors import ConfigError
from rolecall.settings import EnvironmentSection, RewardComponent, RunSettings, load_settings, may_meet
from rolecall.store.budget import PromptBytes, StoreBudget
from rolecall.v1 import environment_pb2
from tests.pictures import write_seeing
from tests.smallest import smallest_tree
from tests.tiny_tokenizer import THINKING_TEMPLATE, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer

ADDRESS = {"address": "127.0.0.1:50080"}
MUTE = "{% if messages | length > 1 %}{{ raise_exception('one question alone') }}{% endif %}{{ messages[0].content }}"


def settings(folder: Path, scorer: dict[str, Any], **sections: Any) -> RunSettings:
    reward = {"components": {"won": {"scorer": scorer}}}
    return RunSettings.model_validate(smallest_tree(folder, reward=reward, **sections))


@pytest.mark.parametrize(
    ("scorer", "sections", "words"),
    [
        ({"kind": "environment"}, {}, "is what an environment gives, and there is none; add one"),
        (
            {"kind": "environment", "target": "a:b"},
            {"environments": {"game": ADDRESS}},
            "one of kind environment has none",
        ),
        ({"kind": "function"}, {"environments": {"game": ADDRESS}}, "a scorer of kind function needs one"),
        (
            {"kind": "environment", "scope": "group"},
            {"environments": {"game": ADDRESS}},
            "each episode a reward by itself",
        ),
        ({"kind": "environment"}, {"environments": {"game": {**ADDRESS, "max_turns": 0}}}, "greater than 0"),
        ({"kind": "environment"}, {"environments": {"game": {}}}, "Field required"),
        (
            {"kind": "environment"},
            {"environments": {"game": {**ADDRESS, "max_row_tokens": 1000}}},
            "less than one conversation",
        ),
        (
            {"kind": "environment"},
            {
                "environments": {"game": {**ADDRESS, "max_row_tokens": 20_000}},
                "algorithm": {"groups_per_batch": 1, "aggregation": "seq_mean_token_mean"},
                "actor": {"token_budget": 16384},
            },
            "exceeds actor.token_budget 16384, and the loss needs a whole trajectory",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(
    tmp_path: Path, scorer: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        settings(tmp_path, scorer, **sections)


@pytest.mark.parametrize("name", ["\u6570\u5b66", "a\tb", "x" * 201])
def test_a_set_that_no_session_can_be_named_after_is_refused(tmp_path: Path, name: str) -> None:
    evaluation = {"sets": {name: {"path": "held.jsonl"}}}
    with pytest.raises(ValidationError, match="stands in the names of environments' sessions"):
        settings(tmp_path, {"kind": "environment"}, environments={"game": ADDRESS}, evaluation=evaluation)
    settings(tmp_path, {"kind": "exact_match"}, evaluation=evaluation)
    evaluation = {"sets": {"math/AIME 2024 (v1.1)": {"path": "held.jsonl"}}}
    settings(tmp_path, {"kind": "environment"}, environments={"game": ADDRESS}, evaluation=evaluation)


def test_the_section_of_one_environment_is_named_and_none_is_left_over(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    tree = smallest_tree(tmp_path, environments={"game": ADDRESS, "left-out": None})
    file.write_text(yaml.safe_dump(tree))
    assert [*load_settings(file).environments] == ["game"]
    for written, told in (
        ({"environment": ADDRESS}, r"environment: there is no such setting \(did you mean 'environments'\?\)"),
        (
            {"environments": ADDRESS},
            r"environments\.address: environments holds sections by .* environments: \{NAME: \{address: \.\.\.\}\}",
        ),
        ({"environments": {"game": 8}}, r"environments\.game: a section is wanted; give its fields"),
    ):
        file.write_text(yaml.safe_dump({**smallest_tree(tmp_path), **written}))
        with pytest.raises(ConfigError, match=told):
            load_settings(file)


@pytest.mark.parametrize("name", ["", "Game", "a_b", "-a", "a-", "a/b", "x" * 43])
def test_a_name_that_cannot_stand_in_others_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError, match="stands in the names of metrics, certificates and pods"):
        settings(tmp_path, {"kind": "environment"}, environments={name: ADDRESS})


CONDITIONS: list[dict[str, Any]] = [
    {},
    {"task": "game"},
    {"task": ["game", "tools"]},
    {"task": "tools", "level": 1},
    {"level": [1.0, 2]},
    {"level": True},
    {"level": "1", "task": ["maths"]},
]
FIELDS = [{}, *({"task": task, "level": level} for task in ("game", "tools", "maths") for level in (1, 2, True, "1"))]


def plainly(when: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Whether the fields meet the conditions, value by value and type by type."""
    for field, wanted in when.items():
        among = wanted if isinstance(wanted, list) else [wanted]
        kinds = {bool: "truth", int: "number", float: "number", str: "text"}
        if not any(field in fields and kinds[type(fields[field])] == kinds[type(value)] and fields[field] == value
                   for value in among):  # fmt: skip
            return False
    return True


def test_environments_and_components_choose_prompts_by_one_rule_and_what_may_meet_is_known(tmp_path: Path) -> None:
    for one in CONDITIONS:
        environment = EnvironmentSection.model_validate({**ADDRESS, "when": one})
        component = RewardComponent.model_validate({"scorer": {"kind": "exact_match"}, "when": one})
        for fields in FIELDS:
            assert environment.takes(fields) == component.applies_to(fields, "") == plainly(one, fields)
        for other in CONDITIONS:
            second = EnvironmentSection.model_validate({**ADDRESS, "when": other})
            meeting = any(environment.takes(fields) and second.takes(fields) for fields in FIELDS)
            assert may_meet(environment.when, second.when) == may_meet(second.when, environment.when)
            assert may_meet(environment.when, second.when) >= meeting


def test_what_environments_give_applies_to_what_was_played_and_needs_one_that_agrees(tmp_path: Path) -> None:
    given = RewardComponent.model_validate({"scorer": {"kind": "environment"}, "when": {"task": ["game", "tools"]}})
    assert given.applies_to({"task": "game"}, "game")
    assert not given.applies_to({"task": "game"}, ""), "nobody played it"
    assert not given.applies_to({"task": "maths"}, "other")
    reward = {"components": {"won": {"scorer": {"kind": "environment"}, "when": {"task": "game"}}}}
    elsewhere = {"tools": {**ADDRESS, "when": {"task": "tools"}}}
    with pytest.raises(ValidationError, match=r"components\.won is .* whose when agrees with its own; mend one"):
        RunSettings.model_validate(smallest_tree(tmp_path, reward=reward, environments=elsewhere))
    beside = {**elsewhere, "game": {**ADDRESS, "when": {"source": "arcade"}}}
    RunSettings.model_validate(smallest_tree(tmp_path, reward=reward, environments=beside))


def test_what_a_run_needs_is_what_the_neediest_of_its_environments_needs(tmp_path: Path) -> None:
    seen = {"game": {**ADDRESS, "max_image_bytes": 5000}, "tools": {**ADDRESS, "max_row_tokens": 9000}}
    run = settings(tmp_path, {"kind": "environment"}, environments={**seen, "third": ADDRESS})
    assert (run.max_row_tokens, run.max_environment_image_bytes) == (9000, 5000)
    assert [run.episode_tokens(section) for section in run.environments.values()] == [2048, 9000, 2048]
    assert not run.keeps_over_shifts, "episodes end before a shift, and what is beside them, too"
    assert settings(tmp_path, {"kind": "exact_match"}).keeps_over_shifts
    with pytest.raises(ValidationError, match=r"environments\.tools\.max_row_tokens 100 is less than one conversation"):
        settings(tmp_path, {"kind": "environment"}, environments={**seen, "tools": {**ADDRESS, "max_row_tokens": 100}})


def test_a_row_is_as_long_as_a_conversation_unless_it_is_said_and_the_store_is_budgeted_for_it(tmp_path: Path) -> None:
    run = settings(tmp_path, {"kind": "environment"}, environments={"game": ADDRESS})
    longest = run.data.max_prompt_tokens + run.sampling.max_tokens
    assert run.max_row_tokens == longest
    longer = settings(
        tmp_path, {"kind": "environment"}, environments={"game": {**ADDRESS, "max_row_tokens": 4 * longest}}
    )
    assert longer.max_row_tokens == 4 * longest
    grown = StoreBudget.of(longer, PromptBytes(0)).group_bytes / StoreBudget.of(run, PromptBytes(0)).group_bytes
    assert 3 < grown < 4, "what a row takes beside its tokens stays"


def test_check_says_what_ends_an_episode_and_that_the_template_is_prefix_stable(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    run = settings(tmp_path, {"kind": "environment"}, environments={"game": ADDRESS})
    lines = list(explain_environments(run, ChatTokenizer(tmp_path)))
    assert "after 16 turns, 1024 tokens" in lines[0]
    assert lines[1:] == [
        "  the branches of its conversation are trained up to 2048 tokens an episode (max_row_tokens)",
        "  the chat template is prefix-stable for messages of user and tool",
    ]


def test_check_says_where_the_template_shows_an_environment_s_images(tmp_path: Path) -> None:
    seeing = write_seeing(tmp_path / "model")
    shown = {"environments": {"game": {**ADDRESS, "max_image_bytes": 5000}}, "model": {"path": str(seeing)}}
    run = settings(tmp_path, {"kind": "environment"}, **shown)
    assert list(explain_environments(run, ChatTokenizer(seeing)))[-1] == (
        "  it, or its agent, may show images of 5000 bytes in an episode, in messages of user and tool; each takes as "
        "many tokens as one of a prompt"
    )
    write_tokenizer(seeing, more_tokens=VISION_TOKENS)
    with pytest.raises(
        ConfigError, match=r"environments\.game\.max_image_bytes: the chat template cannot be used with images"
    ):
        list(explain_environments(run, ChatTokenizer(seeing)))
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    blind = settings(tmp_path, {"kind": "environment"}, **{**shown, "model": {"path": str(tmp_path)}})
    with pytest.raises(
        ConfigError, match=r"environments\.\*\.max_image_bytes: model\.path \S+ is no model that sees images"
    ):
        list(explain_environments(blind, ChatTokenizer(tmp_path)))


def test_roles_say_how_they_read_images_that_an_environment_alone_shows(tmp_path: Path) -> None:
    seeing = write_seeing(tmp_path / "model")
    model = {"model": {"path": str(seeing)}}
    shown = settings(
        tmp_path, {"kind": "environment"}, **model, environments={"game": {**ADDRESS, "max_image_bytes": 5000}}
    )
    text = settings(tmp_path, {"kind": "environment"}, **model, environments={"game": ADDRESS})
    assert image_processor_of(shown, seeing) == read_processor_digest(seeing) != ""
    assert image_processor_of(text, seeing) == ""


def test_messages_that_show_no_images_begin_no_segment_for_them(tmp_path: Path) -> None:
    """The template joins what tools say as text, and shows the images of users alone."""
    seeing = write_seeing(tmp_path / "model")
    joined = "{% if message.role == 'tool' %}{{ 'it says: ' + message.content }}{% elif message.content is string %}"
    write_tokenizer(seeing, VISION_TEMPLATE.replace("{% if message.content is string %}", joined), VISION_TOKENS)
    shown = {"environments": {"game": {**ADDRESS, "max_image_bytes": 5000}}, "model": {"path": str(seeing)}}
    run, tokenizer = settings(tmp_path, {"kind": "environment"}, **shown), ChatTokenizer(seeing)
    stable, images = list(explain_environments(run, tokenizer))[2:]
    assert stable == "  the chat template is prefix-stable for messages of user and tool"
    assert "in messages of user; " in images
    spec = environment_pb2.DescribeEnvironmentResponse(roles=["user", "tool"])
    continuation = Continuation(tokenizer, visual_tokens=PromptEncoder.of(run, tokenizer).visual_tokens)
    assert run_problem(run, "game", spec, continuation) is None


def test_an_agent_s_environment_may_show_images_and_says_no_bound_of_rows(tmp_path: Path) -> None:
    """What its agent asks begins segments whatever the template does, up to max_row_tokens."""
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    data = {**smallest_tree(tmp_path)["data"], "images_field": "images"}
    shown = {"environments": {"game": {**ADDRESS, "max_image_bytes": 5000}}}
    run = settings(tmp_path, {"kind": "environment"}, **shown, data=data)
    continuation = Continuation(ChatTokenizer(tmp_path))
    assert (
        run_problem(run, "game", environment_pb2.DescribeEnvironmentResponse(runs_episodes=True), continuation) is None
    )
    stepped = run_problem(run, "game", environment_pb2.DescribeEnvironmentResponse(), continuation) or ""
    assert stepped.startswith("environments.game.max_row_tokens is not set")


def test_check_says_which_text_a_template_changes_and_what_that_costs(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    run = settings(tmp_path, {"kind": "environment"}, environments={"game": ADDRESS})
    user, tool, cost = list(explain_environments(run, ChatTokenizer(tmp_path)))[2:]
    assert "shows an earlier turn otherwise once a message of the role 'user' follows: " in user
    assert user.endswith("where that happens, a message of 'user' begins a segment")
    assert "once a message of the role 'tool' follows: " in tool, "it shows that there was no thinking, at first"
    assert "in 16 turns to the 2048 tokens of one conversation has 25088 in its row, 12.2 times as many" in cost
    assert "none more than 32768" in cost


def test_a_run_whose_template_forks_must_say_for_what_a_row_has_room(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    forking = Continuation(ChatTokenizer(tmp_path))
    write_tokenizer(tmp_path)
    stable = Continuation(ChatTokenizer(tmp_path))
    stepped, agents = (environment_pb2.DescribeEnvironmentResponse(runs_episodes=runs) for runs in (False, True))

    def problem(continuation: Continuation, spec: Any, **section: Any) -> str | None:
        run = settings(tmp_path, {"kind": "environment"}, environments={"game": {**ADDRESS, **section}})
        return run_problem(run, "game", spec, continuation)

    found = problem(forking, stepped)
    assert found is not None
    assert found.startswith(
        "environments.game.max_row_tokens is not set: the chat template shows an earlier turn otherwise once a message "
        "of the role 'user' follows: "
    )
    assert "an episode of 16 turns (max_turns) may take 25088 tokens" in found
    assert "Set it to 25088, and what is beyond is masked and counted; or to 2048, " in found
    assert problem(forking, stepped, max_row_tokens=2048) is None
    assert problem(forking, stepped, max_turns=1) is None, "nothing follows a turn"
    assert problem(forking, agents) is None
    assert problem(stable, stepped) is None


def test_check_refuses_a_template_in_which_nobody_may_answer_the_policy(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, MUTE)
    run = settings(tmp_path, {"kind": "environment"}, environments={"game": ADDRESS})
    with pytest.raises(ConfigError, match=r"cannot be used with messages of the role 'user': .*one question alone"):
        list(explain_environments(run, ChatTokenizer(tmp_path)))


def test_check_names_the_parser_of_calls_and_refuses_one_that_vllm_does_not_have(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    run = settings(tmp_path, {"kind": "environment"}, environments={"game": {**ADDRESS, "tool_parser": "hermes"}})
    lines = list(explain_environments(run, ChatTokenizer(tmp_path)))
    assert lines[2:] == [
        "  the chat template is prefix-stable for messages of user and tool, with tools in the prompt, too",
        "  calls of tools are read by vLLM's parser hermes",
    ]
    run = settings(tmp_path, {"kind": "environment"}, environments={"game": {**ADDRESS, "tool_parser": "herms"}})
    with pytest.raises(ConfigError, match=r"no parser 'herms' \(did you mean 'hermes'\?\)"):
        list(explain_environments(run, ChatTokenizer(tmp_path)))


def test_what_the_template_is_given_is_rendered_everywhere_and_is_part_of_the_digest(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{% if quiet %}hush {% endif %}{{ messages[0].content }}")
    run = settings(
        tmp_path,
        {"kind": "environment"},
        environments={"game": ADDRESS},
        model={"path": str(tmp_path), "chat_template_kwargs": {"quiet": True}},
    )
    quiet = ChatTokenizer(tmp_path, run.model.chat_template_kwargs)
    asked = [{"role": "user", "content": "a"}]
    assert (quiet.render(asked), ChatTokenizer(tmp_path).render(asked)) == ("hush a", "a")
    assert quiet.digest != ChatTokenizer(tmp_path).digest == ChatTokenizer(tmp_path, {}).digest
    with pytest.raises(ValidationError, match="tools is decided by the run"):
        settings(tmp_path, {"kind": "environment"}, model={"chat_template_kwargs": {"tools": []}})


def test_a_template_of_the_run_s_own_goes_before_all_of_the_tokenizer_s_and_is_part_of_the_digest(
    tmp_path: Path,
) -> None:
    template = "{% if tools %}with tools: {% endif %}{{ messages[0].content }}"
    fast = write_tokenizer(tmp_path)
    fast.chat_template = {"default": template, "tool_use": "another {{ messages[0].content }}"}
    fast.save_pretrained(tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text(f"{'{# mine #}'}{template}")
    run = settings(
        tmp_path,
        {"kind": "environment"},
        environments={"game": ADDRESS},
        model={"path": str(tmp_path), "chat_template": str(own)},
    )
    mine, theirs = ChatTokenizer.of(run.model), ChatTokenizer(tmp_path)
    asked, tools = [{"role": "user", "content": "a"}], [{"type": "function"}]
    assert (mine.render(asked, tools=tools), theirs.render(asked, tools=tools)) == ("with tools: a", "another a")
    assert mine.digest != theirs.digest
    own.write_text(template)
    assert ChatTokenizer.of(run.model).digest not in (mine.digest, theirs.digest)
