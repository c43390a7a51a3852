"""Checkpoints of every schema that was ever released are read, restored and gone on from; newer ones are refused.

`golden/schema-N/` holds a checkpoint that the code of that schema wrote, and `expected.json`: what the live tensors
were at that step, and the losses of the steps after it in the run that went on. It is written once and never again,
because it stands for what people have on their disks. From schema 3 on, it leaves tensors to the base in
`golden/schema-N/base`; schema 4, which checkpoints of many chunks have, is that of one of few there:

    GENESIS_UPDATE_GOLDEN=1 ../.venv/bin/python -m pytest tests/test_schemas.py -k current
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from plain_project import full, run_training

from genesis_callbacks import SaveScope
from genesis_callbacks.base import manifest
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.base.manifest import COMMITTED_NAME, MANIFEST_NAME, SCHEMA_VERSION, read_manifest
from genesis_callbacks.checkpoint import CheckpointError, CorruptCheckpointError, find_latest, read_tensors, verify
from genesis_callbacks.checkpoint.digest import digest_tensor

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = sorted(path.name for path in GOLDEN.glob("schema-*"))
STEP = 4
LAST_STEP = 8
RANKS = 2
STEP_NAME = f"step-{STEP:08d}"
BASE = "base"
IN_BASE = ("model.net.embed.weight", "model.net.body.0.*")
FROZEN = ("net.embed", "net.body.0")
OPTIONS = {"identity": {"tokenizer_hash": "one"}, "recipe": {"model": {"dim": 6}}}


def describe_tensor(tensor: torch.Tensor) -> dict[str, object]:
    """Returns what a tensor is, by nothing of the engine."""
    data = full(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": sha256}


class DescribeState(Callback):
    """Writes down what the model and its optimizer hold after `STEP`, from the live tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step != STEP:
            return
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        tensors = {f"model.{name}": parameter for parameter, name in names.items()}
        tensors |= {f"model.{name}": buffer for name, buffer in pl_module.named_buffers()}
        for parameter, state in trainer.optimizers[0].state.items():
            tensors |= {f"optimizer.0.{names[parameter]}.{key}": value for key, value in state.items()}
        described = {name: describe_tensor(tensor) for name, tensor in sorted(tensors.items())}
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(described), encoding="utf-8")


def global_losses(runs) -> list[float]:
    return torch.tensor([run["losses"] for run in runs], dtype=torch.float64).mean(dim=0).tolist()


class NeedsNewestSchema(Callback):
    """Makes every checkpoint need the newest schema."""

    def setup(self, trainer, pl_module, stage) -> None:
        manifest.MAX_LISTED_CHUNKS = 0


def write_golden(directory: Path, scratch: Path) -> None:
    """Trains under FSDP2 with a checkpoint on the way, and keeps that and its base with what is expected of it."""
    live = scratch / "live.json"
    run_training(RANKS, scratch / "first", "fsdp2", 2, **OPTIONS)
    base = shutil.copytree(find_latest(scratch / "first"), scratch / "checkpoints" / BASE / "step-00000002")
    runs = run_training(
        RANKS, scratch, "fsdp2", LAST_STEP, every_n_steps=STEP, save_at_end=False, keep_every_n_steps=STEP,
        callbacks=(NeedsNewestSchema(), DescribeState(live)), scope=SaveScope(base, IN_BASE), frozen=FROZEN,
        ckpt_path=str(base), restore="weights", **OPTIONS,
    )  # fmt: skip
    expected = {
        "counters": {"step": STEP, "tokens_seen": 40 * STEP},
        "losses_after": global_losses(runs)[STEP:],
        "tensors": json.loads(live.read_text(encoding="utf-8")),
        "world_size": RANKS,
    }
    for name in (STEP_NAME, BASE):
        shutil.copytree(scratch / "checkpoints" / name, directory / name)
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (directory / "expected.json").write_text(text, encoding="utf-8")


def read_expected(schema: str) -> dict:
    return json.loads((GOLDEN / schema / "expected.json").read_bytes())


def has_base(schema: str) -> bool:
    return (GOLDEN / schema / BASE).exists()


def copy_run(schema: str, run_dir: Path) -> Path:
    """Copies the golden checkpoint, and its base, into a run's directory and returns its path there."""
    if has_base(schema):
        shutil.copytree(GOLDEN / schema / BASE, run_dir / "checkpoints" / BASE)
    return shutil.copytree(GOLDEN / schema / STEP_NAME, run_dir / "checkpoints" / STEP_NAME)


