"""Reads the code blocks of a page, so that a test can run a tutorial as a reader would.

A block of `bash` or `python` is run; a block with a title is a file of that name, whatever its language. A block of any
other language (`text`, `yaml` without a title) is not run. A comment in the line above a block changes that:
`<!-- prints: TEXT -->` states what running it prints, and `<!-- skip: REASON -->` leaves it out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

LANGUAGES = ("bash", "python")

_FENCE = re.compile(r"^```(?P<language>[\w-]*)(?P<rest>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"<!-- (?P<key>prints|skip): (?P<value>.+?) -->\n\Z")


@dataclass(frozen=True)
class CodeBlock:
    """One block of a page.

    Attributes:
        language: As the fence names it.
        code: Its lines.
        line: Of the fence, counted from 1.
        title: The name of the file that it is, or None.
        prints: What running it prints, or None.
    """

    language: str
    code: str
    line: int
    title: str | None = None
    prints: str | None = None


def read_blocks(text: str) -> Iterator[CodeBlock]:
    """Yields the blocks that are files or are run, in order.

    Example:
        >>> page = '<!-- prints: 2 -->\\n```python\\nprint(1 + 1)\\n```\\n'
        >>> list(read_blocks(page))
        [CodeBlock(language='python', code='print(1 + 1)\\n', line=2, title=None, prints='2')]
    """
    for fence in _FENCE.finditer(text):
        comment = _COMMENT.search(text[: fence.start()])
        if comment is not None and comment["key"] == "skip":
            continue
        title = _TITLE.search(fence["rest"])
        if title is None and fence["language"] not in LANGUAGES:
            continue
        yield CodeBlock(
            language=fence["language"],
            code=fence["code"],
            line=text.count("\n", 0, fence.start()) + 1,
            title=None if title is None else title[1],
            prints=None if comment is None else comment["value"],
        )
