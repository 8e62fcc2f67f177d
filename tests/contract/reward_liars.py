"""An honest RewardService, and liars: each breaks one rule of `proto/rolecall/v1/reward.proto` and keeps all others."""

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import numpy as np

from rolecall.errors import InvalidInputError, RoleCallError
from rolecall.scoring.description import component_spec
from rolecall.v1 import reward_pb2, reward_pb2_grpc
from rolecall.wire import encode_tensor
from tests.contract.liars import Liars
from tests.contract.reward_peers import ALL_FIELDS

MAX_ITEMS = 32
Request: TypeAlias = reward_pb2.ScoreRequest
Response: TypeAlias = reward_pb2.ScoreResponse
Spec: TypeAlias = reward_pb2.DescribeResponse


class Honest(reward_pb2_grpc.RewardServiceServicer):
    """A service that keeps every rule: it uses all fields, declares all that can be declared and has a limit."""

    def __init__(self) -> None:
        self.spec = reward_pb2.DescribeResponse(
            name="honest",
            reads=ALL_FIELDS,
            reward=component_spec("", 0, 1),
            components=[component_spec("style", -1, 1), component_spec("length", None, None)],
            token_rewards=True,
            max_items=MAX_ITEMS,
        )
        self.lie: Callable[[Request, Response], None] = lambda request, response: None

    async def Describe(self, request: reward_pb2.DescribeRequest, context: Any) -> Spec:
        return self.spec

    async def Score(self, request: Request, context: Any) -> Response:
        if not request.items or len(request.items) > self.spec.max_items:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"send 1 to {self.spec.max_items} items")
        response = reward_pb2.ScoreResponse(results=[self.result(item) for item in request.items])
        self.lie(request, response)
        return response

    def result(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        """The score follows from everything that is known of the item, but for its id."""
        result = reward_pb2.ScoreResult(id=item.id)
        if not item.ground_truth or len(item.response_token_ids) % 4:
            result.error.code = "BAD_GROUND_TRUTH" if not item.ground_truth else "BAD_TOKEN_IDS"
            return result
        text = item.response_text + item.ground_truth + "".join(turn.content for turn in item.messages)
        share = (sum(text.encode()) % 997 + item.metadata.fields["difficulty"].number_value) / 1000
        result.reward.value = share
        result.reward.components.update(style=-share, length=float(item.num_response_tokens))
        rewards = np.full(item.num_response_tokens, share, np.float32)
        result.reward.token_rewards.CopyFrom(encode_tensor(rewards))
        return result


LIARS = Liars(Honest)


def rewarding(rule: str) -> Callable[[Callable[[reward_pb2.Reward], None]], None]:
    """A liar whose rewards of the response "42" are changed by the function."""

    def add(lie: Callable[[reward_pb2.Reward], None]) -> None:
        def lie_of_some(request: Request, response: Response) -> None:
            for item, result in zip(request.items, response.results, strict=True):
                if item.response_text == "42" and result.HasField("reward"):
                    lie(result.reward)

        lie_of_some.__name__ = lie.__name__
        LIARS.changing(rule, "lie")(lie_of_some)

    return add


@LIARS.describing
def it_has_no_name(spec: Spec) -> None:
    spec.name = ""


@LIARS.describing
def its_range_is_empty(spec: Spec) -> None:
    spec.reward.min = 2


@LIARS.describing
def it_has_two_components_of_one_name(spec: Spec) -> None:
    spec.components[1].name = spec.components[0].name


@LIARS.describing
def it_reads_a_field_that_there_is_not(spec: Spec) -> None:
    spec.reads.append(77)  # type: ignore[arg-type]


@LIARS.being("describe.stable")
class Renamed(Honest):
    """Another name each time."""

    number = 0

    async def Describe(self, request: reward_pb2.DescribeRequest, context: Any) -> Spec:
        self.number += 1
        return reward_pb2.DescribeResponse(name=f"liar {self.number}", **_others(self.spec))


def _others(spec: Spec) -> dict[str, Any]:
    return {field.name: value for field, value in spec.ListFields() if field.name != "name"}


@LIARS.being("describe.reads")
class ReadsMore(Honest):
    """Reads messages, and does not say so."""

    def __init__(self) -> None:
        super().__init__()
        del self.spec.reads[:]
        self.spec.reads.extend(field for field in ALL_FIELDS if field != reward_pb2.SCORE_FIELD_MESSAGES)


@LIARS.changing("results.complete", "lie")
def one_result_is_missing(request: Request, response: Response) -> None:
    del response.results[-1]


@LIARS.changing("results.complete", "lie")
def one_result_comes_twice(request: Request, response: Response) -> None:
    response.results.append(response.results[0])


@LIARS.changing("results.complete", "lie")
def one_result_is_nobodys(request: Request, response: Response) -> None:
    response.results[0].id = "nobody"


@LIARS.changing("result.outcome", "lie")
def some_results_are_empty(request: Request, response: Response) -> None:
    for item, result in zip(request.items, response.results, strict=True):
        if item.response_text == "42":
            result.ClearField("reward")


@rewarding("reward.value")
def some_rewards_are_nan(reward: reward_pb2.Reward) -> None:
    reward.value = math.nan


@rewarding("reward.value")
def some_rewards_are_infinite(reward: reward_pb2.Reward) -> None:
    reward.value = math.inf


@rewarding("reward.value")
def some_rewards_are_out_of_range(reward: reward_pb2.Reward) -> None:
    reward.value = 1.5


@rewarding("reward.components")
def a_component_is_missing(reward: reward_pb2.Reward) -> None:
    del reward.components["style"]


@rewarding("reward.components")
def a_component_was_not_declared(reward: reward_pb2.Reward) -> None:
    reward.components["charm"] = 1.0


@rewarding("reward.components")
def a_component_is_out_of_range(reward: reward_pb2.Reward) -> None:
    reward.components["style"] = 3.0


@rewarding("reward.components")
def an_unbounded_component_is_nan(reward: reward_pb2.Reward) -> None:
    reward.components["length"] = math.nan


@rewarding("reward.token_rewards")
def token_rewards_are_too_short(reward: reward_pb2.Reward) -> None:
    reward.token_rewards.CopyFrom(encode_tensor(np.zeros(1, np.float32)))


@rewarding("reward.token_rewards")
def token_rewards_are_of_64_bits(reward: reward_pb2.Reward) -> None:
    reward.token_rewards.CopyFrom(encode_tensor(np.zeros(2)))


@rewarding("reward.token_rewards")
def a_token_reward_is_nan(reward: reward_pb2.Reward) -> None:
    reward.token_rewards.CopyFrom(encode_tensor(np.full(2, np.nan, np.float32)))


@rewarding("reward.token_rewards")
def token_rewards_are_left_out(reward: reward_pb2.Reward) -> None:
    reward.ClearField("token_rewards")


@LIARS.changing("error.code", "lie")
def an_error_is_a_sentence(request: Request, response: Response) -> None:
    for item, result in zip(request.items, response.results, strict=True):
        if item.response_text == "I do not know.":
            result.error.code = "there was no number"


@LIARS.being("score.repeated")
class OtherEachTime(Honest):
    """Every other call has other scores."""

    def __init__(self) -> None:
        super().__init__()
        numbers = itertools.count()

        def lie(request: Request, response: Response) -> None:
            _set_values(response, 0.25 + 0.5 * (next(numbers) % 2))

        self.lie = lie


def _set_values(response: Response, value: float) -> None:
    for result in response.results:
        if result.HasField("reward"):
            result.reward.value = value


@LIARS.changing("score.order", "lie")
def scores_follow_the_place(request: Request, response: Response) -> None:
    for place, result in enumerate(response.results):
        if result.HasField("reward"):
            result.reward.value = place / 1000


@LIARS.changing("score.batches", "lie")
def scores_follow_the_size_of_the_batch(request: Request, response: Response) -> None:
    _set_values(response, len(request.items) / 1000)


@LIARS.being("score.concurrent")
class Mixed(Honest):
    """Calls at the same time share what is one call's."""

    num_calls = 0

    async def Score(self, request: Request, context: Any) -> Response:
        self.num_calls += 1
        await asyncio.sleep(0.005)
        response = await super().Score(request, context)
        if self.num_calls > 1:
            _set_values(response, 0.999)
        self.num_calls -= 1
        return response


@LIARS.changing("item.id", "lie")
def scores_follow_the_id(request: Request, response: Response) -> None:
    for result in response.results:
        if result.HasField("reward"):
            result.reward.value = sum(result.id.encode()) % 100 / 100


@LIARS.being("item.id")
class RemembersById(Honest):
    """The first score under an id is that of all that come under it."""

    def __init__(self) -> None:
        super().__init__()
        values: dict[str, float] = {}

        def lie(request: Request, response: Response) -> None:
            for result in response.results:
                if result.HasField("reward"):
                    result.reward.value = values.setdefault(result.id, result.reward.value)

        self.lie = lie


def failing(rule: str, name: str, fails: Callable[[reward_pb2.ScoreItem], bool]) -> None:
    """A liar whose calls fail for certain items."""

    class Failing(Honest):
        def result(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
            if fails(item):
                raise RoleCallError("index out of range")
            return super().result(item)

    LIARS.named[name] = (rule, Failing)


failing("item.empty", "an_empty_response_fails_the_call", lambda item: not item.response_text)
failing("item.unicode", "a_zero_character_fails_the_call", lambda item: "\x00" in item.response_text)
failing("item.long", "a_long_response_fails_the_call", lambda item: item.num_response_tokens > 20_000)
failing("item.ground_truth", "no_ground_truth_fails_the_call", lambda item: not item.ground_truth)
failing("item.metadata", "unknown_metadata_fail_the_call", lambda item: "none" in item.metadata.fields)
failing("item.token_ids", "torn_ids_fail_the_call", lambda item: len(item.response_token_ids) % 4 != 0)


@LIARS.changing("item.empty", "lie")
def an_empty_response_gets_nan(request: Request, response: Response) -> None:
    for item, result in zip(request.items, response.results, strict=True):
        if not item.response_text:
            result.reward.value = math.nan


@LIARS.changing("item.ground_truth", "lie")
def no_ground_truth_gets_zero(request: Request, response: Response) -> None:
    for item, result in zip(request.items, response.results, strict=True):
        if not item.ground_truth:
            result.reward.value = 0.0
            result.reward.components.update(style=0.0, length=0.0)
            result.reward.token_rewards.CopyFrom(encode_tensor(np.zeros(item.num_response_tokens, np.float32)))


@LIARS.changing("item.metadata", "lie")
def scores_follow_unknown_metadata(request: Request, response: Response) -> None:
    for item, result in zip(request.items, response.results, strict=True):
        if "none" in item.metadata.fields and result.HasField("reward"):
            result.reward.value = 0.999


@LIARS.changing("item.token_ids", "lie")
def torn_ids_get_zero(request: Request, response: Response) -> None:
    for result in response.results:
        if result.error.code == "BAD_TOKEN_IDS":
            result.reward.value = 0.0


@LIARS.being("request.empty")
class FailsOnNothing(Honest):
    """A request without items is nobody's mistake but its own."""

    async def Score(self, request: Request, context: Any) -> Response:
        if not request.items:
            raise RoleCallError("division by zero")
        return await super().Score(request, context)


@LIARS.being("request.empty")
class ScoresNothing(Honest):
    """A request without items gets a result."""

    async def Score(self, request: Request, context: Any) -> Response:
        if not request.items:
            return reward_pb2.ScoreResponse(results=[reward_pb2.ScoreResult(id="0")])
        return await super().Score(request, context)


@LIARS.being("max_items.taken")
class TakesFewer(Honest):
    """One item fewer than it says is the most it takes."""

    async def Score(self, request: Request, context: Any) -> Response:
        if len(request.items) == MAX_ITEMS:
            raise InvalidInputError("too many items")
        return await super().Score(request, context)


@LIARS.being("max_items.above")
class ScoresSome(Honest):
    """What is too much is left out."""

    async def Score(self, request: Request, context: Any) -> Response:
        return await super().Score(reward_pb2.ScoreRequest(items=request.items[:MAX_ITEMS]), context)


@LIARS.being("calls.load")
class Overrun(Honest):
    """More than 40 calls at once fail, and not as an overload does."""

    num_calls = 0

    async def Score(self, request: Request, context: Any) -> Response:
        self.num_calls += 1
        try:
            for _ in range(20 if len(request.items) == 16 else 0):
                if self.num_calls > 40:
                    raise RoleCallError("out of connections to the data base")
                await asyncio.sleep(0.01)
            return await super().Score(request, context)
        finally:
            self.num_calls -= 1


@LIARS.being("calls.abandoned")
class Stubborn(Honest):
    """Every large call is worked on to its end, one after the other, whoever waits for it: for so long that calls are
    given up half of it later, when a busy machine has brought them here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()
        self.working: set[asyncio.Task[None]] = set()

    async def Score(self, request: Request, context: Any) -> Response:
        if len(request.items) == MAX_ITEMS:
            task = asyncio.create_task(self._work())
            self.working.add(task)
            task.add_done_callback(self.working.discard)
            await asyncio.shield(task)
        return await super().Score(request, context)

    async def _work(self) -> None:
        async with self.turn:
            await asyncio.sleep(0.5)
