"""Finds every wait in Python source and says which have no deadline of their own: `python -m tools.check_deadlines`,
a part of `make check`.

A wait is an await, an `async for`, an `async with` of a lock, or a call that may block its thread. It is bounded when

- it passes a deadline: a keyword `timeout` or the like, an argument whose name ends in `_s` (seconds, as everywhere in
  this code base), or the one argument of `thread.join(2.0)`;
- it stands inside `async with asyncio.timeout(...)` or `timeout_at(...)`;
- it calls a function of this code base, whose own waits are looked at there (`asyncio.gather` and `to_thread` of such,
  too);
- it calls a method of a gRPC service: rolecall/rpc/client_calls.py gives every call on a channel a deadline, and no
  other module makes channels;
- it is a lock in whose block nobody waits for anything else (with what our own functions wait for counted in), so that
  it is free again at once;
- it runs a collective: the group's creation carries the timeout, which is looked at there;
- a comment `# bounded: <by what>` on its lines, or on the one above, says so. The comment is for the few waits that a
  reader, but no rule, can bound, and for the main loops of roles, which wait for work or for the end on purpose. A
  comment where nothing needs one is a finding, too.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("rolecall", "services")
"""The packages whose waits are looked at."""
MARK = "# bounded:"
MIN_WORDS = 3
"""The words a mark needs; fewer do not say by what."""

LEAVES = frozenset(
    {"wait", "get", "put", "acquire", "join", "wait_for", "wait_closed", "result", "gather", "shield", "drain_queue"}
)
"""The names that the standard library gives to waits. One of our own functions with such a name is told from them by
its receiver only, so they all count.
"""
INSTANT = frozenset({"sleep", "abort"})
"""Calls that last a given time (`sleep`) or end a call with a status (`abort`)."""
DEADLINES = frozenset(
    {"timeout", "timeout_s", "timeout_ms", "grace_s", "grace", "deadline", "socket_timeout", "deadline_s"}
)
SOCKET_WAITS = frozenset(
    {
        "recv",
        "recv_into",
        "recvmsg",
        "accept",
        "connect",
        "sendall",
        "sendmsg",
        "readexactly",
        "readline",
        "flock",
        "waitpid",
        "urlopen",
    }
)
MAKERS = frozenset(
    {"init_process_group", "new_group", "TCPStore", "ProcessGroupGloo", "ProcessGroupNCCL", "create_connection"}
)
"""Calls whose product waits for as long as their own arguments say."""
PROCESSES = frozenset({"run", "call", "check_call", "check_output"})
CHANNELS = frozenset({"insecure_channel", "secure_channel"})
CHANNEL_MODULE = "rolecall/rpc/channel.py"
WAITS = (
    frozenset({"wait", "get", "acquire", "join", "wait_for", "result", "sleep", "select", "communicate"}) | SOCKET_WAITS
)
LOCK_NAMES = ("lock", "condition", "mutex")


@dataclass(frozen=True)
class Finding:
    """A wait without a deadline, or a mark without a wait."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Names:
    """The functions that the code looked at defines."""

    functions: frozenset[str]
    """All of them, less those that only their receiver tells from the standard library's waits."""
    waiting: frozenset[str]
    """The functions that wait for something, or call one that does."""

    @classmethod
    def of(cls, trees: list[ast.Module]) -> "Names":
        calls: dict[str, set[str]] = {}
        every = [node for tree in trees for node in ast.walk(tree)]
        for node in every:
            if isinstance(node, ast.FunctionDef):  # what a thread can call while it holds a lock
                calls.setdefault(node.name, set()).update(_called(node.body))
        waiting: set[str] = set()
        while more := {name for name, called in calls.items() if called & (waiting | WAITS)} - waiting:
            waiting |= more
        coroutines = {node.name for node in every if isinstance(node, ast.AsyncFunctionDef)}
        return cls(frozenset(calls.keys() | coroutines) - LEAVES, frozenset(waiting) | WAITS)


def _called(body: list[ast.stmt]) -> set[str]:
    """Names the functions called in `body`. A call with arguments as of a look-up (`", ".join(x)`, `table.get(key)`)
    is no wait.
    """
    calls = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {_name(call.func) for call in calls if not (_name(call.func) in ("join", "get") and call.args)}


