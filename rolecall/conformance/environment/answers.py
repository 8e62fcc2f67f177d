"""Rules of an answer by itself: messages that can be read, a state, and rewards where they belong."""

import asyncio
from collections.abc import Callable, Sequence

from rolecall.conformance.check import Verdict, failed, passed, skipped
from rolecall.conformance.environment.contract import CONTRACT, REWARDS, TURNS
from rolecall.conformance.environment.session import OVER, EnvironmentSession
from rolecall.data.images.files import open_image
from rolecall.environment.answers import (
    CONTINUES,
    parts_problem,
    roles_of,
    schema_problem,
    scored_by,
    turn_reward_problem,
)
from rolecall.errors import InvalidInputError
from rolecall.scoring.description import components_problem, value_problem
from rolecall.v1 import environment_pb2, reward_pb2, trajectory_pb2

_STATES = (CONTINUES, *OVER)


async def _messages(session: EnvironmentSession) -> list[tuple[str, Sequence[environment_pb2.Observation]]]:
    """The messages of every answer, with where they stand."""
    found: list[tuple[str, Sequence[environment_pb2.Observation]]] = []
    for play in await session.plays():
        found.append((f"{play.row.name}, Reset", play.opening.messages))
        found += [(f"{play.row.name}, turn {i}", answer.messages) for i, answer in enumerate(play.turns, 1)]
    return found


async def _turns(session: EnvironmentSession) -> list[tuple[str, environment_pb2.StepResponse]]:
    """Every answer to a turn, with where it stands."""
    return [
        (f"{play.row.name}, turn {i}", answer)
        for play in await session.plays()
        for i, answer in enumerate(play.turns, 1)
    ]


async def _rewards(session: EnvironmentSession) -> list[tuple[str, trajectory_pb2.EpisodeReward]]:
    """Every reward of an episode, with where it stands."""
    if session.spec.runs_episodes:
        runs = await session.runs()
        return [(f"{run.row.name}, its run", run.answer.reward) for run in runs if run.answer.HasField("reward")]
    ends = [(where, answer) for where, answer in await _turns(session) if answer.state in OVER]
    found = [(where, answer.reward) for where, answer in ends if answer.HasField("reward")]
    for response in await session.graded():
        if isinstance(response, environment_pb2.CloseResponse) and response.HasField("reward"):
            found.append(("a grade", response.reward))
    return found


@CONTRACT.rule(
    "message.roles",
    "DescribeEnvironmentResponse.roles",
    'Roles of the messages that Reset and Step answer with; none stands for "user" alone.',
    TURNS,
)
async def roles(session: EnvironmentSession) -> Verdict:
    """Looks for messages of roles that were not declared."""
    declared = roles_of(session.spec)
    for where, messages in await _messages(session):
        for message in messages:
            if message.role not in declared:
                return failed(f"{where}: a message of the role {message.role!r}; it declares {', '.join(declared)}")
    return passed(", ".join(declared))


@CONTRACT.rule("message.parts", "Part.part", "Exactly one.", TURNS)
async def parts(session: EnvironmentSession) -> Verdict:
    """Looks for messages without parts, and for parts that are neither text nor image."""
    for where, messages in await _messages(session):
        for message in messages:
            problem = parts_problem(message)
            if problem:
                return failed(f"{where}: it {problem}")
    return passed()


@CONTRACT.rule(
    "message.images",
    "ImagePart.data",
    "The encoded image: PNG, JPEG, WebP, GIF, BMP, TIFF, JPEG 2000, AVIF or PPM, of 8 bits a channel and at most 2^26 "
    "pixels.",
    TURNS,
)
async def images(session: EnvironmentSession) -> Verdict:
    """Opens the images."""
    num = 0
    for where, messages in await _messages(session):
        for part in (part for message in messages for part in message.parts if part.HasField("image")):
            try:
                await asyncio.to_thread(open_image, part.image.data)
            except InvalidInputError as error:
                return failed(f"{where}: {error.message}")
            num += 1
    return passed(f"{num} images" if num else "none")


@CONTRACT.rule("tool.name", "Tool.name", "Name, unique within the session.", TURNS)
async def tool_names(session: EnvironmentSession) -> Verdict:
    """Looks for tools without a name, or of the same one."""
    num = 0
    for play in await session.plays():
        names = [tool.name for tool in play.opening.tools]
        if len(set(names)) != len(names) or "" in names:
            return failed(f"{play.row.name}: the tools {names}")
        num = max(num, len(names))
    return passed(f"{num} tools")


@CONTRACT.rule(
    "tool.schema",
    "Tool.input_schema",
    "JSON Schema of its arguments, an object, as JSON text: the policy is shown its fields in their order.",
    TURNS,
)
async def tool_schemas(session: EnvironmentSession) -> Verdict:
    """Looks for tools whose schema is no object in JSON."""
    for play in await session.plays():
        for tool in play.opening.tools:
            if schema_problem(tool):
                return failed(f"{play.row.name}: the tool {tool.name!r} has the schema {tool.input_schema[:120]!r}")
    return passed()


