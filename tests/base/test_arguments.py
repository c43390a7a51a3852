"""Options as people write them."""

import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from genesis.base.arguments import Parser, check_output, read_size, respell
from genesis.base.errors import UserError


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="genesis some")
    parser.add_argument("--max_queue", type=int)
    parser.add_argument("--top_k", type=int)
    parser.add_argument("rest", nargs="*")
    return parser


def test_dashes_and_underscores_are_the_same(parser: Parser) -> None:
    """Reported as huggingface/accelerate#2527."""
    for words in (["--max_queue", "3", "--top-k=4"], ["--max-queue=3", "--top_k", "4"]):
        found = parser.parse_args(respell(words))
        assert (found.max_queue, found.top_k) == (3, 4)


def test_values_names_of_sources_and_what_stands_after_two_dashes_stay_as_they_are(parser: Parser) -> None:
    assert parser.parse_args(respell(["a_b-c", "--", "--max-queue", "d-e_f"])).rest == [
        "a_b-c",
        "--max-queue",
        "d-e_f",
    ]
    assert respell(["--data.mix.fine-web", "--data.max-epochs.my-text=1-2", "--model.optimizer.muon-lr=1e-3"]) == [
        "--data.mix.fine-web",
        "--data.max_epochs.my-text=1-2",
        "--model.optimizer.muon_lr=1e-3",
    ]
    assert respell(["--a-b c", "-c-d", "e=--f-g"]) == ["--a-b c", "-c-d", "e=--f-g"]


def test_an_unknown_option_is_refused_with_the_nearest(parser: Parser) -> None:
    with pytest.raises(UserError, match="unrecognized arguments: --max_quue; did you mean --max_queue"):
        parser.parse_args(respell(["--max-quue", "3"]))


def test_a_name_that_no_file_can_have_is_refused_with_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    check_output(tmp_path / "new.json", "--json")
    (tmp_path / "old.json").touch()
    check_output(tmp_path / "old.json", "--json")
    for name, kind in (("pipe", "a FIFO"), ("link", "a FIFO"), (".", "a directory"), ("/dev/null", "a device")):
        with pytest.raises(UserError, match=f"--json is .*, which is {kind}: give the name of a file"):
            check_output(tmp_path / name, "--json")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("5GB", 5 * 10**9),
        ("5G", 5 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512mib", 512 << 20),
        ("1e9", 10**9),
        ("10.1TB", 10_100_000_000_000),
        ("7", 7),
    ],
)
def test_a_size_is_a_number_with_or_without_a_unit(text: str, num_bytes: int) -> None:
    """Reported as StorjOld/dataserv-client#85: a fraction of a unit was a traceback."""
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "5XB", "GB", "-1", "1e99", "nan"])
def test_what_is_no_size_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no size: write it as 5GB, 512MiB or a number of bytes"):
        read_size(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "x"], "--steps is 'x': give a whole number"),
        (["--rate", "x"], "--rate is 'x': give a number"),
        (["--kind", "x"], "--kind is 'x': give one of a, b"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_to_give(words: list[str], message: str) -> None:
    parser = Parser(prog="tool")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--kind", choices=["a", "b"])
    with pytest.raises(UserError, match=message):
        parser.parse_args(words)
