"""`genesis checkpoint repair`: reports and fixes everything that is broken or left over."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from genesis.cli.checkpoint.shared import BAD, LEVELS, RUN_HELP, build_parser, hold_directory, print_json, without_path
from genesis.generate.checkpoint_reference import find_run
from genesis_callbacks.checkpoint.inventory import (
    Repair,
    apply_repair,
    find_problems,
    plan_repairs,
    read_inventory,
)
from genesis_callbacks.checkpoint.lineage import checkpoints_in

_DESCRIPTION = """Lists everything in a run's checkpoint directory that is broken or left over, with the remedy.
With --apply, and while no run holds the directory, it renames checkpoints that do not verify to quarantined-... and
deletes the leftovers of interrupted saves and deletions. Exit status 1 if a problem remains.
Example: genesis checkpoint repair runs/demo/run --apply"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint repair` and returns its exit status."""
    parser = build_parser("repair", _DESCRIPTION)
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument("--level", choices=LEVELS, default="deep", help="verification level; default deep")
    parser.add_argument("--apply", action="store_true", help="carry out the listed repairs")
    arguments = parser.parse_args(argv)
    directory = checkpoints_in(find_run(arguments.run))
    read_inventory(directory)  # refuses a path without checkpoints, before the lock would create the directory
    with hold_directory(directory, is_needed=arguments.apply):
        entries = read_inventory(directory)
        problems = find_problems(entries, arguments.level)
        repairs = plan_repairs(entries, problems)
        places = [apply_repair(repair) if arguments.apply else repair.path for repair in repairs]
    whole = [path.name for path, problem in problems.items() if problem is None]
    latest = whole[-1] if whole else None
    rows = [
        {**asdict(repair), "path": str(repair.path), "now_at": None if place is None else str(place)}
        for repair, place in zip(repairs, places, strict=True)
    ]
    if arguments.json:
        print_json({"directory": str(directory), "repairs": rows, "is_applied": arguments.apply, "latest": latest})
    else:
        _print_repairs(repairs, places, latest, is_applied=arguments.apply)
    left = [repair for repair in repairs if repair.is_bad and not (arguments.apply and repair.action != "none")]
    return BAD if left or (problems and latest is None) else 0


def _print_repairs(
    repairs: Sequence[Repair], places: Sequence[Path | None], latest: str | None, *, is_applied: bool
) -> None:
    for repair, place in zip(repairs, places, strict=True):
        print(f"{repair.path}\n  what    {without_path(repair.path, repair.reason)}")
        if not is_applied or repair.action == "none":
            print(f"  to do   {repair.advice}")
        else:
            print(f"  done    {'deleted' if place is None else f'quarantined as {place.name}'}")
    if not repairs:
        print("nothing is broken or left over")
    print(f"`--ckpt_path latest` resumes from {latest or 'nothing: no checkpoint verifies'}")
