"""The checks of `rolecall check` for a run whose policy acts in environments: of its chat template, and of each
environment itself, which is asked.
"""

from collections.abc import Awaitable, Callable, Iterator

import grpc

from rolecall.data.continuation import Continuation
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.data.vllm_files import check_tool_parser
from rolecall.environment.answers import roles_of, spec_problem
from rolecall.errors import ConfigError
from rolecall.rpc.presence import LOOK_S
from rolecall.settings import EnvironmentSection, FunctionScorer, RunSettings, may_meet
from rolecall.v1 import environment_pb2, environment_pb2_grpc

ROLES = ("user", "tool")
"""Roles that environments usually speak in."""


def explain_environments(settings: RunSettings, tokenizer: ChatTokenizer) -> Iterator[str]:
    """The lines on episodes. ConfigError when the chat template lets no environment speak after a turn."""
    for name in settings.environments:
        yield from _explain(settings, name, tokenizer)


def _explain(settings: RunSettings, name: str, tokenizer: ChatTokenizer) -> Iterator[str]:
    section = settings.environments[name]
    budget_s = section.budget_share * settings.rollout.generation_timeout_s
    yield (
        f"environments.{name}: {section.address}; an episode ends when the environment says so, after "
        f"{section.max_turns} turns, "
        f"{settings.sampling.max_tokens} tokens beyond its first prompt (sampling.max_tokens; its answers count) or "
        f"{budget_s:g} s ({section.budget_share:g} of rollout.generation_timeout_s)"
    )
    yield (
        f"  the branches of its conversation are trained up to {settings.episode_tokens(section)} tokens an episode "
        "(max_row_tokens)"
    )
    continuation = _continuation(settings, tokenizer)
    yield from _explain_template(settings, name, continuation)
    if section.max_image_bytes:
        yield _explain_images(name, section.max_image_bytes, continuation)
    if section.tool_parser is not None:
        check_tool_parser(section.tool_parser)
        yield f"  calls of tools are read by vLLM's parser {section.tool_parser}"


def _continuation(settings: RunSettings, tokenizer: ChatTokenizer) -> Continuation:
    return Continuation(tokenizer, visual_tokens=PromptEncoder.of(settings, tokenizer).visual_tokens)


def _explain_images(name: str, max_image_bytes: int, continuation: Continuation) -> str:
    """The line on the images that environment `name` may show. ConfigError when the chat template shows none."""
    refusals = {role: continuation.image_refusal(role) for role in ROLES}
    shown = [role for role, refusal in refusals.items() if refusal is None]
    if not shown:
        raise ConfigError(
            f"environments.{name}.max_image_bytes: the chat template {refusals[ROLES[0]]}. Use a template that shows "
            "images there, or leave it out"
        )
    return (
        f"  it, or its agent, may show images of {max_image_bytes} bytes in an episode, in "
        f"messages of {' and '.join(shown)}; each takes as many tokens as one of a prompt"
    )


def _problem(section: EnvironmentSection, continuation: Continuation, role: str) -> str | None:
    """Returns why messages of `role` may begin segments, as the end of a sentence; None: they never do."""
    with_tools = section.tool_parser is not None
    shows_images = section.max_image_bytes and continuation.image_refusal(role) is None
    kinds = (False, True) if shows_images else (False,)
    problems = (continuation.problem(role, with_tools=with_tools, with_images=kind) for kind in kinds)
    return next((problem for problem in problems if problem is not None), None)


def _explain_template(settings: RunSettings, name: str, continuation: Continuation) -> Iterator[str]:
    """The lines on what the chat template makes of messages that follow a turn in environment `name`."""
    section = settings.environments[name]
    refusals = {role: continuation.refusal(role) for role in ROLES}
    if all(refusals.values()):
        raise ConfigError(
            f"environments.{name}: the chat template {refusals[ROLES[0]]}; and it {refusals[ROLES[1]]}. Use a template "
            "that lets somebody speak after the policy"
        )
    with_tools = section.tool_parser is not None
    stable, forks = list[str](), False
    for role, refusal in refusals.items():
        if refusal is not None:
            yield f"  the chat template {refusal}; an environment may not speak as {role!r}"
        elif (problem := _problem(section, continuation, role)) is None:
            stable.append(role)
        else:
            forks = True
            yield f"  the chat template {problem}; where that happens, a message of {role!r} begins a segment"
    if stable:
        shown = ", with tools in the prompt, too" if with_tools else ""
        yield f"  the chat template is prefix-stable for messages of {' and '.join(stable)}{shown}"
    if forks:
        longest, evenly = _tokens_of_forks(settings, section)
        yield (
            f"  each segment shows the conversation anew: where every turn begins one, an episode that grows evenly in "
            f"{section.max_turns} turns to the {longest} tokens of one conversation has {evenly} in its row, "
            f"{evenly / longest:.1f} times as many, and none more than {section.max_turns * longest}; what is "
            f"beyond max_row_tokens, which then must be set, is masked (episode/masked_row_full_tokens)"
        )


