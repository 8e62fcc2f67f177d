"""`rolecall tasks`: the tasks that an environment lists, as a data set. No torch."""

import argparse
import asyncio
import json
from io import TextIOWrapper
from typing import Any, TextIO

from rolecall.address import check_address
from rolecall.environment.client import DESCRIBE_S, environment_channel
from rolecall.environment.tasks import PAGE_S, PAGE_TASKS, page_problem, rows_problem
from rolecall.errors import ConfigError, InvalidInputError, RoleCallError
from rolecall.settings import EnvironmentSection, RpcSection
from rolecall.v1 import environment_pb2, environment_pb2_grpc
from rolecall.wire import decode_fields


def tasks(arguments: argparse.Namespace, out: TextIO) -> int:
    """Writes the split `arguments.split` of the environment at `arguments.address` to `out`, a row a line, once it is
    whole; 0. ConfigError for a bad command line, UnavailableError when nobody answers.
    """
    check_address(arguments.address)
    section = EnvironmentSection(
        address=arguments.address, ca_file=arguments.ca_file, bearer_token_file=arguments.bearer_token_file
    )
    rows = asyncio.run(_rows(section, arguments.split))
    if isinstance(out, TextIOWrapper):
        out.reconfigure(encoding="utf-8")  # it becomes a file, which is read as UTF-8 whatever the terminal has
    out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return 0


async def _rows(section: EnvironmentSection, split: str | None) -> list[dict[str, Any]]:
    async with environment_channel(section, RpcSection()) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        spec = await stub.Describe(environment_pb2.DescribeEnvironmentRequest(), timeout=DESCRIBE_S)
        if not spec.splits:
            raise ConfigError(f"environment {spec.name!r} lists no tasks; write its data set yourself")
        if (split or spec.splits[0]) not in spec.splits or (split is None and len(spec.splits) > 1):
            raise ConfigError(f"environment {spec.name!r} has the splits {', '.join(spec.splits)}; name one by --split")
        return [row_of(task) for task in await _list(stub, split or spec.splits[0])]


async def _list(stub: environment_pb2_grpc.EnvironmentServiceStub, split: str) -> list[environment_pb2.Task]:
    """All tasks of a split, in the environment's order. RoleCallError when pages do not make a list of them."""
    tasks: list[environment_pb2.Task] = []
    uids: set[str] = set()
    token = ""
    while True:
        request = environment_pb2.ListTasksRequest(split=split, page_size=PAGE_TASKS, page_token=token)
        page = await stub.ListTasks(request, timeout=PAGE_S)
        token = page.next_page_token
        problem = page_problem(page, PAGE_TASKS, is_first=not tasks) or rows_problem(page.tasks, uids)
        if problem:
            raise RoleCallError(f"split {split!r}, after {len(tasks)} tasks: {problem}")
        tasks += page.tasks
        if not token:
            return tasks


def row_of(task: environment_pb2.Task) -> dict[str, Any]:
    """A task as a row of a data set, by the names that data.prompt_field and data.ground_truth_field have unless set.
    InvalidInputError when a field of it has one of them.
    """
    row: dict[str, Any] = {
        "uid": task.uid,
        "prompt": [{"role": message.role, "content": message.content} for message in task.messages],
    }
    truths = [task.ground_truth, *task.other_ground_truths]
    if any(truths):
        row["ground_truth"] = truths[0] if len(truths) == 1 else truths
    fields = decode_fields(task.metadata)
    taken = sorted(fields.keys() & {"uid", "prompt", "ground_truth"})
    if taken:
        raise InvalidInputError(f"task {task.uid!r} has a further field {taken[0]!r}, which is the name of its own")
    return row | fields
