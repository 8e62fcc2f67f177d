"""The report of a replica's workers after a load, and what follows from it for the replica.

Owns the report as it crosses vLLM's `collective_rpc`, in plain types, because an exception would lose its type on the
way. It needs no vLLM.
"""

from collections.abc import Sequence
from typing import Any, Literal

from rolecall import errors
from rolecall.errors import RoleCallError, TornWeightsError, WeightsMismatchError
from rolecall.weights.transferred import Transferred

State = Literal["empty", "loading", "loaded", "torn"]
"""What a worker holds: nothing yet, a load in progress, one whole version, or parts of several."""


def agreed_report(policy_version: int, workers: Sequence[dict[str, Any]]) -> Transferred:
    """Returns what all workers received, from each one's Receiver.report.

    TornWeightsError when any of them is torn, whatever the others say; else the first error; WeightsMismatchError when
    they received different weights; TornWeightsError when a tensor has a place in none of them. Each has proved that
    its own parameters are whole.
    """
    failed = [worker for worker in workers if worker["error"] is not None]
    for worker in failed:
        if worker["state"] == "torn":
            reason, message = worker["error"]
            raise TornWeightsError(f"policy version {policy_version} did not load: {message}", cause=reason)
    for worker in failed:
        raise_reported(worker["error"])
    arrived = workers[0]["arrived"]
    if any(worker["arrived"]["digest"] != arrived["digest"] for worker in workers):
        raise WeightsMismatchError(
            f"the workers of one replica received different weights for policy version {policy_version}"
        )
    homeless = sorted(set.intersection(*(set(worker["unread"]) for worker in workers)))
    if homeless:
        more = f" and {len(homeless) - 3} more" if len(homeless) > 3 else ""
        raise TornWeightsError(
            f"policy version {policy_version}: no worker of the engine has a place for {', '.join(homeless[:3])}{more}"
            "; the model and the actor's export disagree"
        )
    return Transferred(**arrived)


def wire_error(error: RoleCallError | None) -> list[str] | None:
    """The reason and message of an error; None for none."""
    return None if error is None else [error.reason, error.message]


def raise_reported(error: Sequence[str] | None) -> None:
    """Raises what `wire_error` wrote, if it is an error."""
    if error is not None:
        raise _BY_REASON[error[0]](error[1])


_BY_REASON: dict[str, type[RoleCallError]] = {
    kind.reason: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RoleCallError)
}
