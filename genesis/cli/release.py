"""`genesis release`."""

from itertools import permutations
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from genesis.arguments import Parser
from genesis.checkpoint_reference import find_export
from genesis.errors import UserError
from genesis.release.folder import Folder
from genesis.release.leaks import Machine
from genesis.release.options import ReleaseOptions
from genesis.release.release import plan_release
from genesis.release.space import plan_space
from genesis.release.upload import check_can_upload, upload

_DESCRIPTION = """Makes a folder for the Hugging Face Hub of an export: the files that were proved, a card with licence,
lineage, evaluation and proof, and SHA256SUMS. Nothing of this machine may be in it: paths, names and credentials are
refused by file and line. --space makes a second folder, which serves the model as a Space. --upload takes them to the
Hub, in one commit with a tag. A folder that is there already is taken if it is what would be made.
Example: genesis release exports/demo releases/demo --repo me/demo --license apache-2.0 --language en --dry-run"""


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
    machine = Machine.read(export, *filter(None, (out, space)))
    allowed = (options.owner, *arguments.allow)
    if arguments.torch is not None and space is None:
        raise UserError("--torch is about a Space: give --space, too, or leave it away")
    release = plan_release(export, options)
    made: list[tuple[Path, Folder, Literal["model", "space"]]] = [(out, release, "model")]
    if space is not None:
        made.append((space, plan_space(release, options, arguments.torch), "space"))
    for path, folder, _ in made:
        folder.check(machine, allowed)
        folder.check_place(path)
    _check_apart(export, *(path for path, _, _ in made))
    for path, folder, _ in made:
        folder.write(path)
    for path, folder, repo_type in made:
        sizes = folder.sizes()
        print(
            f"{path}: {repo_type} {options.repo}, tag {options.tag}, {len(sizes)} files, {decimal(sum(sizes.values()))}"
        )
        if arguments.dry_run:
            print("\n".join(f"  {size:>15,}  {name}" for name, size in sizes.items()))
    if is_upload:
        check_can_upload(out)
        for path, _, repo_type in made:
            print(f"{path}: {upload(path, options, repo_type, is_private=arguments.private)}")
    elif arguments.dry_run:
        print("nothing was uploaded; --upload does it")
    return 0


def _check_apart(*paths: Path) -> None:
    """Refuses folders that lie in each other: the one would be uploaded with the other."""
    for path, other in permutations(paths, 2):
        if path.resolve().is_relative_to(other.resolve()):
            raise UserError(f"{path} lies in {other}, or is it: give places that are apart")


def _build_parser() -> Parser:
    parser = Parser(prog="genesis release", description=_DESCRIPTION)
    add = parser.add_argument
    add("export", type=Path, help="a directory that `genesis export` wrote")
    add("out", type=Path, help="the folder to make")
    add("--repo", required=True, metavar="OWNER/NAME", help="the repository on the Hub")
    add("--license", required=True, help="as the Hub names it: apache-2.0, mit, cc-by-4.0, ..., other")
    add("--license_file", type=Path, help="its text, which becomes LICENSE")
    add("--version", default="1.0.0", help="the tag is it with a v before it; default 1.0.0")
    add(
        "--language",
        action="append",
        default=[],
        metavar="CODE",
        help="of the model's text: en, de, code, ...; can be repeated",
    )
    add("--space", type=Path, metavar="DIR", help="also make a folder that serves the model as a Space")
    add(
        "--torch",
        metavar="REQUIREMENT",
        help="which build a Space installs, such as 'torch==2.13.0 --index-url ADDRESS' for one without CUDA, which is "
        "many times smaller; default: what pip finds",
    )
    add(
        "--allow",
        action="append",
        default=[],
        metavar="TEXT",
        help="a word or path that may be public; can be repeated",
    )
    add("--upload", action="store_true", help="to the Hub; needs a token (`hf auth login`, or HF_TOKEN)")
    add("--private", action="store_true", help="of a repository that the upload makes")
    add(
        "--dry-run",
        action="store_true",
        help="make the folder, show what would be uploaded, contact nobody",
    )
    return parser
