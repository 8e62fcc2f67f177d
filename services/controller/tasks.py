"""One error out of many: what a TaskGroup raises, reduced to the leaf that caused the rest."""

import asyncio


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of `group` that is not a mere cancellation; the others are its consequences and stay in its
    traceback.
    """
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)), leaves[0])
