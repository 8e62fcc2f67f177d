"""The messages of an environment's contract: plain answers into them, and the checks that make them believable, used by
whoever answers and, again, by whoever is answered.

Pure functions. What is wrong with a reward, rolecall/scoring/description.py says, for scorers and environments alike.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import SupportsFloat

from rolecall.data.json_text import parse_json
from rolecall.environment.env import (
    Action,
    Answer,
    Image,
    ImageMessage,
    Messages,
    Opening,
    Task,
    Tool,
    ToolCall,
)
from rolecall.errors import EpisodeLostError, InvalidInputError
from rolecall.scoring.description import components_problem, value_problem
from rolecall.scoring.description import spec_problem as scorer_problem
from rolecall.scoring.scores import Message, Score
from rolecall.v1 import environment_pb2, reward_pb2, trajectory_pb2
from rolecall.wire import decode_fields

ROLES = ("user",)
"""The roles of an environment that names none."""
CONTINUES = environment_pb2.EPISODE_STATE_CONTINUES


def roles_of(spec: environment_pb2.DescribeEnvironmentResponse) -> tuple[str, ...]:
    """The roles of its messages."""
    return tuple(spec.roles) or ROLES


def spec_problem(spec: environment_pb2.DescribeEnvironmentResponse) -> str | None:
    """Returns what makes an environment's own description unusable, as the end of a sentence; None: nothing does."""
    if not spec.name:
        return "has no name"
    if not spec.lease_s > 0:
        return f"declares the lease {spec.lease_s:g} s; it must be above 0"
    if spec.max_sessions < 0:
        return f"declares max_sessions {spec.max_sessions}; it must not be negative"
    if min(spec.reset_timeout_s, spec.step_timeout_s, spec.close_timeout_s) < 0:
        return "declares negative deadlines"
    if not spec.HasField("reward") and (spec.components or spec.turn_rewards):
        return "declares components or turn_rewards and no reward; give the reward's range"
    if len(set(spec.splits)) != len(spec.splits) or "" in spec.splits:
        return f"declares the splits {list(spec.splits)}; names must be unique and not empty"
    if spec.runs_episodes and spec.turn_rewards:
        return "declares turn_rewards and runs_episodes; an episode that its agent runs has no turns to reward"
    return scorer_problem(scored_by(spec))


def scored_by(spec: environment_pb2.DescribeEnvironmentResponse) -> reward_pb2.DescribeResponse:
    """Returns what it says of its rewards, as a scorer says it."""
    return reward_pb2.DescribeResponse(name=spec.name, reward=spec.reward, components=spec.components)


def opening_of(
    opened: Messages | Opening, spec: environment_pb2.DescribeEnvironmentResponse
) -> environment_pb2.ResetResponse:
    """The answer to Reset that `opened` stands for."""
    opening = opened if isinstance(opened, Opening) else Opening(opened)
    response = environment_pb2.ResetResponse(
        messages=_observations(opening.messages, roles_of(spec)), tools=[_tool(tool) for tool in opening.tools]
    )
    believe_opening(response, spec)
    return response


def answer_of(
    answered: str | Answer, spec: environment_pb2.DescribeEnvironmentResponse
) -> environment_pb2.StepResponse:
    """The answer to Step that `answered` stands for. EpisodeLostError when nobody would believe it."""
    answer = answered if isinstance(answered, Answer) else Answer(answered)
    if answer.is_truncated:
        state = environment_pb2.EPISODE_STATE_TRUNCATED
    else:
        state = environment_pb2.EPISODE_STATE_TERMINATED if answer.is_over else CONTINUES
    response = environment_pb2.StepResponse(
        messages=_observations(answer.messages, roles_of(spec)), state=state, reward=reward_of(answer.reward)
    )
    believe_answer(response, spec)
    return response


def ending_of(
    ran: float | Score | Answer | None, spec: environment_pb2.DescribeEnvironmentResponse
) -> environment_pb2.StepResponse:
    """The end of an episode that an agent ran and returned `ran` of. EpisodeLostError when nobody would believe it."""
    answer = ran if isinstance(ran, Answer) else Answer(reward=ran)
    return answer_of(replace(answer, is_over=True), spec)


