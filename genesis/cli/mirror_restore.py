"""`genesis mirror restore`: continues a run from its mirror."""

import sys
from pathlib import Path

from genesis.base.arguments import Parser
from genesis.base.errors import UserError, printable
from genesis.base.run_directory import RunDirectory
from genesis.cli.mirror import read_rate
from genesis.data.remote import strip_local
from genesis.data.store import is_url, without_password
from genesis.operations.mirror.mirror import OWNER_NAME
from genesis.operations.mirror.places import open_place
from genesis.operations.mirror.restore import restore_run

_DESCRIPTION = """Copies the newest checkpoint of a mirror that verifies into a run's directory, with the base that it
names; `genesis fit ... --ckpt_path latest` continues from it. The run may be empty, or have older checkpoints; if its
own newest checkpoint is as new, nothing is copied. Checkpoints of the mirror that do not verify are passed over.
Example: genesis mirror restore s3://bucket/runs/demo runs/demo/run"""


def main(argv: list[str]) -> int:
    """Runs `genesis mirror restore` and returns its exit status."""
    parser = Parser(prog="genesis mirror restore", description=_DESCRIPTION)
    add = parser.add_argument
    add("url", help="the mirror: a directory, or a URL such as s3://bucket/prefix")
    add("run", help="the run's directory; it need not exist")
    add("--all", action="store_true", help="restore older checkpoints of the mirror, too")
    add("--or_none", action="store_true", help="end with status 0 if neither the mirror nor the run has a checkpoint")
    add(
        "--bases",
        type=Path,
        metavar="DIR",
        help="directory for the bases of adapters, to share them among runs; default: bases in the run",
    )
    add("--bandwidth", type=read_rate, help="limit in bytes per second, such as 20MB; default: no limit")
    arguments = parser.parse_args(argv)
    if is_url(arguments.run) or (Path(arguments.run) / OWNER_NAME).is_file():
        raise UserError(
            f"{without_password(arguments.run)} is a mirror, not the directory of a run: give the mirror first, then "
            "the run, as in genesis mirror restore MIRROR RUN"
        )
    given = Path(strip_local(arguments.url))
    # A run has its checkpoints where a mirror has them: they would be copied into the mirror.
    if not is_url(arguments.url) and RunDirectory(given).checkpoints.is_dir() and not (given / OWNER_NAME).is_file():
        raise UserError(
            f"{given} is no mirror, because it has no {OWNER_NAME}: give the mirror first, then the run, as in genesis "
            "mirror restore MIRROR RUN"
        )
    place, run = open_place(arguments.url), Path(arguments.run)
    outcome = restore_run(
        place,
        run,
        bases=arguments.bases,
        has_all=arguments.all,
        bytes_per_second=arguments.bandwidth,
        report=_report,
    )
    if outcome.step is None and arguments.or_none:
        print(f"nothing to restore: {place.url} has no checkpoint for {run}")
        return 0
    if outcome.step is None:
        raise UserError(f"{place.url} holds no mirrored checkpoint, and {run} has none")
    if not outcome.restored:
        print(f"nothing to restore: the newest checkpoint of {run} is step {outcome.step}")
    else:
        print(f"{run} continues from step {outcome.step}: genesis fit ... --ckpt_path latest")
    return 0


def _report(line: str) -> None:
    print(f"genesis mirror restore: {printable(line)}", file=sys.stderr, flush=True)
