"""Liars whose description, messages, rewards or grades break a rule of `proto/rolecall/v1/environment.proto`, or of an
episode's reward in `trajectory.proto`: each one of them, and keeps all others.
"""

import math
from typing import Any

from rolecall.errors import RateLimitedError, RoleCallError
from rolecall.v1 import reward_pb2
from rolecall.v1.environment_pb2 import Task
from tests.contract.environment_honest import (
    Answer,
    Closed,
    Honest,
    Kept,
    ListCall,
    Listed,
    Opening,
    ResetCall,
    Spec,
    State,
    message,
)
from tests.contract.liars import Liars
from tests.pictures import picture

LIARS = Liars(Honest)


def goes_on(answer: Answer) -> bool:
    """Whether the episode does."""
    return answer.state == State.EPISODE_STATE_CONTINUES


@LIARS.describing
def it_has_no_name(spec: Spec) -> None:
    spec.name = ""


@LIARS.describing
def it_has_no_lease(spec: Spec) -> None:
    spec.lease_s = 0


@LIARS.describing
def its_components_share_a_name(spec: Spec) -> None:
    spec.components.append(reward_pb2.ComponentSpec(name="style"))


@LIARS.describing
def its_deadline_is_negative(spec: Spec) -> None:
    spec.step_timeout_s = -1


@LIARS.describing
def its_splits_share_a_name(spec: Spec) -> None:
    spec.splits.append("train")


@LIARS.being("tasks.pages")
class Overfull(Honest):
    """More tasks a page than were asked for."""

    def page(self, start: int, end: int) -> list[Task]:
        return self.tasks[start : end + 1]