def reward_of(given: float | Score | None) -> trajectory_pb2.EpisodeReward | None:
    """The message of a reward; None where none was given. EpisodeLostError when it is no number."""
    if given is None:
        return None
    score = given if isinstance(given, Score) else Score(given)
    components = {name: _number(part) for name, part in score.components.items()}
    return trajectory_pb2.EpisodeReward(value=_number(score.value), components=components, answer=score.answer)


def believe_opening(response: environment_pb2.ResetResponse, spec: environment_pb2.DescribeEnvironmentResponse) -> None:
    """EpisodeLostError when the answer to a Reset cannot be believed."""
    problem = _messages_problem(response.messages, roles_of(spec))
    names = [tool.name for tool in response.tools]
    if problem is None and (len(set(names)) != len(names) or "" in names):
        problem = f"answered the tools {names}; names must be unique and not empty"
    if problem is None:
        problem = next(filter(None, map(schema_problem, response.tools)), None)
    if problem:
        raise EpisodeLostError(f"environment {spec.name!r} {problem}")


def believe_answer(response: environment_pb2.StepResponse, spec: environment_pb2.DescribeEnvironmentResponse) -> None:
    """EpisodeLostError when the answer to a Step cannot be believed."""
    problem = _messages_problem(response.messages, roles_of(spec))
    if problem is None and response.state not in environment_pb2.EpisodeState.values()[1:]:
        problem = f"answered the state {response.state}; an episode goes on, is terminated or truncated"
    if problem is None and response.state == CONTINUES and not response.messages:
        problem = "says that the episode goes on, and answered no message that the policy could read"
    if problem is None and response.state == CONTINUES:
        problem = turn_reward_problem(response, spec)
    elif problem is None:
        problem = reward_problem(response, spec)
    if problem:
        raise EpisodeLostError(f"environment {spec.name!r} {problem}")


def believe_run(
    response: environment_pb2.RunEpisodeResponse, spec: environment_pb2.DescribeEnvironmentResponse
) -> None:
    """EpisodeLostError when the answer to a RunEpisode cannot be believed."""
    problem = reward_problem(response, spec)
    if response.state not in (environment_pb2.EPISODE_STATE_TERMINATED, environment_pb2.EPISODE_STATE_TRUNCATED):
        problem = f"answered the state {response.state}; an episode that was run is terminated or truncated"
    if problem:
        raise EpisodeLostError(f"environment {spec.name!r} {problem}")


def reward_problem(
    response: environment_pb2.StepResponse | environment_pb2.CloseResponse | environment_pb2.RunEpisodeResponse,
    spec: environment_pb2.DescribeEnvironmentResponse,
) -> str | None:
    """Returns what is wrong with an episode's reward, as the end of a sentence; None when nothing is."""
    if not spec.HasField("reward"):
        return "declares no reward and gave one" if response.HasField("reward") else None
    if not response.HasField("reward"):
        return "declares a reward and gave none at the end of an episode; give one, or implement grade"
    given = reward_pb2.Reward(value=response.reward.value, components=response.reward.components)
    described = scored_by(spec)
    return value_problem(given, described) or components_problem(given, described)


def turn_reward_problem(
    response: environment_pb2.StepResponse, spec: environment_pb2.DescribeEnvironmentResponse
) -> str | None:
    """Returns what is wrong with the reward of a turn after which the episode goes on, as the end of a sentence; None
    when nothing is.
    """
    if not response.HasField("reward"):
        return None
    if not spec.turn_rewards:
        return "rewarded a turn of an episode that goes on, and declares no turn_rewards"
    if response.reward.components or response.reward.HasField("answer"):
        return "gave components or an answer with a turn's reward; they belong to the episode's"
    unbounded = reward_pb2.DescribeResponse(name=spec.name)
    return value_problem(reward_pb2.Reward(value=response.reward.value), unbounded)


def _messages_problem(messages: Sequence[environment_pb2.Observation], roles: Sequence[str]) -> str | None:
    for message in messages:
        if message.role not in roles:
            return f"answered a message of the role {message.role!r}; it declares {sorted(roles)}"
        problem = parts_problem(message)
        if problem:
            return problem
    return None