@CONTRACT.rule("step.state", "EpisodeState.EPISODE_STATE_UNSPECIFIED", "Never sent: an answer always says it.", TURNS)
async def state(session: EnvironmentSession) -> Verdict:
    """Looks for answers that do not say whether the episode goes on."""
    turns = await _turns(session)
    for where, answer in turns:
        if answer.state not in _STATES:
            names = ", ".join(map(environment_pb2.EpisodeState.Name, _STATES))
            return failed(f"{where}: the state {answer.state}, none of {names}")
    return passed(f"{len(turns)} turns, {sum(answer.state in OVER for _, answer in turns)} of them the last")


@CONTRACT.rule("step.messages", "StepResponse.messages", "At least one where it goes on.", (*TURNS, "step.state"))
async def messages_read(session: EnvironmentSession) -> Verdict:
    """Looks for turns after which the policy has nothing new to read."""
    for where, answer in await _turns(session):
        if answer.state == CONTINUES and not answer.messages:
            return failed(f"{where}: the episode goes on, and nothing is there to read")
    return passed()


@CONTRACT.rule(
    "reward.turns",
    "StepResponse.reward",
    "Where the episode goes on: what this turn earned, a finite value alone, and only with "
    "DescribeEnvironmentResponse.turn_rewards.",
    (*TURNS, "step.state"),
)
async def turn_rewards(session: EnvironmentSession) -> Verdict:
    """Looks for rewards of turns that were not declared, or say more than a number."""
    num = 0
    for where, answer in await _turns(session):
        if answer.state != CONTINUES or not answer.HasField("reward"):
            continue
        problem = turn_reward_problem(answer, session.spec)
        if problem:
            return failed(f"{where}: it {problem}")
        num += 1
    return passed(f"{num} rewards" if session.spec.turn_rewards else "none, as declared")


@CONTRACT.rule(
    "reward.end",
    "StepResponse.reward",
    "Where it is over: the episode's reward, on top of what turns earned, there where Describe names a range and only "
    "there.",
    (*TURNS, "step.state"),
)
async def end(session: EnvironmentSession) -> Verdict:
    """Looks for last turns without the reward that was declared, or with one that was not."""
    ends = [(where, answer) for where, answer in await _turns(session) if answer.state in OVER]
    if not ends:
        return skipped("no episode came to its end; give --items with actions that end one")
    declares = session.spec.HasField("reward")
    for where, answer in ends:
        if answer.HasField("reward") != declares:
            return failed(f"{where}: {_declared(declares)}")
    return passed(f"{len(ends)} ends" if declares else f"none at {len(ends)} ends, as declared")


@CONTRACT.rule(
    "close.grade",
    "CloseResponse.reward",
    "The episode's reward, where a grade was asked for and Describe names a range.",
    TURNS,
)
async def grade(session: EnvironmentSession) -> Verdict:
    """Asks for the grade of an episode without a turn, and of one that goes on after its first; and closes one without
    asking.
    """
    declares, graded = session.spec.HasField("reward"), await session.graded()
    for response in graded:
        if isinstance(response, str):
            return failed(f"a Close that asked for a grade ended with {response}")
        if response.HasField("reward") != declares:
            return failed(f"a Close that asked for a grade: {_declared(declares)}")
    async with session.episode(session.rows.played[0]) as episode:
        await episode.reset()
        if (await episode.close()).HasField("reward"):
            return failed("a Close that asked for no grade gave a reward")
    return passed(f"{len(graded)} grades" if declares else "none, as declared")


@REWARDS.rule(
    "reward.value",
    "EpisodeReward.value",
    "The reward; finite as a float32, within the environment's range.",
    TURNS,
)
async def value(session: EnvironmentSession) -> Verdict:
    """Looks for rewards that are no numbers or out of range."""
    return await _kept(session, value_problem)


@REWARDS.rule(
    "reward.components",
    "EpisodeReward.components",
    "Named parts of it, finite, each within its range, without those that may be absent and do not apply.",
    TURNS,
)
async def components(session: EnvironmentSession) -> Verdict:
    """Looks for components that were not declared, are missing or out of range."""
    return await _kept(session, components_problem)


async def _kept(
    session: EnvironmentSession,
    problem_of: Callable[[reward_pb2.Reward, reward_pb2.DescribeResponse], str | None],
) -> Verdict:
    rewards = await _rewards(session)
    if not session.spec.HasField("reward") or not rewards:
        return skipped("it gave no reward")
    described = scored_by(session.spec)
    for where, given in rewards:
        problem = problem_of(reward_pb2.Reward(value=given.value, components=given.components), described)
        if problem:
            return failed(f"{where}: it {problem}")
    values = [given.value for _, given in rewards]
    return passed(f"{len(values)} rewards in [{min(values):g}, {max(values):g}]")


def _declared(declares: bool) -> str:
    return "no reward, and it declares one" if declares else "a reward, and it declares none"
