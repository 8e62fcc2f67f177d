"""The kit for an EnvironmentService: `CHECKS`, in the order in which they are made, over an `EnvironmentSession`.

Rules that others build on come first; what waits for leases comes last. It wants the environment's places for itself,
and closes every session that it opened.
"""

from rolecall.conformance.check import Check
from rolecall.conformance.environment import answers, calls, describing, failing, leases, lives, turns
from rolecall.conformance.environment.session import EnvironmentSession

CHECKS: tuple[Check[EnvironmentSession], ...] = (
    describing.usable,
    describing.sessions,
    describing.place,
    turns.order,
    describing.deterministic,
    answers.roles,
    answers.parts,
    answers.tool_names,
    answers.tool_schemas,
    answers.state,
    answers.messages_read,
    answers.turn_rewards,
    answers.end,
    answers.grade,
    answers.value,
    answers.components,
    turns.repeated,
    turns.attached,
    turns.conflict,
    turns.any_text,
    lives.reset_again,
    turns.abandoned,
    lives.apart,
    lives.unknown,
    lives.close_unknown,
    lives.reset_late,
    lives.fenced,
    lives.older_closed,
    lives.older_others,
    lives.close_again,
    describing.full,
    failing.task,
    failing.as_status,
    failing.for_good,
    calls.token,
    calls.health,
    calls.large_request,
    describing.stable,
    leases.lease,
    leases.reaped,
)
"""Every check of the contract."""
