"""One piece of work in a thread that does not keep its process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Runs `work` in a thread of its own; the future gets what it returns or raises."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on whoever stops waiting for it cannot cancel it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits for the future gets it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
