"""The site is complete, and its own checks find what they are there for."""

import doctest
import re
from pathlib import Path
from types import ModuleType

import check_site
import code_blocks
import command_pages
import docstring_tables
import pytest

from genesis.cli.table import COMMANDS
from tests.commands import REPOSITORY

BUILT = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("docs")]
PAGES = [*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "README.md", REPOSITORY / "callbacks/README.md"]
REPLACED_WORDS = [
    line.partition("->")[0]
    for line in (REPOSITORY / ".ci/words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
HOUSE_WORDS = re.compile(
    rf"\b({'|'.join(REPLACED_WORDS)}|tells?|told|says?|said|drawn|put aside)\b",  # phrases: ignore
    re.I,
)
GOOD = '<html><body><h1 id="top">A</h1><a href="b/#x">b</a></body></html>'
OTHER = '<html><body><h2 id="x">B</h2></body></html>'
MAX_README_LINES = 120


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "b/index.html").write_text(OTHER)
    return tmp_path


@pytest.mark.parametrize("module", [check_site, code_blocks, command_pages, docstring_tables])
def test_the_examples_of_the_builder_are_right(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_a_site_without_a_problem_passes(small_site: Path) -> None:
    assert check_site.find_problems(small_site) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="c/">c</a>', "links to c/, which does not exist"),
        ('<a href="b/#y">b</a>', "links to b/#y, but that page has no such anchor"),
        ('<a href="#y">b</a>', "links to #y, but that page has no such anchor"),
        ('<img src="missing.png">', "loads missing.png, which does not exist"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js, which is not part"),
        ('<link rel="stylesheet" href="//fonts.example/x">', "loads //fonts.example/x, which is not part"),
        ('<div class="mermaid">', "for which the theme's script loads from another host"),
    ],
)
def test_what_is_wrong_with_a_page_is_named(body: str, problem: str, small_site: Path) -> None:
    (small_site / "index.html").write_text(f"<html><body>{body}</body></html>")
    (found,) = check_site.find_problems(small_site)
    assert problem in found


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.css", "@import url('https://fonts.example/css');", "a.css loads https://fonts.example/css"),
        ("a.css", "a { background: url(//x.example/a.png) }", "a.css loads //x.example/a.png"),
        ("a.js", 'fetch("https://x.example/a")', "a.js names https://x.example"),
    ],
)
def test_what_a_style_sheet_or_a_script_loads_from_elsewhere_is_named(
    name: str, text: str, problem: str, small_site: Path
) -> None:
    (small_site / name).write_text(text)
    (found,) = check_site.find_problems(small_site)
    assert problem in found


def test_a_link_to_another_site_is_left_alone(small_site: Path) -> None:
    (small_site / "index.html").write_text('<a href="https://example.org/#x">x</a>')
    assert check_site.find_problems(small_site) == []


def test_a_help_page_becomes_options_with_their_texts() -> None:
    text = (
        "usage: genesis x [-h] [--a A] run\n\nDoes *this*.\nExample: genesis x\n\npositional arguments:\n"
        "  run         a run\n\noptions:\n  -h, --help  show it\n  --a A       the first `word`,\n"
        "              and <more>\n  --with_a_long_name N\n              below\n"
    )
    usage, about, sections = command_pages.parse_help(text)
    assert usage == "usage: genesis x [-h] [--a A] run"
    assert about == ["Does *this*. Example: genesis x"]
    assert [(section.title, section.options) for section in sections] == [
        ("positional arguments", [("run", ["a run"])]),
        (
            "options",
            [
                ("-h, --help", ["show it"]),
                ("--a A", ["the first `word`,", "and <more>"]),
                ("--with_a_long_name N", ["below"]),
            ],
        ),
    ]
    assert command_pages.escape("a *b* `c_d` <e>") == r"a \*b\* `c_d` \<e\>"


def test_a_table_of_a_docstring_is_read_with_its_further_lines() -> None:
    table = "    logged      unit and meaning\n    a/loss      nats,\n                a mean\n    a/b         n\n"
    docstring = f"Logs.\n\n{table}\nMore."
    assert docstring_tables.read_table(docstring, "logged") == [
        ["logged", "unit and meaning"],
        ["a/loss", "nats, a mean"],
        ["a/b", "n"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPOSITORY)) for page in PAGES])
def test_a_page_is_written_in_the_words_of_the_field(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert HOUSE_WORDS.findall(prose) == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPOSITORY)) for page in PAGES])
def test_a_command_on_a_page_exists(page: Path) -> None:
    names = {command.name for command in COMMANDS}
    words = r"`?\bgenesis ((?:tokenizer|data|model|checkpoint) [a-z-]+|fit|validate|generate|serve|export|import)\b"
    for name in re.findall(rf"(?:^|`){words}", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert name in names


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_what_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 5
    assert [link for link in links if "://" not in link and not (REPOSITORY / link).exists()] == []


class TestBuilt:
    pytestmark = BUILT

    def test_the_site_is_built_without_a_warning_and_checked(self, site: Path) -> None:
        assert check_site.find_problems(site) == []

    def test_every_command_has_a_page_with_its_options(self, site: Path) -> None:
        for command in COMMANDS:
            page = site / "reference/commands" / command.name.replace(" ", "-") / "index.html"
            assert "--help" in page.read_text(encoding="utf-8")
        fit = (site / "reference/commands/fit/index.html").read_text(encoding="utf-8")
        assert "--checkpoint.every_n_steps" in fit
        assert "--trainer.max_steps" in fit

    def test_every_public_callback_is_on_the_page_of_the_reference(self, site: Path) -> None:
        names = docstring_tables.read_all_names(REPOSITORY, "genesis_callbacks")
        page = check_site.read_page((site / "reference/api/genesis_callbacks/index.html").read_text(encoding="utf-8"))
        assert len(names) >= 5
        assert set(names.values()) <= page.ids
