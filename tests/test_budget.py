"""The budget of lines finds packages that grow without a reason."""

from pathlib import Path

import budget


def write_lines(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n" * number)


def test_every_module_counts_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "genesis/loose.py", 1)
    write_lines(tmp_path / "genesis/model/a.py", 2)
    write_lines(tmp_path / "genesis/model/deep/b.py", 3)
    write_lines(tmp_path / "genesis/operations/__init__.py", 4)
    write_lines(tmp_path / "genesis/operations/plan/c.py", 5)
    write_lines(tmp_path / "callbacks/src/genesis_callbacks/base/d.py", 6)
    assert budget.count_lines(tmp_path) == {
        "genesis": 1,
        "genesis/model": 5,
        "genesis/operations": 4,
        "genesis/operations/plan": 5,
        "callbacks/src/genesis_callbacks/base": 6,
    }


def test_a_package_over_its_budget_or_far_below_it_is_named() -> None:
    lines = {"genesis/model": 1001, "genesis/data": 50}
    assert budget.read_table(budget.format_table(lines)) == {"genesis/model": 1050, "genesis/data": 50}
    assert budget.find_faults(lines, budget.read_table(budget.format_table(lines))) == []
    lines["genesis/model"] = 1000
    assert budget.find_faults(lines, {"genesis/model": 1200, "genesis/data": 50}) == []
    assert budget.find_faults(lines, {"genesis/model": 999, "genesis/gone": 7}) == [
        "genesis/data has 50 lines, its budget is 0: delete, or raise it and say why",
        "genesis/gone has 0 lines, its budget is 7: lower it",
        "genesis/model has 1000 lines, its budget is 999: delete, or raise it and say why",
    ]
    assert budget.find_faults({"genesis/model": 1000}, {"genesis/model": 1201}) == [
        "genesis/model has 1000 lines, its budget is 1201: lower it"
    ]
