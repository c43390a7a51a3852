"""The page of promises names tests that exist, and every folder of tests."""

import re

from tests.commands import REPOSITORY

PAGE = REPOSITORY / "docs/explanation/claims.md"
ROOTS = ("tests", "callbacks/tests")


def read_named() -> set[str]:
    return set(re.findall(r"`([\w/]*tests/[\w/]*test_\w+\.py)`", PAGE.read_text(encoding="utf-8")))


def test_every_file_that_the_page_of_promises_names_exists() -> None:
    assert [name for name in sorted(read_named()) if not (REPOSITORY / name).is_file()] == []


def test_every_folder_of_tests_holds_a_promise_of_the_page() -> None:
    folders = {file.parent for root in ROOTS for file in (REPOSITORY / root).rglob("test_*.py")}
    named = {(REPOSITORY / name).parent for name in read_named()}
    assert sorted(str(folder.relative_to(REPOSITORY)) for folder in folders - named) == []
