"""Each line of the page of what is trusted names the tests that hold it."""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/explanation/security.md"
TEST = re.compile(r"`((?:callbacks/)?tests/[\w/]+\.py)::(test_\w+)`")


def read_lines(page: str) -> Iterator[str]:
    """Yields the rows of the tables whose last column is for tests."""
    is_held = False
    for line in re.sub(r"<!--.*?-->\n?", "", page, flags=re.DOTALL).splitlines():
        if not line.startswith("|"):
            is_held = False
        elif line.startswith("| line |"):
            is_held = True
        elif is_held and not line.startswith("|---"):
            yield line


def find_problem(line: str) -> str | None:
    """Returns what is wrong with a row, or None."""
    tests = TEST.findall(line.strip("| ").rpartition("|")[2])
    missing = [name for file, name in tests if f"def {name}(" not in (REPOSITORY / file).read_text(encoding="utf-8")]
    return f"{line}: {missing or 'no test'}" if missing or not tests else None


def test_each_line_of_the_page_names_tests_that_exist() -> None:
    lines = list(read_lines(PAGE.read_text(encoding="utf-8")))
    assert len(lines) > 35
    assert not list(filter(None, map(find_problem, lines)))


def test_a_line_without_a_test_or_with_one_that_is_gone_is_found() -> None:
    page = "| line | test |\n|---|---|\n<!--\n| a | |\n-->\n| b | |\n\n| c | |"
    assert list(read_lines(page)) == ["| b | |"]
    assert find_problem("| b | |") == "| b | |: no test"
    assert find_problem("| b | `tests/docs/test_security_page.py::test_no_such` |")