def parts_problem(message: environment_pb2.Observation) -> str | None:
    """Returns what is wrong with the parts of a message, as the end of a sentence; None when each says or shows
    something.
    """
    kinds = {part.WhichOneof("part") for part in message.parts}
    return None if kinds and kinds <= {"text", "image"} else "answered a message without text and image"


def schema_problem(tool: environment_pb2.Tool) -> str | None:
    """Returns what is wrong with a tool's schema, as the end of a sentence; None when it is an object."""
    try:
        if isinstance(parse_json(tool.input_schema), dict):
            return None
    except ValueError:
        pass
    return f"answered the tool {tool.name!r}, whose input_schema is no JSON object"


def task_of(task: environment_pb2.Task) -> Task:
    """The plain form of a task."""
    return Task(
        uid=task.uid,
        messages=tuple(Message(message.role, message.content) for message in task.messages),
        ground_truth=task.ground_truth,
        other_ground_truths=tuple(task.other_ground_truths),
        metadata=decode_fields(task.metadata) if task.HasField("metadata") else {},
        images=tuple(Image(image.data, image.media_type) for image in task.images),
    )


def message_of(task: Task) -> environment_pb2.Task:
    """The message of a task."""
    message = environment_pb2.Task(
        uid=task.uid,
        messages=[trajectory_pb2.Message(role=said.role, content=said.content) for said in task.messages],
        ground_truth=task.ground_truth,
        other_ground_truths=task.other_ground_truths,
    )
    message.metadata.update(task.metadata)
    return message


def action_of(action: environment_pb2.Action) -> Action:
    """The plain form of an action. InvalidInputError when a call's arguments are no object."""
    return Action(action.text, action.is_cut, tuple(_call(call) for call in action.tool_calls))


def _call(call: environment_pb2.ToolCall) -> ToolCall:
    try:
        arguments = parse_json(call.arguments)
    except ValueError as error:
        raise InvalidInputError(f"the arguments of a call of {call.name!r} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise InvalidInputError(f"the arguments of a call of {call.name!r} are no object")
    return ToolCall(call.name, arguments)


def _observations(messages: Messages, roles: Sequence[str]) -> list[environment_pb2.Observation]:
    if isinstance(messages, str):
        messages = Message(roles[0], messages)
    if isinstance(messages, Message | ImageMessage) or not isinstance(messages, Iterable):
        return [_observation(messages, type(messages).__name__)]
    return [_observation(message, f"{type(messages).__name__} of {type(message).__name__}") for message in messages]


def _observation(message: object, kind: str) -> environment_pb2.Observation:
    if not isinstance(message, Message | ImageMessage):
        raise EpisodeLostError(
            f"the environment answered a {kind} in place of a message; give text, a Message or a list of Messages, or "
            "these in an Opening (reset) or an Answer (step)"
        )
    return environment_pb2.Observation(role=message.role, parts=map(_part, _parts(message)))


def _parts(message: Message | ImageMessage) -> Sequence[str | Image]:
    return [message.content] if isinstance(message, Message) else message.parts


def _part(part: object) -> environment_pb2.Part:
    if isinstance(part, str):
        return environment_pb2.Part(text=part)
    if not isinstance(part, Image):
        raise EpisodeLostError(
            f"the environment answered a message that says a {type(part).__name__}; write it as text"
        )
    return environment_pb2.Part(image=environment_pb2.ImagePart(media_type=part.media_type, data=part.data))


def _tool(tool: object) -> environment_pb2.Tool:
    if not isinstance(tool, Tool):
        raise EpisodeLostError(
            f"the environment answered a {type(tool).__name__} in place of a tool; give a "
            "rolecall.environment.Tool(name, description, input_schema)"
        )
    return environment_pb2.Tool(
        name=tool.name, description=tool.description, input_schema=json.dumps(tool.input_schema)
    )


def _number(value: object) -> float:
    if not isinstance(value, SupportsFloat):  # arrays and tensors of one number, too, and no text
        raise EpisodeLostError(
            f"the environment gave a {type(value).__name__} as a reward; give a number, or a Score of numbers"
        )
    return float(value)
