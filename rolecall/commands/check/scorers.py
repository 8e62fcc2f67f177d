"""The question to a scorer at an address before a run starts: what it is, and whether a run can begin with that."""

from collections.abc import Callable

import grpc

from rolecall.errors import ConfigError, NotFoundError, RoleCallError, UnauthenticatedError, VersionMismatchError
from rolecall.rpc.presence import LOOK_S, Ask
from rolecall.scoring.description import spec_gaps, spec_problem
from rolecall.v1 import reward_pb2, reward_pb2_grpc

_TOLD = (NotFoundError, UnauthenticatedError, VersionMismatchError)
"""Errors that a look at an address words for every service alike."""


def scorer_fits(
    notes: list[str],
    problem_of: Callable[[reward_pb2.DescribeResponse], str | None] = spec_problem,
    *,
    is_shadow: bool = False,
) -> Ask:
    """Asks a scorer what it is. ConfigError for an answer that ends a run at its start: an error that waiting does not
    mend, or what `problem_of` says. `notes` gets what is believed and perhaps not meant so, and of a shadow, without
    which a run goes on, its problem too.
    """

    async def ask(channel: grpc.aio.Channel) -> None:
        question = reward_pb2.DescribeRequest()
        try:
            spec = await reward_pb2_grpc.RewardServiceStub(channel).Describe(question, timeout=LOOK_S)
        except RoleCallError as error:
            if is_shadow or error.retryable or isinstance(error, _TOLD):
                raise
            raise ConfigError(
                f"answers, and does not say what it is ({error.message}), without which the run ends; mend its Describe"
            ) from error
        problem = problem_of(spec)
        if problem and not is_shadow:
            raise ConfigError(problem)
        notes.extend(
            [problem]
            if problem
            else [f"{gap}; correct what Describe answers, if it is not meant so" for gap in spec_gaps(spec)]
        )

    return ask
