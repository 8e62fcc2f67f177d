"""The tasks that an environment brings: pages of them for callers, and what is wrong with somebody's pages.

Knows nothing of sessions. A task's plain form and its message are answers.py's; a list of pages is listing.py's.
"""

from collections.abc import Mapping, Sequence

from rolecall.environment.answers import message_of
from rolecall.environment.env import Task
from rolecall.errors import InvalidInputError
from rolecall.rpc.options import MAX_MESSAGE_BYTES
from rolecall.v1 import environment_pb2

PAGE_TASKS = 256
"""Tasks that are asked for at a time."""
_PAGE_BYTES = MAX_MESSAGE_BYTES // 2
"""Bytes of the tasks of a page at most, unless one is larger by itself."""
PAGE_S = 60.0
"""Deadline of a page, which may be made of files, or fetched from elsewhere."""


def page_of(
    tasks: Mapping[str, Sequence[Task]], request: environment_pb2.ListTasksRequest
) -> environment_pb2.ListTasksResponse:
    """The page that is asked for. InvalidInputError for a split, a size or a token that is none."""
    listed = tasks.get(request.split)
    if listed is None:
        raise InvalidInputError(f"there is no split {request.split!r}; there are: {', '.join(tasks) or 'none'}")
    token = request.page_token or "0"
    if request.page_size < 1 or not (token.isascii() and token.isdecimal()) or int(token) > len(listed):
        raise InvalidInputError("page_size must be at least 1, and page_token what the page before said")
    first, num_bytes = int(token), 0
    page: list[environment_pb2.Task] = []
    for task in listed[first : first + request.page_size]:
        message = message_of(task)
        num_bytes += message.ByteSize()
        if page and num_bytes > _PAGE_BYTES:
            break
        page.append(message)
    end = first + len(page)
    return environment_pb2.ListTasksResponse(tasks=page, next_page_token=str(end) if end < len(listed) else "")


def page_problem(page: environment_pb2.ListTasksResponse, page_size: int, *, is_first: bool) -> str | None:
    """Returns what is wrong with the size of a page; None when nothing is. With it, a list has an end."""
    if len(page.tasks) > page_size:
        return f"a page of {len(page.tasks)} tasks, where {page_size} were asked for"
    if not page.tasks and (page.next_page_token or not is_first):
        return "a page without tasks"
    return None


def rows_problem(tasks: Sequence[environment_pb2.Task], uids: set[str]) -> str | None:
    """Returns what keeps tasks from being rows of a data set; None when nothing does. `uids`: those of tasks before
    them, to which theirs are added.
    """
    for task in tasks:
        if not task.uid or task.uid in uids:
            return f"the uid {task.uid!r}{' twice' if task.uid else ''}; each task needs one of its own"
        if not any(message.content.strip() for message in task.messages):
            return f"task {task.uid!r} has no message that says something"
        uids.add(task.uid)
    return None
