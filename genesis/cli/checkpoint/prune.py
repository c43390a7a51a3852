"""`genesis checkpoint prune`: removes older checkpoints of a run."""

from pathlib import Path

from rich.filesize import decimal

from genesis.base.arguments import read_count
from genesis.base.errors import numbered
from genesis.cli.checkpoint.shared import BAD, RUN_HELP, build_parser, hold_directory, print_json
from genesis.generate.checkpoint_reference import find_run
from genesis_callbacks.checkpoint import Retention, list_committed
from genesis_callbacks.checkpoint.best import read_marked_names
from genesis_callbacks.checkpoint.inventory import newest_whole, read_inventory
from genesis_callbacks.checkpoint.lineage import checkpoints_in
from genesis_callbacks.checkpoint.retain import (
    CommittedCheckpoint,
    apply_retention,
    name_bases,
    plan_removals,
)

_DESCRIPTION = """Removes older checkpoints of a run, as the run's own retention does. The newest checkpoint that
verifies is always kept. Refused while the run trains, and where a newer one cannot be verified because its base
is away or a file cannot be read. Exit status 1 if a newer one is damaged, or none verifies.
Example: genesis checkpoint prune runs/demo/run --keep_last 2 --keep_every_n_steps 400 --dry_run"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint prune` and returns its exit status."""
    parser = build_parser("prune", _DESCRIPTION)
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument("--keep_last", type=read_count, required=True, help="number of newest checkpoints to keep")
    parser.add_argument("--keep_every_n_steps", type=read_count, help="also keep checkpoints at multiples of this step")
    parser.add_argument("--dry_run", action="store_true", help="list the checkpoints to remove, but remove nothing")
    arguments = parser.parse_args(argv)
    retention = Retention(arguments.keep_last, arguments.keep_every_n_steps)
    directory = checkpoints_in(find_run(arguments.run))
    read_inventory(directory)  # refuses a path without checkpoints, before the lock would create the directory
    with hold_directory(directory, is_needed=not arguments.dry_run):
        entries = {entry.path.name: entry for entry in read_inventory(directory) if entry.state == "committed"}
        newest, bad = newest_whole(list(entries.values()))
        committed = list_committed(directory)
        kept = [CommittedCheckpoint(path.name, manifest.step, manifest.sequence) for path, manifest in committed]
        newest_name = None if newest is None else newest.path.name
        removals = plan_removals(
            kept, newest_name, retention, marked=read_marked_names(directory), bases=name_bases(directory)
        )
        if newest_name is not None and not arguments.dry_run:
            removals = apply_retention(directory, newest_name, retention)
    num_bytes = sum(entries[name].num_bytes for name in removals)
    if arguments.json:
        print_json(
            {
                "directory": str(directory),
                "newest_verified": newest_name,
                "removed": removals,
                "kept": [name for name in entries if name not in removals],
                "bad": [entry.path.name for entry in bad],
                "num_bytes": num_bytes,
                "is_dry_run": arguments.dry_run,
            }
        )
    else:
        for name in removals:
            print(f"{name}: {'would be removed' if arguments.dry_run else 'removed'}")
        print(
            f"{len(removals):,} of {numbered(len(entries), 'checkpoints')}, {decimal(num_bytes)}; newest verified: "
            f"{newest_name}"
        )
        for entry in bad:
            print(f"{entry.path.name} does not verify: see `genesis checkpoint repair {arguments.run}`")
    return BAD if bad or (newest is None and entries) else 0
