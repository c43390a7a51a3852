"""`genesis checkpoint verify`: checks whether checkpoints, of genesis or in other formats, are complete."""

from pathlib import Path
from typing import Any

from rich.filesize import decimal

import genesis_callbacks.checkpoint as engine  # its names that need torch import it when they are used
from genesis.base.errors import UserError, numbered, printable
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.cli.checkpoint.shared import BAD, LEVELS, build_parser, find_problems_shown, print_json, without_path
from genesis.generate.checkpoint_reference import read_reference
from genesis_callbacks.checkpoint import CheckpointError
from genesis_callbacks.checkpoint.inventory import find_problem, read_inventory

_MAX_NAMED = 3
_FORMATS = {
    "torch": "a file of torch.save",
    "dcp": "a directory of torch's distributed checkpoint",
    "safetensors": "safetensors",
}
_DESCRIPTION = """Verifies one checkpoint, or all of a run: quick compares counts, names and sizes, full also the
hash of every file, deep also the digest of every tensor. --finite also looks for values that are not finite. For a
checkpoint in another format (a .ckpt, .pt or .pth file, a safetensors file or directory, a DCP directory) it lists the
content and reports whether the file is empty or truncated, without running code. Exit status 1 if one does not verify.
Example: genesis checkpoint verify runs/demo/run --level deep"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint verify` and returns its exit status."""
    parser = build_parser("verify", _DESCRIPTION)
    parser.add_argument(
        "path", type=Path, help="a run (all of its checkpoints), RUN/best, RUN/STEP, or a checkpoint of any format"
    )
    parser.add_argument("--level", choices=LEVELS, default="full", help="verification level; default full")
    parser.add_argument("--finite", action="store_true", help="read every value and report values that are not finite")
    arguments = parser.parse_args(argv)
    is_run = RunDirectory(arguments.path).checkpoints.is_dir()
    if not is_run and arguments.path.exists() and engine.find_format(arguments.path) not in (None, "genesis"):
        return _verify_foreign(arguments.path, is_finite_asked=arguments.finite, as_json=arguments.json)
    reference = read_reference(arguments.path)
    if reference.kind == "run" and reference.selector is None:
        problems = find_problems_shown(read_inventory(reference.path), arguments.level)
        if not problems:
            raise UserError(f"{reference.path} has no committed checkpoint; `genesis fit` writes them")
    else:
        checkpoint = reference.find_checkpoint(level=None)
        with stage(f"verifying {checkpoint.name}", unit="bytes") as shown:
            problems = {checkpoint: find_problem(checkpoint, arguments.level, shown.advance)}
    outcomes = {path: None if problem is None else str(problem) for path, problem in problems.items()}
    if arguments.finite:
        outcomes = {
            path: problem or _describe_non_finite(engine.read_contents(path)) for path, problem in outcomes.items()
        }
    bad = [problem for problem in outcomes.values() if problem is not None]
    if arguments.json:
        content = [
            {"path": str(path), "is_verified": problem is None, "problem": problem}
            for path, problem in outcomes.items()
        ]
        print_json({"level": arguments.level, "checkpoints": content})
    else:
        verified = f"verified ({arguments.level}{', finite' if arguments.finite else ''})"
        for path, problem in outcomes.items():
            print(f"{path}: {verified}" if problem is None else f"{path}: BAD: {without_path(path, problem)}")
    return BAD if bad else 0


def _verify_foreign(path: Path, *, is_finite_asked: bool, as_json: bool) -> int:
    """Prints the content of a checkpoint in another format and returns the exit status."""
    contents: "engine.Contents | None" = None
    problem: str | None = None
    try:
        contents = engine.read_contents(path)
        found = list(contents.problems) if contents.model else [*contents.problems, "contains no tensor of a model"]
        problem = printable("; ".join(found)) or (_describe_non_finite(contents) if is_finite_asked else None)
    except CheckpointError as error:
        problem = str(error)
    if as_json:
        facts = {} if contents is None else _describe_contents(contents)
        print_json({"checkpoints": [{"path": str(path), "is_verified": problem is None, "problem": problem, **facts}]})
    else:
        print(f"{path}: {'looks complete' if problem is None else f'BAD: {problem}'}")
        if contents is not None:
            _print_contents(contents, is_finite=is_finite_asked and problem is None)
    return BAD if problem is not None else 0


def _describe_non_finite(contents: "engine.Contents") -> str | None:
    """Returns a line about the tensors with values that are not finite, or None; reads all tensors."""
    found = engine.find_non_finite(contents)
    if not found:
        return None
    some = printable(
        ", ".join(f"{name} ({numbered(count, 'values')})" for name, count in list(found.items())[:_MAX_NAMED])
    )
    return f"values that are not finite in {numbered(len(found), 'tensors')}, such as {some}"


def _describe_contents(contents: "engine.Contents") -> dict[str, Any]:
    optimizers = [
        {
            "optimizer": index,
            "num_parameters": len(parameters),
            "num_tensors": sum(map(len, parameters.values())),
            "num_bytes": sum(tensor.num_bytes for state in parameters.values() for tensor in state.values()),
        }
        for index, parameters in contents.optimizers.items()
    ]
    return {
        "format": contents.format,
        "step": contents.step,
        "num_bytes": contents.num_bytes,
        "model": {
            "num_tensors": len(contents.model),
            "num_bytes": sum(tensor.num_bytes for tensor in contents.model.values()),
        },
        "optimizers": [optimizer for optimizer in optimizers if optimizer["num_tensors"]],
    }


def _print_contents(contents: "engine.Contents", *, is_finite: bool) -> None:
    facts = _describe_contents(contents)
    at_step = "" if contents.step is None else f", step {contents.step:,}"
    print(f"  format     {_FORMATS[contents.format]}, {decimal(contents.num_bytes)}{at_step}")
    model = facts["model"]
    print(f"  model      {numbered(model['num_tensors'], 'tensors')}, {decimal(model['num_bytes'])}")
    for row in facts["optimizers"]:
        print(
            f"  optimizer  number {row['optimizer']}: {numbered(row['num_tensors'], 'tensors')} for "
            f"{numbered(row['num_parameters'], 'parameters')}, {decimal(row['num_bytes'])}"
        )
    if not facts["optimizers"]:
        print("  optimizer  no state, only weights")
    if is_finite:
        print("  finite     all values of these tensors")
    print("  not shown  whether the bytes are those that were saved: this format has no digests to compare with")
