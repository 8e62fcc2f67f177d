"""Rules of the tasks that an environment lists, where it lists some: a list that is the same for everybody, of rows
that a data set may have and episodes that begin.
"""

import itertools
from collections.abc import AsyncIterator, Sequence

import grpc

from rolecall.conformance.check import Verdict, failed, passed, skipped, unless
from rolecall.conformance.environment.contract import CONTRACT, PLACES
from rolecall.conformance.environment.rows import Row
from rolecall.conformance.environment.session import EnvironmentSession
from rolecall.environment.tasks import PAGE_S, PAGE_TASKS, page_problem, rows_problem
from rolecall.v1 import environment_pb2

MAX_TASKS = 2 * PAGE_TASKS
"""Tasks of a split that are looked at, the first ones."""
SMALL_PAGE = 7
"""Another size of pages, in which as many tasks are asked for as PAGE_TASKS."""
NUM_BEGUN = 8
"""Tasks of a split that are begun, from all over those that were listed."""
_NONE = skipped("it names no splits")
_PAGES = ("describe.usable", "tasks.pages")


async def _pages(
    session: EnvironmentSession, split: str, page_size: int, num: int
) -> AsyncIterator[environment_pb2.ListTasksResponse]:
    """The pages with the first `num` tasks of a split."""
    token, listed = "", 0
    while listed < num:
        request = environment_pb2.ListTasksRequest(split=split, page_size=page_size, page_token=token)
        page = await session.stub.ListTasks(request, timeout=PAGE_S)
        yield page
        token, listed = page.next_page_token, listed + len(page.tasks)
        if not token:
            return


async def _tasks(
    session: EnvironmentSession, split: str, page_size: int = PAGE_TASKS, num: int = MAX_TASKS
) -> list[environment_pb2.Task]:
    return [task async for page in _pages(session, split, page_size, num) for task in page.tasks][:num]


@CONTRACT.rule(
    "tasks.pages",
    "EnvironmentService.ListTasks",
    "Each page but that of an empty split has 1 to page_size tasks.",
    ("describe.usable",),
)
async def pages(session: EnvironmentSession) -> Verdict:
    """Lists every split in pages of two sizes."""
    num = 0
    for split, size in itertools.product(session.spec.splits, (PAGE_TASKS, SMALL_PAGE)):
        listed = 0
        async for page in _pages(session, split, size, size * MAX_TASKS // PAGE_TASKS):
            problem = page_problem(page, size, is_first=not listed)
            if problem:
                return failed(f"split {split!r}, after {listed} tasks: {problem}")
            listed, num = listed + len(page.tasks), num + 1
    return passed(f"{num} pages") if session.spec.splits else _NONE


@CONTRACT.rule(
    "tasks.rows",
    "ListTasksResponse.tasks",
    "Each with a uid that no other of the split has, and a message that says something, as a row of a data set.",
    _PAGES,
)
async def rows(session: EnvironmentSession) -> Verdict:
    """Looks for tasks that no data set can hold."""
    for split in session.spec.splits:
        problem = rows_problem(await _tasks(session, split), set())
        if problem:
            return failed(f"split {split!r}: {problem}")
    return passed(", ".join(session.spec.splits)) if session.spec.splits else _NONE


@CONTRACT.rule(
    "tasks.stable",
    "EnvironmentService.ListTasks",
    "Whoever asks, whenever, and in pages of whatever size, gets the same tasks in the same order.",
    _PAGES,
)
async def stable(session: EnvironmentSession) -> Verdict:
    """Lists every split twice, the second time in small pages."""
    for split in session.spec.splits:
        first, again = await _tasks(session, split), await _tasks(session, split, SMALL_PAGE, PAGE_TASKS)
        if first[:PAGE_TASKS] != again:
            return failed(f"split {split!r}: {_uids(first)} in pages of {PAGE_TASKS}, {_uids(again)} of {SMALL_PAGE}")
    return passed(f"{len(session.spec.splits)} splits twice") if session.spec.splits else _NONE


@CONTRACT.rule(
    "tasks.split",
    "EnvironmentService.ListTasks",
    "INVALID_ARGUMENT for a split that Describe does not name.",
    ("describe.usable",),
)
async def split(session: EnvironmentSession) -> Verdict:
    """Asks for a split that is none."""
    if not session.spec.splits:
        return _NONE
    request = environment_pb2.ListTasksRequest(split="/".join(session.spec.splits) + "/", page_size=1)
    code = await session.stub.ListTasks(request, timeout=PAGE_S).code()  # bounded: by the call's deadline
    is_refused = code is grpc.StatusCode.INVALID_ARGUMENT
    return unless(None if is_refused else f"split {request.split!r} ended with {code.name}", "INVALID_ARGUMENT")


@CONTRACT.rule("tasks.begun", "ListTasksResponse.tasks", "Reset can begin every one.", (*PLACES, *_PAGES))
async def begun(session: EnvironmentSession) -> Verdict:
    """Begins episodes of some tasks."""
    num = 0
    for name in session.spec.splits:
        tasks = await _tasks(session, name)
        for task in tasks[:: max(1, len(tasks) // NUM_BEGUN)][:NUM_BEGUN]:
            async with session.episode(Row(f"task {task.uid}", task, num, ())) as episode:
                code = await episode.reset().status()
                if code is not grpc.StatusCode.OK:
                    return failed(f"task {task.uid!r} of split {name!r}: Reset ended with {code.name}")
            num += 1
    return passed(f"{num} tasks") if session.spec.splits else _NONE


def _uids(tasks: Sequence[environment_pb2.Task]) -> str:
    """The first names of a list, for people."""
    return f"{len(tasks)} tasks, {', '.join(task.uid for task in tasks[:3])}, ..."
