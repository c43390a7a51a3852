"""What becomes of each causal type of transformers, beside the record of it."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.model.foreign.every_type import KINDS, try_type

RECORD: Final = Path("benchmarks/records/foreign-types.md")


def read_record() -> dict[str, str]:
    """Returns the first word of the outcome of each type."""
    rows = re.findall(r"^\| (\w+)[^|]* \| \d+ \| ([^|]+) \|$", RECORD.read_text(), re.MULTILINE)
    return {kind: outcome for outcome, kinds in rows for kind in kinds.split(", ")}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_type_is_imported_and_trained_or_refused_as_recorded(tmp_path: Path, kind: str) -> None:
    recorded = read_record()[kind]
    if recorded != "not":  # of sizes that are invalid
        assert try_type(kind, tmp_path).partition(":")[0] == recorded


def test_the_record_has_every_type_of_transformers() -> None:
    assert read_record().keys() >= set(KINDS)
