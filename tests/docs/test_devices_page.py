"""The table of what runs on which device: a GPU is named by a record of a run on it, and by nothing else."""

import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/reference/devices.md"
RECORDS = REPOSITORY / "benchmarks/records"
NOT_RUN = ("no", "not used")
WITHOUT_GPU = ("cpu", "simulated")


def read_gpu_cells(page: str) -> dict[str, str]:
    """Returns the last cell of each row of the table, by its first."""
    lines = page.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| part |") and line.endswith("GPU |"))
    cells = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        first, *_, last = (cell.strip() for cell in line.strip("|").split("|"))
        cells[first] = last
    return cells


def find_fault(cell: str, records: Path) -> str | None:
    """Returns why a cell of the GPU column is not honest, None if it is."""
    if cell in NOT_RUN:
        return None
    link = re.search(r"\(\.\./records/([\w.-]+)\.md\)", cell)
    if link is None:
        return "names no record"
    path = records / f"{link[1]}.json"
    if not path.exists() or not path.with_suffix(".md").exists():
        return f"names {link[1]}, which does not exist"
    record = json.loads(path.read_text(encoding="utf-8"))
    device = record.get("device") or record.get("workload", {}).get("device")
    return f"names {link[1]}, which is of the device {device}" if device in (None, *WITHOUT_GPU) else None


def test_each_row_that_names_a_gpu_names_its_record() -> None:
    cells = read_gpu_cells(PAGE.read_text(encoding="utf-8"))
    assert len(cells) > 10
    assert {part: fault for part, cell in cells.items() if (fault := find_fault(cell, RECORDS))} == {}


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        ("no", None),
        ("yes", "names no record"),
        ("yes ([H100](../records/session-none.md))", "names session-none, which does not exist"),
        ("yes ([record](../records/own-cpu.md))", "names own-cpu, which is of the device cpu"),
        ("yes, one ([record](../records/own-h100.md))", None),
    ],
)
def test_a_claim_without_a_record_of_a_gpu_is_found(tmp_path: Path, cell: str, fault: str | None) -> None:
    for name, device in (("own-cpu", "cpu"), ("own-h100", "cuda")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": device}))
        (tmp_path / f"{name}.md").touch()
    assert find_fault(cell, tmp_path) == fault
