"""The checks of `rolecall check` for a run whose policy acts in an environment: of its chat template, and of the
environment itself, which is asked.
"""

from collections.abc import Awaitable, Callable, Iterator

import grpc

from rolecall.data.continuation import Continuation
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.data.vllm_files import check_tool_parser
from rolecall.environment.answers import roles_of, spec_problem
from rolecall.errors import ConfigError
from rolecall.rpc.presence import LOOK_S
from rolecall.settings import FunctionScorer, RunSettings
from rolecall.v1 import environment_pb2, environment_pb2_grpc

ROLES = ("user", "tool")
"""Roles that environments usually speak in."""


def explain_environment(settings: RunSettings, tokenizer: ChatTokenizer) -> Iterator[str]:
    """The lines on episodes. ConfigError when the chat template lets no environment speak after a turn."""
    section = settings.environment
    if section is None:
        return
    budget_s = section.budget_share * settings.rollout.generation_timeout_s
    yield (
        f"environment: {section.address}; an episode ends when the environment says so, after {section.max_turns} "
        f"turns, "
        f"{settings.sampling.max_tokens} tokens beyond its first prompt (sampling.max_tokens; its answers count) or "
        f"{budget_s:g} s ({section.budget_share:g} of rollout.generation_timeout_s)"
    )
    yield (
        f"  the branches of an agent's calls are trained up to {settings.max_row_tokens} tokens an episode "
        "(environment.max_row_tokens)"
    )
    continuation = Continuation(tokenizer)
    with_tools = section.tool_parser is not None
    problems = {role: continuation.problem(role, with_tools=with_tools) for role in ROLES}
    stable = [role for role, problem in problems.items() if problem is None]
    for role, problem in problems.items():
        if problem is not None and stable:
            yield f"  the chat template {problem}; an environment may not speak as {role!r}"
    if not stable:
        raise ConfigError(
            f"environment: the chat template {problems[ROLES[0]]}; and it {problems[ROLES[1]]}. Use a template that "
            "leaves earlier turns as they are; conversations that are rendered anew cannot be trained on"
        )
    shown = ", with tools in the prompt, too" if with_tools else ""
    yield f"  the chat template is prefix-stable for messages of {' and '.join(stable)}{shown}"
    if section.tool_parser is not None:
        check_tool_parser(section.tool_parser)
        yield f"  calls of tools are read by vLLM's parser {section.tool_parser}"


def environment_fits(settings: RunSettings) -> Callable[[grpc.aio.Channel], Awaitable[None]]:
    """The question to the run's environment before it starts: ConfigError when it cannot be played in."""

    async def ask(channel: grpc.aio.Channel) -> None:
        spec = await environment_pb2_grpc.EnvironmentServiceStub(channel).Describe(
            environment_pb2.DescribeEnvironmentRequest(), timeout=LOOK_S
        )
        problem = spec_problem(spec)
        if problem:
            raise ConfigError(f"is environment {spec.name!r}, which {problem}")
        if 0 < spec.max_sessions < settings.responses_per_group:
            raise ConfigError(
                f"is environment {spec.name!r} with max_sessions {spec.max_sessions}, and a group needs "
                f"{settings.responses_per_group} at a time; raise it, or lower sampling.num_responses"
            )
        _check_reward(settings, spec)
        continuation = Continuation(ChatTokenizer(settings.model.path, settings.model.chat_template_kwargs))
        with_tools = settings.environment is not None and settings.environment.tool_parser is not None
        for role in roles_of(spec):
            if (unfit := continuation.problem(role, with_tools=with_tools)) is not None:
                raise ConfigError(f"is environment {spec.name!r}, which speaks as {role!r}: the chat template {unfit}")

    return ask


def _check_reward(settings: RunSettings, spec: environment_pb2.DescribeEnvironmentResponse) -> None:
    for name, component in settings.reward.components.items():
        scorer = component.scorer
        if not isinstance(scorer, FunctionScorer) or scorer.kind != "environment":
            continue
        given = sorted(part.name for part in spec.components)
        if not spec.HasField("reward"):
            raise ConfigError(
                f"is environment {spec.name!r}, which gives no reward; reward.components.{name} needs one"
            )
        if sorted(scorer.components) != given or scorer.token_rewards != spec.turn_rewards:
            raise ConfigError(
                f"is environment {spec.name!r}: set reward.components.{name}.scorer.components to {given} and "
                f"token_rewards to {str(spec.turn_rewards).lower()}, as it says of itself"
            )
