"""The rule of `thorough`: what `make test` leaves out, a test of `make test` keeps once, or in part. So every mark
names that test; this file reads the sources and looks it up.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MARK = "pytest.mark.thorough"
LEFT_OUT = (MARK, "pytest.mark.learning")
Function = ast.FunctionDef | ast.AsyncFunctionDef

SOURCES = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
MARKED = [path for path, source in SOURCES.items() if MARK in source]


def marks(node: ast.AST) -> list[str]:
    """The marks below `node`, called or not."""
    return [ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.Attribute)]


def named(node: ast.AST) -> list[str]:
    """The tests that the marks `thorough` below `node` name."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and ast.unparse(one.func) == MARK]
    return [str(ast.literal_eval(call.args[0])) for call in calls if call.args]


def is_left_out(function: Function, module: ast.Module) -> bool:
    """Whether `make test` runs it with no parameters at all: it is marked itself, or its whole file is."""
    own = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    of_file = [
        one for one in module.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"
    ]
    return any(ast.unparse(one) in LEFT_OUT for one in own) or any(
        mark in LEFT_OUT for one in of_file for mark in marks(one)
    )


def test_each_test_that_is_left_out_names_one_of_make_test_that_keeps_its_promise() -> None:
    modules = {path: ast.parse(source) for path, source in SOURCES.items()}
    stays = {
        node.name
        for module in modules.values()
        for node in module.body
        if isinstance(node, Function) and not is_left_out(node, module)
    }
    for path in MARKED:
        names = named(modules[path])
        assert len(names) == marks(modules[path]).count(MARK), f"{path}: a mark names no test"
        assert set(names) <= stays, f"{path}: {set(names) - stays} are no tests of `make test`; name one that stays"


def test_every_contract_and_every_unit_test_is_one_of_make_test() -> None:
    assert [path for path in MARKED if path.relative_to(TESTS).parts[0] in ("contract", "unit")] == [Path(__file__)]
