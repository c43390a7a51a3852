"""`python -O` leaves asserts out: none may do a part of the program's work."""

import ast
from pathlib import Path

import pytest

import genesis
import genesis_callbacks

PURE_CALLS = {"isinstance", "len"}
PACKAGES = [Path(package.__file__ or "").parent for package in (genesis, genesis_callbacks)]


def find_work(source: str) -> list[str]:
    """Returns what asserts do beyond comparing values: a call that is not known to be pure, or an assignment."""
    found = []
    for statement in ast.walk(ast.parse(source)):
        for node in ast.walk(statement.test) if isinstance(statement, ast.Assert) else ():
            is_pure_call = isinstance(node, ast.Call) and ast.unparse(node.func) in PURE_CALLS
            if isinstance(node, ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) and not is_pure_call:
                found.append(f"line {statement.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_assert_of_the_product_does_work(package: Path) -> None:
    files = sorted(package.rglob("*.py"))
    assert files
    found = {str(path): work for path in files if (work := find_work(path.read_text(encoding="utf-8")))}
    assert not found, "move these calls out of the asserts, or add a function without effects to PURE_CALLS"


def test_a_call_an_assignment_and_a_message_are_told_apart() -> None:
    assert find_work("assert queue.popleft() == job") == ["line 1: queue.popleft()"]
    assert find_work("assert (answer := answers[job]) is not None")
    assert not find_work("assert len(rows) == 3 and isinstance(rows, list), describe(rows)")