def _tokens_of_forks(settings: RunSettings, section: EnvironmentSection) -> tuple[int, int]:
    """Tokens of the longest conversation, and of the row of one that grows evenly to it, each turn a segment."""
    first, more, num_turns = settings.data.max_prompt_tokens, settings.sampling.max_tokens, section.max_turns
    return first + more, num_turns * first + more * (num_turns + 1) // 2


def run_problem(
    settings: RunSettings, name: str, spec: environment_pb2.DescribeEnvironmentResponse, continuation: Continuation
) -> str | None:
    """Returns what keeps the run from environment `name` that says this of itself, by the run's chat template; None:
    nothing does. The run must say how many tokens a row may have where the template begins segments for what an
    environment speaks as whose episodes the rollout steps.
    """
    section = settings.environments[name]
    if spec.runs_episodes or section.max_row_tokens is not None or section.max_turns == 1:
        return None
    problems = (_problem(section, continuation, role) for role in roles_of(spec))
    problem = next((found for found in problems if found is not None), None)
    if problem is None:
        return None
    longest, evenly = _tokens_of_forks(settings, section)
    return (
        f"environments.{name}.max_row_tokens is not set: the chat template {problem}, so that a turn may begin a "
        f"segment which shows the conversation anew, and an episode of {section.max_turns} turns (max_turns) may take "
        f"{evenly} tokens, if it grows evenly. Set it to {evenly}, and what is beyond is masked and counted; or to "
        f"{longest}, to train no more than the tokens of one conversation"
    )


def environment_fits(settings: RunSettings, name: str) -> Callable[[grpc.aio.Channel], Awaitable[None]]:
    """The question to environment `name` before the run starts: ConfigError when it cannot be played in."""
    section = settings.environments[name]

    async def ask(channel: grpc.aio.Channel) -> None:
        spec = await environment_pb2_grpc.EnvironmentServiceStub(channel).Describe(
            environment_pb2.DescribeEnvironmentRequest(), timeout=LOOK_S
        )
        problem = spec_problem(spec)
        if problem:
            raise ConfigError(f"is environment {spec.name!r}, which {problem}")
        for setting, needed in _places_needed(settings, section).items():
            if 0 < spec.max_sessions < needed:
                raise ConfigError(
                    f"is environment {spec.name!r} with max_sessions {spec.max_sessions}, and a prompt needs {needed} "
                    f"at a time; raise it, or lower {setting}"
                )
        _check_reward(settings, section, spec)
        continuation = _continuation(settings, ChatTokenizer.of(settings.model))
        for role in roles_of(spec):
            if (unfit := continuation.refusal(role)) is not None:
                raise ConfigError(f"is environment {spec.name!r}, which speaks as {role!r}: the chat template {unfit}")
        if section.max_image_bytes:
            unfits = [continuation.image_refusal(role) for role in roles_of(spec)]
            if all(unfits):
                raise ConfigError(f"is environment {spec.name!r}: with max_image_bytes, the chat template {unfits[0]}")
        if (problem := run_problem(settings, name, spec, continuation)) is not None:
            raise ConfigError(f"is environment {spec.name!r}; {problem}")

    return ask


def _places_needed(settings: RunSettings, section: EnvironmentSection) -> dict[str, int]:
    """Episodes of one prompt that begin together, by the setting that says how many. Of held-out sets where the
    environment plays every prompt; else those say it whose prompts it plays, when they are evaluated.
    """
    sets = settings.evaluation.sets.items() if not section.when else ()
    return {
        "sampling.num_responses": settings.responses_per_group,
        **{f"evaluation.sets.{name}.num_responses": held_out.num_responses for name, held_out in sets},
    }


def _check_reward(
    settings: RunSettings, section: EnvironmentSection, spec: environment_pb2.DescribeEnvironmentResponse
) -> None:
    for name, component in settings.reward.components.items():
        scorer = component.scorer
        if not isinstance(scorer, FunctionScorer) or scorer.kind != "environment":
            continue
        if not may_meet(component.when, section.when):
            continue
        given = sorted(part.name for part in spec.components)
        if not spec.HasField("reward"):
            raise ConfigError(
                f"is environment {spec.name!r}, which gives no reward; reward.components.{name} needs one"
            )
        if sorted(scorer.components) != given or scorer.token_rewards != spec.turn_rewards:
            raise ConfigError(
                f"is environment {spec.name!r}: set reward.components.{name}.scorer.components to {given} and "
                f"token_rewards to {str(spec.turn_rewards).lower()}, as it says of itself; or, where it is another "
                "environment's, have its when name a field of the environment's as well, with another value"
            )