def test_the_current_schema_has_a_golden_checkpoint():
    directory = GOLDEN / f"schema-{SCHEMA_VERSION}"
    if os.environ.get("GENESIS_UPDATE_GOLDEN") == "1" and not directory.exists():
        with tempfile.TemporaryDirectory(prefix="run-") as scratch:  # whose path stands in the manifest
            write_golden(directory, Path(scratch))
    assert (directory / STEP_NAME / COMMITTED_NAME).exists(), f"{directory} is missing; CONTRIBUTING.md says how"
    assert read_manifest(directory / STEP_NAME).schema_version == SCHEMA_VERSION


def test_no_schema_was_forgotten():
    assert sorted(f"schema-{number}" for number in range(1, SCHEMA_VERSION + 1)) == SCHEMAS


@pytest.mark.parametrize("schema", SCHEMAS)
def test_golden_checkpoint_holds_what_was_live_when_it_was_written(schema):
    expected, path = read_expected(schema), GOLDEN / schema / STEP_NAME
    verified = verify(path, "deep")
    assert (verified.step, verified.counters, verified.world_size) == (STEP, expected["counters"], RANKS)
    tensors = read_tensors(path)
    assert len(expected["tensors"]) >= 20
    assert {name for name in tensors if not name.startswith("state.")} == expected["tensors"].keys()
    for name, description in expected["tensors"].items():
        assert describe_tensor(tensors[name]) == description, name
        assert digest_tensor(tensors[name]) == verified.tensors[name].digest, name


LOAD_BY_TORCH = """
import hashlib, json, sys, torch, torch.distributed.checkpoint as dcp
metadata = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
found = {name: torch.ones(entry.size).to(entry.properties.dtype) for name, entry in metadata.items()}
dcp.load(found, checkpoint_id=sys.argv[1], no_dist=True)
assert not any(name.startswith("genesis") for name in sys.modules)
of_bytes = {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for name, tensor in found.items()}
print(json.dumps({name: hashlib.sha256(data.tobytes()).hexdigest() for name, data in of_bytes.items()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_plain_torch_loads_every_tensor_of_a_golden_checkpoint(schema):
    """By DCP, in a process that imports nothing of ours. Tensors in a base are in the base's own directory."""
    path = GOLDEN / schema / STEP_NAME
    command = [sys.executable, "-W", "ignore", "-c", LOAD_BY_TORCH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=path)
    found = json.loads(done.stdout)
    verified = read_manifest(path)
    own = verified.tensors.keys() - (() if verified.base is None else verified.base.names)
    assert found.keys() == own
    expected = read_tensors(path, sorted(own))
    assert found == {name: describe_tensor(tensor)["sha256"] for name, tensor in expected.items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_run_goes_on_from_a_golden_checkpoint(tmp_path, schema, world_size):
    path = copy_run(schema, tmp_path)
    strategy = "fsdp2" if world_size > 1 else "single"
    frozen = FROZEN if has_base(schema) else ()
    runs = run_training(world_size, tmp_path, strategy, LAST_STEP, ckpt_path="latest", frozen=frozen, **OPTIONS)
    assert global_losses(runs) == pytest.approx(read_expected(schema)["losses_after"], rel=0, abs=1e-5)
    assert read_manifest(find_latest(tmp_path)).previous.name == path.name
    assert verify(path, "deep").schema_version == int(schema.removeprefix("schema-"))


@pytest.fixture
def newer(tmp_path):
    """A run whose newest checkpoint is as a later version would have committed it."""
    path = copy_run(f"schema-{SCHEMA_VERSION}", tmp_path)
    later = shutil.copytree(path, path.with_name(f"step-{STEP + 1:08d}"))
    content = json.loads((later / MANIFEST_NAME).read_bytes())
    content |= {"schema_version": SCHEMA_VERSION + 1, "sequence": content["sequence"] + 1, "a_later_field": []}
    data = json.dumps(content).encode()
    (later / MANIFEST_NAME).write_bytes(data)
    (later / COMMITTED_NAME).write_text(f"blake3:{hash_bytes(data, 'blake3')}", encoding="ascii")
    return later


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_newer_schema_is_refused_by_name_and_stays_where_it_is(newer):
    directory, before = newer.parent, contents(newer.parent)
    message = rf"schema {SCHEMA_VERSION + 1}, this version reads up to {SCHEMA_VERSION}: upgrade genesis-callbacks"
    for read in (verify, read_manifest, read_tensors):
        with pytest.raises(CheckpointError, match=message):
            read(newer)
    with pytest.raises(CheckpointError, match=message) as refusal:
        find_latest(directory)
    assert not isinstance(refusal.value, CorruptCheckpointError)
    assert contents(directory) == before


def test_a_run_does_not_go_on_past_a_newer_schema(newer):
    directory, before = newer.parent, contents(newer.parent)
    with pytest.raises(AssertionError, match="upgrade genesis-callbacks"):
        run_training(1, directory.parent, "single", LAST_STEP, ckpt_path="latest", **OPTIONS)
    assert {name: data for name, data in contents(directory).items() if name != ".lock"} == before
