"""The console of commands prints names as they are."""

import io

from rich.table import Table

from genesis.base.console import Console


def test_a_name_between_colons_is_no_picture() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    console.print("runs/a:dog:b")
    table = Table("run")
    table.add_row("c:cat:d")
    console.print(table)
    assert "runs/a:dog:b" in stream.getvalue()
    assert "c:cat:d" in stream.getvalue()
