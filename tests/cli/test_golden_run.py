"""A run that version 0.1.0 saved goes on with the losses and weights that it had there.

`golden/run-schema-2` holds a checkpoint that the code of that version wrote after five steps of `recipe.yaml` on
`golden/corpus-schema-2`, and what the same code gave when it went on from there to step ten. It is never written again,
because it stands for what people have on their disks.

Sums of float32 differ in their last bits from one kind of CPU to another. So on the kind of CPU that wrote the golden
run, losses and digests are compared bit for bit, and elsewhere losses to a tolerance.
"""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis_callbacks.base.manifest import MANIFEST_NAME
from genesis_callbacks.checkpoint import read_manifest, verify
from tests.commands import run_genesis
from tests.golden.files import GOLDEN

FOLDER = GOLDEN / "run-schema-2"
SAVED, LAST = "step-00000005", "step-00000010"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_bytes())
LOSSES = ("train/loss", "validation/loss")
TOLERANCE = 1e-5


def describe_cpu() -> dict[str, str]:
    """Returns what decides the order in which torch adds float32 numbers."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(reversed([[word.strip() for word in line.partition(":")[::2]] for line in lines if ":" in line]))
    names = ("vendor_id", "cpu family", "model", "stepping")
    return {name: fields.get(name, "") for name in names} | {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def read_losses(run_dir: Path) -> dict[str, dict[str, float]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    trained = (row for row in rows if row["train/loss"])  # the step that was restored is validated alone
    return {row["step"]: {name: float(row[name]) for name in LOSSES if row[name]} for row in trained}


def read_digests(checkpoint: Path) -> dict[str, str]:
    tensors = json.loads((checkpoint / MANIFEST_NAME).read_bytes())["tensors"]
    return {name: tensors[name]["digest"] for name in tensors if name.startswith(("model.", "optimizer."))}


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the golden run, after this version has gone on with it to its end."""
    directory = tmp_path_factory.mktemp("golden")
    shutil.copytree(FOLDER / SAVED, directory / "run/checkpoints" / SAVED)
    shutil.copytree(GOLDEN / "corpus-schema-2/corpus", directory / "corpus")
    # The first weights of the run are not drawn here, they come from the checkpoint.
    done = run_genesis(
        "fit", "--config", FOLDER / "recipe.yaml", "--ckpt_path", "latest",
        cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Restored step 5" in done.stderr
    return directory / "run"


def test_a_checkpoint_of_the_version_before_verifies_to_its_last_digest() -> None:
    manifest = verify(FOLDER / SAVED, "deep")
    assert (manifest.step, manifest.schema_version, manifest.world_size) == (5, 2, 1)


def test_a_run_of_the_version_before_goes_on_with_its_losses_and_clocks(continued: Path) -> None:
    losses = read_losses(continued)
    assert losses.keys() == EXPECTED["losses"].keys()
    for step, expected in EXPECTED["losses"].items():
        assert losses[step] == pytest.approx(expected, rel=0, abs=TOLERANCE), f"step {step}"
    assert read_manifest(continued / "checkpoints" / LAST).counters == EXPECTED["counters"]


def test_on_the_same_kind_of_cpu_it_ends_with_the_same_bits(continued: Path) -> None:
    if describe_cpu() != EXPECTED["cpu"]:
        pytest.skip(f"the golden run was made on another kind of CPU or torch: {EXPECTED['cpu']}")
    assert read_losses(continued) == EXPECTED["losses"]
    assert read_digests(continued / "checkpoints" / LAST) == EXPECTED["digests"]