@LIARS.being("tasks.rows")
class Twins(Honest):
    """Two tasks of one name."""

    def page(self, start: int, end: int) -> list[Task]:
        return [Task(uid=str(int(task.uid) // 2), messages=task.messages) for task in super().page(start, end)]


@LIARS.being("tasks.rows")
class Speechless(Honest):
    """Tasks that say nothing."""

    def page(self, start: int, end: int) -> list[Task]:
        return [Task(uid=task.uid) for task in super().page(start, end)]


@LIARS.being("tasks.stable")
class Shuffling(Honest):
    """Another order each time that somebody begins."""

    def page(self, start: int, end: int) -> list[Task]:
        if start == 0:
            self.tasks = [*self.tasks[1:], self.tasks[0]]
        return super().page(start, end)


@LIARS.being("tasks.split")
class Accommodating(Honest):
    """Whatever split is asked for is there."""

    async def ListTasks(self, request: ListCall, context: Any) -> Listed:
        return Listed() if request.split not in self.spec.splits else await super().ListTasks(request, context)


@LIARS.being("tasks.begun")
class Advertising(Honest):
    """It lists what it cannot begin."""

    def page(self, start: int, end: int) -> list[Task]:
        return [Task(uid=task.uid, messages=task.messages, ground_truth="never") for task in super().page(start, end)]


@LIARS.being("describe.stable")
class Renamed(Honest):
    """Another version each time."""

    async def Describe(self, request: Any, context: Any) -> Spec:
        self.spec.version += "+"
        return self.spec


@LIARS.being("describe.sessions")
class Crowded(Honest):
    """One place fewer than it says."""

    def check_places(self) -> None:
        if len(self.open) >= self.spec.max_sessions - 1:
            raise RateLimitedError("no place is free")


@LIARS.being("describe.sessions")
class Shut(Honest):
    """It says that it has no limit, and has no place."""

    def __init__(self) -> None:
        super().__init__()
        self.spec.max_sessions = 0

    def check_places(self) -> None:
        raise RateLimitedError("no place is free")


@LIARS.being("close.place")
class Leaking(Honest):
    """Closed sessions keep their places."""

    def check_places(self) -> None:
        if len(self.open) + len(self.closed) >= self.spec.max_sessions:
            raise RateLimitedError("no place is free")


@LIARS.being("reset.full")
class Endless(Honest):
    """It opens more sessions than it says it has places."""

    def check_places(self) -> None:
        pass


@LIARS.being("describe.deterministic")
class Moody(Honest):
    """It takes a seed and discards it."""

    number = 0

    async def boot(self, request: ResetCall) -> Opening:
        opening = await super().boot(request)
        self.number += 1
        opening.messages.append(message("user", f"Today is day {self.number}."))
        return opening


@LIARS.being("describe.deterministic")
class Flickering(Honest):
    """It says the same in each episode, and shows something else."""

    number = 0

    async def boot(self, request: ResetCall) -> Opening:
        opening = await super().boot(request)
        self.number += 1
        opening.messages[0].parts.add().image.data = picture(8, 8, self.number)
        return opening


@LIARS.changing("message.roles", "change_answer")
def a_role_was_not_declared(answer: Answer) -> None:
    answer.messages[0].role = "system"


@LIARS.changing("message.roles", "change_opening")
def the_first_role_was_not_declared(opening: Opening) -> None:
    opening.messages[0].role = "assistant"


@LIARS.changing("message.parts", "change_answer")
def a_message_is_empty(answer: Answer) -> None:
    del answer.messages[0].parts[:]


@LIARS.changing("message.parts", "change_opening")
def a_part_says_and_shows_nothing(opening: Opening) -> None:
    opening.messages[0].parts.add()


@LIARS.changing("message.images", "change_opening")
def the_first_message_has_an_image_of_nothing(opening: Opening) -> None:
    opening.messages[0].parts.add().image.media_type = "image/png"


@LIARS.changing("message.images", "change_answer")
def an_image_is_cut_short(answer: Answer) -> None:
    image = answer.messages[0].parts[1].image
    image.data = image.data[:50]


@LIARS.changing("tool.name", "change_opening")
def two_tools_share_a_name(opening: Opening) -> None:
    opening.tools.add(name="look", input_schema="{}")


@LIARS.changing("tool.schema", "change_opening")
def a_schema_is_no_object(opening: Opening) -> None:
    opening.tools[0].input_schema = "[]"


@LIARS.changing("step.state", "change_answer")
def the_state_is_left_out(answer: Answer) -> None:
    if goes_on(answer):
        answer.state = State.EPISODE_STATE_UNSPECIFIED


@LIARS.changing("step.messages", "change_answer")
def it_goes_on_without_a_message(answer: Answer) -> None:
    if goes_on(answer):
        del answer.messages[:]


@LIARS.being("reward.turns")
class Paying(Honest):
    """It rewards turns, and does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.spec.turn_rewards = False


@LIARS.changing("reward.turns", "change_answer")
def a_turn_s_reward_has_components(answer: Answer) -> None:
    if goes_on(answer):
        answer.reward.components["style"] = 0.0


@LIARS.changing("reward.turns", "change_answer")
def a_turn_s_reward_is_nan(answer: Answer) -> None:
    if goes_on(answer):
        answer.reward.value = math.nan


@LIARS.changing("reward.turns", "change_answer")
def a_turn_s_reward_is_no_float32(answer: Answer) -> None:
    if goes_on(answer):
        answer.reward.value = 1e39


@LIARS.changing("reward.end", "change_answer")
def the_end_has_no_reward(answer: Answer) -> None:
    if not goes_on(answer):
        answer.ClearField("reward")


@LIARS.being("reward.end")
class Generous(Honest):
    """It rewards episodes, and declares no reward."""

    def __init__(self) -> None:
        super().__init__()
        self.spec.ClearField("reward")
        self.spec.turn_rewards = False
        del self.spec.components[:]

    def answer(self, kept: Kept) -> Answer:
        answer = super().answer(kept)
        if goes_on(answer):
            answer.ClearField("reward")
        return answer

    def grade(self, kept: Kept, closed: Closed) -> None:
        if kept.failed:
            raise RoleCallError("the episode has failed")


@LIARS.changing("close.grade", "change_grade")
def a_grade_is_left_out(closed: Closed) -> None:
    closed.ClearField("reward")


@LIARS.being("close.grade")
class Harsh(Honest):
    """An episode that is not over cannot be graded."""

    def grade(self, kept: Kept, closed: Closed) -> None:
        raise RoleCallError("there is no reward yet")


@LIARS.changing("reward.value", "change_answer")
def a_reward_is_nan(answer: Answer) -> None:
    if not goes_on(answer):
        answer.reward.value = math.nan


@LIARS.changing("reward.value", "change_grade")
def a_grade_is_out_of_range(closed: Closed) -> None:
    closed.reward.value = 1.5


@LIARS.changing("reward.components", "change_answer")
def a_component_is_missing(answer: Answer) -> None:
    if not goes_on(answer):
        answer.reward.components.clear()
