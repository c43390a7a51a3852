"""`genesis release`."""

from itertools import permutations
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from genesis.base.arguments import Parser
from genesis.base.errors import UserError, numbered
from genesis.generate.checkpoint_reference import find_export
from genesis.operations.release.folder import Folder
from genesis.operations.release.leaks import Machine
from genesis.operations.release.options import ReleaseOptions
from genesis.operations.release.release import plan_release
from genesis.operations.release.space import plan_space
from genesis.operations.release.upload import check_can_upload, upload

_DESCRIPTION = """Makes a folder for the Hugging Face Hub from an export: its proved files, a card with licence,
lineage, evaluation and proof, and SHA256SUMS. Paths, names and credentials of this machine in the folder are refused
with file and line. --space makes a second folder, which serves the model as a Space. --upload sends the folders to the
Hub, each in one commit with a tag. An existing folder is accepted if its content is the same.
Example: genesis release exports/demo releases/demo --repo me/demo --license apache-2.0 --language en --dry_run"""


def main(argv: list[str]) -> int:
    """Runs `genesis release` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    options = ReleaseOptions(
        repo=arguments.repo,
        license=arguments.license,
        version=arguments.version,
        languages=tuple(arguments.language),
        license_file=arguments.license_file,
    )
    export, out, space = find_export(arguments.export), arguments.out, arguments.space
    is_upload = arguments.upload and not arguments.dry_run
    _check_apart(export, *filter(None, (out, space)))
    machine = Machine.read(export, *filter(None, (out, space)))
    allowed = (options.owner, *arguments.allow)
    if arguments.torch is not None and space is None:
        raise UserError("--torch needs --space: give --space, too, or remove --torch")
    release = plan_release(export, options)
    made: list[tuple[Path, Folder, Literal["model", "space"]]] = [(out, release, "model")]
    if space is not None:
        made.append((space, plan_space(release, options, arguments.torch), "space"))
    for path, folder, _ in made:
        folder.check(machine, allowed)
        folder.check_place(path)
    for path, folder, _ in made:
        folder.write(path)
    for path, folder, repo_type in made:
        sizes = folder.sizes()
        size = f"{numbered(len(sizes), 'files')}, {decimal(sum(sizes.values()))}"
        print(f"{path}: {repo_type} {options.repo}, tag {options.tag}, {size}")
        if arguments.dry_run:
            print("\n".join(f"  {size:>15,}  {name}" for name, size in sizes.items()))
    if is_upload:
        check_can_upload(out)
        for path, _, repo_type in made:
            print(f"{path}: {upload(path, options, repo_type, is_private=arguments.private)}")
    elif arguments.dry_run:
        print("nothing was uploaded; upload with --upload")
    return 0


def _check_apart(*paths: Path) -> None:
    """Refuses folders that contain each other, because one would be uploaded with the other."""
    for path, other in permutations(paths, 2):
        if path.resolve().is_relative_to(other.resolve()):
            raise UserError(f"{path} is equal to or inside {other}: give directories that do not contain each other")


def _build_parser() -> Parser:
    parser = Parser(prog="genesis release", description=_DESCRIPTION)
    add = parser.add_argument
    add("export", type=Path, help="a directory that `genesis export` wrote")
    add("out", type=Path, help="the folder to make")
    add("--repo", required=True, metavar="OWNER/NAME", help="the repository on the Hub")
    add("--license", required=True, help="the licence's id on the Hub: apache-2.0, mit, cc-by-4.0, ..., other")
    add("--license_file", type=Path, help="a file with the licence's text, copied as LICENSE")
    add("--version", default="1.0.0", help="the version, tagged as v followed by it; default 1.0.0")
    add(
        "--language",
        action="append",
        default=[],
        metavar="CODE",
        help="a language of the model's text: en, de, code, ...; repeatable",
    )
    add("--space", type=Path, metavar="DIR", help="also make a folder that serves the model as a Space")
    add(
        "--torch",
        metavar="REQUIREMENT",
        help="the torch build that a Space installs, such as 'torch==2.13.0 --index-url ADDRESS' for the much smaller "
        "build without CUDA; default: the build that pip finds",
    )
    add(
        "--allow",
        action="append",
        default=[],
        metavar="TEXT",
        help="a word or path of this machine that may be public; repeatable",
    )
    add("--upload", action="store_true", help="upload to the Hub; needs a token (`hf auth login`, or HF_TOKEN)")
    add("--private", action="store_true", help="make new repositories on the Hub private")
    add(
        "--dry_run",
        action="store_true",
        help="make the folder and list the files to upload, without any network access",
    )
    return parser
