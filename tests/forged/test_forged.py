"""No forged input ends a command in more than a line, takes much, hangs, writes elsewhere or runs code."""

import json
from pathlib import Path

import pytest

from tests.commands import PROOF_MODULES, run_module

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = "key twice|: half|unparsable|no length"
"""Cases that are refused before a proof starts."""
EVERY = "6"
KINDS = ("import", "template", "manifest", "data")


def attack(directory: Path, *words: str) -> None:
    done = run_module("tests.forged", directory, *words, cwd=REPOSITORY, preloaded=PROOF_MODULES)
    failed = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert (done.returncode, failed) == (0, []), done.stderr[-3000:]


@pytest.mark.early
@pytest.mark.process
def test_some_forged_inputs_of_each_kind_end_in_one_line(tmp_path: Path) -> None:
    attack(tmp_path, "0", *KINDS, "--only", QUICK, "--every", EVERY)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [*KINDS, "family", "request"])
def test_every_forged_input_ends_in_one_line(kind: str, tmp_path: Path) -> None:
    """The result of the last run is in benchmarks/records/forged-inputs.md."""
    attack(tmp_path, "0", kind)
