"""Options as people write them."""

import os
from pathlib import Path

import pytest

from genesis.arguments import Parser, check_output
from genesis.errors import UserError


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="genesis some")
    parser.add_argument("--max_queue", type=int)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("rest", nargs="*")
    return parser


def test_dashes_and_underscores_are_the_same(parser: Parser) -> None:
    for words in (["--max_queue", "3", "--top-k=4"], ["--max-queue=3", "--top_k", "4"]):
        found = parser.parse_args(words)
        assert (found.max_queue, found.top_k) == (3, 4)


def test_values_and_what_stands_after_two_dashes_stay_as_they_are(parser: Parser) -> None:
    assert parser.parse_args(["a_b-c", "--", "--max-queue", "d-e_f"]).rest == ["a_b-c", "--max-queue", "d-e_f"]


def test_an_unknown_option_is_refused_as_it_was_written(parser: Parser) -> None:
    with pytest.raises(UserError, match="unrecognized arguments: --max-queu; did you mean --max_queue"):
        parser.parse_args(["--max-queu", "3"])


def test_a_name_that_no_file_can_have_is_refused_with_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    check_output(tmp_path / "new.json", "--json")
    (tmp_path / "old.json").touch()
    check_output(tmp_path / "old.json", "--json")
    for name, kind in (("pipe", "a FIFO"), ("link", "a FIFO"), (".", "a directory"), ("/dev/null", "a device")):
        with pytest.raises(UserError, match=f"--json is .*, which is {kind}: give the name of a file"):
            check_output(tmp_path / name, "--json")