def findings(sources: dict[str, str]) -> list[Finding]:
    """Returns the findings of all modules (path -> source), in order."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    names = Names.of(list(trees.values()))
    return [finding for path, tree in trees.items() for finding in Module(path, sources[path], names).findings(tree)]


def read_sources() -> dict[str, str]:
    """Reads the modules of PACKAGES below ROOT, generated stubs left out: path -> source."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.parts)
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


class Module(ast.NodeVisitor):
    """A visitor that collects the unbounded waits of one module."""

    def __init__(self, path: str, source: str, names: Names) -> None:
        self._path = path
        self._names = names
        self._marks = dict(_marks(source))
        self._used: set[int] = set()
        self._found: list[Finding] = []
        self._limited = 0
        """The number of `asyncio.timeout` blocks around this place."""
        self._in_async = False
        self._statement: ast.stmt | None = None

    def findings(self, tree: ast.Module) -> list[Finding]:
        self.visit(tree)
        for line, text in self._marks.items():
            if line not in self._used:
                self._found.append(Finding(self._path, line, f"nothing here needs `{MARK}{text}`"))
            elif len(text.split()) < MIN_WORDS:
                self._found.append(Finding(self._path, line, f"`{MARK}{text}` does not say by what"))
        return sorted(self._found, key=lambda finding: finding.line)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self._statement = self._statement, node
            super().visit(node)
            self._statement = outer
        else:
            super().visit(node)

    # --- where we are -----------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node, False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node, True)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node, False)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, in_async: bool) -> None:
        outer = self._limited, self._in_async
        self._limited, self._in_async = 0, in_async
        self.generic_visit(node)
        self._limited, self._in_async = outer

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        limits = sum(_name(item.context_expr) in ("timeout", "timeout_at") for item in node.items)
        self._limited += limits
        for item in node.items:
            if not isinstance(item.context_expr, ast.Call) and not self._is_free_at_once(item.context_expr, node.body):
                self._wait(item.context_expr, item.context_expr, "a lock, semaphore or condition is awaited")
            self.visit(item.context_expr)
        for statement in node.body:
            self.visit(statement)
        self._limited -= limits

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            name = _name(item.context_expr).lower()
            is_lock = not isinstance(item.context_expr, ast.Call) and any(word in name for word in LOCK_NAMES)
            if is_lock and not self._is_free_at_once(item.context_expr, node.body):
                self._wait(item.context_expr, item.context_expr, "a lock is waited for")
        self.generic_visit(node)

    def _is_free_at_once(self, lock: ast.expr, body: list[ast.stmt]) -> bool:
        """Whether nobody waits while holding it; a condition's own wait lets go of it."""
        text = ast.unparse(lock)
        own = {f"{text}.wait", f"{text}.wait_for"}
        nodes = [node for statement in body for node in ast.walk(statement)]
        awaits = [node for node in nodes if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)]
        foreign = [
            node
            for node in awaits
            if not (
                isinstance(node, ast.Await) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in own
            )
        ]
        blocked = [
            node
            for node in nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func) not in own and self._may_wait(node)
        ]
        return not foreign and not blocked

    def _may_wait(self, call: ast.Call) -> bool:
        name = _name(call.func)
        return name in self._names.waiting and not (name in ("join", "get") and bool(call.args))

    # --- waits ------------------------------------------------------------------------------------

    def visit_Await(self, node: ast.Await) -> None:
        if not self._is_bounded(node.value):
            self._wait(node, node, f"`await {ast.unparse(node.value)[:90]}`")
        if isinstance(node.value, ast.Call):
            self._inside(node.value)
        else:
            self.generic_visit(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self._is_bounded(node.iter):
            self._wait(node.iter, node.iter, f"`async for` over `{ast.unparse(node.iter)[:80]}`")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._blocks(node):
            self._wait(node, node, f"`{ast.unparse(node)[:90]}` blocks")
        self._inside(node)

    def _inside(self, node: ast.Call) -> None:
        """Visits the parts of a call that has itself been judged."""
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def _is_bounded(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            return self._is_bounded(value.body) and self._is_bounded(value.orelse)
        if isinstance(value, ast.Starred):
            return self._is_bounded(value.value)
        if isinstance(value, ast.GeneratorExp | ast.ListComp):
            return self._is_bounded(value.elt)
        if not isinstance(value, ast.Call):
            return False
        name = _name(value.func)
        if name in INSTANT or name in self._names.functions or _has_deadline(value) or _is_rpc(value.func):
            return True
        if name in ("gather", "shield", "ensure_future", "create_task"):
            return all(self._is_bounded(argument) for argument in value.args)
        if name in ("to_thread", "run_in_executor") and value.args:
            return self._runs_own(value.args[name == "run_in_executor"])
        return False

    def _runs_own(self, function: ast.expr) -> bool:
        """Whether it is a function of this code base or a lambda, whose body is looked at."""
        return isinstance(function, ast.Lambda) or _name(function) in self._names.functions

    def _blocks(self, call: ast.Call) -> bool:
        name, is_method = _name(call.func), isinstance(call.func, ast.Attribute)
        if _has_deadline(call):
            return False
        if name in MAKERS or (name in CHANNELS and self._path != CHANNEL_MODULE):
            return True
        if name in SOCKET_WAITS and is_method:
            return not _has_flag(call, "LOCK_NB")
        owner = _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name in PROCESSES and owner == "subprocess":
            return True
        if name == "from_url" and is_method:
            return not any(keyword.arg is None for keyword in call.keywords)
        if name == "result" and (self._in_async or owner == "task"):
            return False  # of a task that is done; a thread's future is awaited in this code base
        if name == "get" and owner.isupper():
            return False  # a context variable
        return (
            is_method
            and name in ("wait", "join", "get", "acquire", "result", "select", "communicate")
            and not call.args
            and not self._in_async_wait(call)
        )

    def _in_async_wait(self, call: ast.Call) -> bool:
        """Whether the call, not awaited in a coroutine, only makes a coroutine for somebody else to await."""
        return self._in_async and _name(call.func) in ("wait", "join", "get", "acquire")

    def _wait(self, node: ast.expr, place: ast.expr, what: str) -> None:
        if self._limited and isinstance(node, ast.Await | ast.Name | ast.Attribute):
            return
        assert self._statement is not None
        first, last = self._statement.lineno, place.end_lineno or place.lineno
        marks = [line for line in range(first, _head_end(self._statement, last) + 1) if line in self._marks]
        self._used.update(marks)
        if not marks:
            self._found.append(Finding(self._path, place.lineno, f"{what} without a deadline"))


def _head_end(statement: ast.stmt, last: int) -> int:
    """The last line on which a mark may stand: the statement's own, or that of a compound statement's head."""
    body = [child.lineno for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return max(last, min(body) - 1) if body else (statement.end_lineno or last)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _has_deadline(call: ast.Call) -> bool:
    given = any(keyword.arg in DEADLINES and not _is_none(keyword.value) for keyword in call.keywords)
    if any(_in_seconds(argument) for argument in call.args):
        return True
    name = _name(call.func)
    if (
        name in ("wait_for", "init_process_group")
        and isinstance(call.func, ast.Attribute)
        and _name(call.func.value) == "asyncio"
    ):
        return len(call.args) > 1 or given
    if name == "wait" and isinstance(call.func, ast.Attribute) and _name(call.func.value) == "asyncio":
        return given
    return given or (
        name in ("wait", "join")
        and isinstance(call.func, ast.Attribute)
        and len(call.args) == 1
        and not _is_none(call.args[0])
    )


def _in_seconds(argument: ast.expr) -> bool:
    if isinstance(argument, ast.Call):  # timedelta(seconds=timeout_s)
        return any(_in_seconds(keyword.value) for keyword in argument.keywords)
    return isinstance(argument, ast.Name | ast.Attribute) and _name(argument).lower().endswith(("_s", "timeout"))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_rpc(function: ast.expr) -> bool:
    """Whether it is a method of a gRPC stub: the only methods in CamelCase."""
    return isinstance(function, ast.Attribute) and function.attr[:1].isupper()


def _has_flag(call: ast.Call, flag: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == flag for node in ast.walk(call))


def _marks(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line each mark speaks of, and its words. That is the line it ends, or the next if it stands alone."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and MARK in token.string:
            alone = token.line.strip().startswith("#")
            yield token.start[0] + alone, token.string.partition(MARK)[2]


def main() -> int:
    """Prints the findings; 1 when there are any."""
    unbounded = findings(read_sources())
    for finding in unbounded:
        print(finding)
    if unbounded:
        print(f"{len(unbounded)} waits without a deadline; pass one, or say `{MARK} <by what>` on the line")
    return bool(unbounded)


if __name__ == "__main__":
    sys.exit(main())
