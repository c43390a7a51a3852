"""Each checkpoint is compared with the live run: stubs, cut files, lost shards, planted code, values not finite."""

import csv
import json
import os
import pickle
import re
import shutil
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from plain_project import PlainModel, build_strategy
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification
from genesis_callbacks.checkpoint import CheckpointError, CorruptCheckpointError, read_manifest
from genesis_callbacks.checkpoint.contents import find_format, find_non_finite, read_contents
from genesis_callbacks.checkpoint.expect import build_expectation, find_problems, merge_expectations, name_buffers
from genesis_callbacks.checkpoint_verification import BadCheckpointError, BadCheckpointWarning
from genesis_callbacks.testing import run_ranks

NUM_TENSORS = 8
NUM_PARAMETERS = 7


# ---- a project, and what goes wrong in it


class StubModel(PlainModel):
    """Its hook empties what Lightning is about to save: the loss is as healthy as ever."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {}


class ForgetfulModel(PlainModel):
    def on_save_checkpoint(self, checkpoint):
        for state in checkpoint["optimizer_states"]:
            state["state"] = {}


class HalfForgetfulModel(PlainModel):
    def on_save_checkpoint(self, checkpoint):
        saved = checkpoint["optimizer_states"][0]
        saved["state"] = {
            number: {key: value for key, value in state.items() if key != "exp_avg_sq"}
            for number, state in saved["state"].items()
        }


class OneRanksPartModel(PlainModel):
    """Saves of a spread optimizer what the first rank holds."""

    def on_save_checkpoint(self, checkpoint):
        (optimizer,) = self.trainer.optimizers
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for saved in checkpoint["optimizer_states"]:
            saved["state"] = {
                number: state
                for number, state in saved.get("state", {}).items()
                if parameters[number] in optimizer.optim.state
            }


class HalfPrecisionModel(PlainModel):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {name: value.bfloat16() for name, value in checkpoint["state_dict"].items()}


class PathModel(PlainModel):
    """Has a hyperparameter with which Lightning, by default, cannot go on from its own checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["hyper_parameters"] = {"where": Path("somewhere")}


class FrozenPartModel(PlainModel):
    """Leaves a part out on purpose."""

    def __init__(self, **options):
        super().__init__(**options)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("teacher.")]:
            del checkpoint["state_dict"][name]


class DivergedModel(PlainModel):
    """Has an infinite mask from the start, and weights that are no numbers from the second step on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 1:
            with torch.no_grad():
                self.net.body[0].weight[2, 3] = torch.nan


class VetoedModel(PlainModel):
    """Its first updates are vetoed, so that the optimizer has no state for a while."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step < 3:
            for parameter in self.parameters():
                parameter.grad = None


class WritesNothing(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        pass


class LoseShard(Checkpoint):
    """Another process cleans up too much."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and trainer.is_global_zero:
            (shard,) = Path(trainer.default_root_dir).rglob("__1_0.distcp")
            shard.unlink()


class Exporter(Checkpoint):
    """Writes weights as others do, whole or cut."""

    def __init__(self, directory: Path, cut_at_step: int | None = None) -> None:
        self.directory, self.cut_at_step = directory, cut_at_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            path = self.directory / f"model-{trainer.global_step}.safetensors"
            weights = {name: value.bfloat16() for name, value in pl_module.net.named_parameters()}
            save_file({**weights, "num_windows": pl_module.net.num_windows}, path)
            if trainer.global_step == self.cut_at_step:
                os.truncate(path, path.stat().st_size - 10)


def fit(
    root,
    strategy,
    savers,
    model_type=PlainModel,
    *,
    max_steps=6,
    ckpt_path=None,
    plugins=None,
    logger=False,
    **options,
):
    """Returns, as this rank sees it, how a fit ended and what the verification says."""
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    verification = CheckpointVerification(**options)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=build_strategy(strategy, world_size),
        max_steps=max_steps,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*savers, verification],
        default_root_dir=root,
        plugins=plugins,
    )
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model_type(has_zero=strategy == "zero"), DataLoader(range(100)), ckpt_path=ckpt_path)
        except BadCheckpointError as raised:
            error = str(raised)
    return {
        "error": error,
        "step": trainer.global_step,
        "verified": verification.num_verified,
        "bad": verification.num_bad,
        "problems": verification.last_problems,
        "last_verified": verification.last_verified,
        "warnings": [str(one.message) for one in caught if one.category is BadCheckpointWarning],
    }


def fit_stock(root, strategy, model_type, trainer_options, options, verification_options):
    saver = ModelCheckpoint(dirpath=root, **{"every_n_train_steps": 2, "save_top_k": -1, **options})
    return fit(root, strategy, [saver], model_type, **trainer_options, **verification_options)


def run_stock(root, strategy="one", model_type=PlainModel, *, world_size=1, trainer=None, verification=None, **options):
    arguments = (root, strategy, model_type, trainer or {}, options, verification or {})
    return run_ranks(fit_stock, world_size, *arguments)


def fit_ours(root, strategy, model_type, options, verification_options, extra):
    options = {"every_n_steps": 2, "keep_last": None, "mode": "sync", **options}
    saver = AsyncProcessCheckpoint(run_dir=root, **options)
    return fit(root, strategy, [saver], model_type, **verification_options, **extra)


def run_ours(root, strategy="one", model_type=PlainModel, *, world_size=1, verification=None, extra=None, **options):
    return run_ranks(fit_ours, world_size, root, strategy, model_type, options, verification or {}, extra or {})


# ---- good ones pass


@pytest.mark.parametrize(
    "mode", ["thread", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "process"))]
)
def test_our_checkpoints_pass(tmp_path, mode):
    (result,) = run_ours(tmp_path, mode=mode, verification={"finite": True})
    assert (result["error"], result["step"], result["verified"]) == (None, 6, 3)
    assert result["last_verified"] == tmp_path / "checkpoints/step-00000006"


def test_our_checkpoints_of_weights_alone_pass(tmp_path):
    (result,) = run_ours(tmp_path, save_optimizer=False)
    assert (result["error"], result["verified"]) == (None, 3)
    assert read_contents(tmp_path / "checkpoints/step-00000006").optimizers == {}


@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero"))]
)
def test_our_checkpoints_of_two_ranks_pass(tmp_path, strategy):
    results = run_ours(tmp_path, strategy, world_size=2, verification={"finite": True})
    assert [result["error"] for result in results] == [None, None]
    assert results[0]["verified"] == 3


@pytest.mark.parametrize(
    ("strategy", "world_size", "options"),
    [
        ("one", 1, {}),
        ("one", 1, {"save_weights_only": True}),
        ("fsdp2", 2, {}),
        pytest.param("ddp", 2, {}, marks=pytest.mark.slow),
        pytest.param("zero", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_lightnings_own_checkpoints_pass(tmp_path, strategy, world_size, options):
    results = run_stock(tmp_path, strategy, world_size=world_size, verification={"finite": True}, **options)
    assert [result["error"] for result in results] == [None] * world_size
    assert results[0]["verified"] == 3


def test_what_is_overwritten_is_verified_again_and_a_link_is_not(tmp_path):
    verification = {"poll_seconds": 1e-9}
    (copied,) = run_stock(tmp_path / "copy", save_last=True, verification=verification)
    assert (copied["error"], copied["verified"]) == (None, 6)
    (linked,) = run_stock(tmp_path / "link", save_last="link", verification=verification)
    assert (linked["error"], linked["verified"]) == (None, 3)


def fit_with_writer_thread(root):
    saver = ModelCheckpoint(dirpath=root, every_n_train_steps=2, save_top_k=-1)
    return fit(root, "one", [saver], plugins=AsyncCheckpointIO())


def test_a_file_that_a_thread_writes_later_is_waited_for(tmp_path):
    (result,) = run_ranks(fit_with_writer_thread, 1, tmp_path)
    assert (result["error"], result["verified"]) == (None, 3)


@pytest.mark.parametrize("mode", ["thread", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_save_before_the_first_update_has_no_optimizer_state_and_passes(tmp_path, mode):
    (result,) = run_ours(tmp_path, "one", VetoedModel, mode=mode, every_n_steps=1)
    assert (result["error"], result["bad"], result["verified"]) == (None, 0, 6)
    first = read_manifest(tmp_path / "checkpoints/step-00000001")
    assert not any(name.startswith("optimizer.") for name in first.tensors)


def test_what_was_there_before_training_is_not_looked_at(tmp_path):
    run_stock(tmp_path, "one", StubModel, trainer={"max_steps": 2}, verification={"on_bad": "warn"})
    (stub,) = tmp_path.glob("*.ckpt")
    (other,) = run_ours(tmp_path / "run", verification={"directory": tmp_path})
    assert (other["error"], other["verified"]) == (None, 3)
    shutil.move(stub, tmp_path / "came-later.ckpt")
    extra = {"max_steps": 8, "ckpt_path": "latest"}
    (resumed,) = run_ours(tmp_path / "run", extra=extra)
    assert (resumed["error"], resumed["verified"]) == (None, 1)


def fit_with_exports(root, cut_at_step, options):
    directory = root / "exports"
    directory.mkdir(parents=True)
    saver = Exporter(directory, cut_at_step)
    return fit(root, "one", [saver], max_steps=3, directory=directory, **options)


def test_exports_of_other_code_pass_in_half_precision_and_without_the_outer_name(tmp_path):
    options = {"poll_seconds": 0.05, "finite": True}
    (result,) = run_ranks(fit_with_exports, 1, tmp_path, None, options)
    assert (result["error"], result["verified"]) == (None, 3)


# ---- bad ones end the run, or warn


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("one", 1), ("fsdp2", 2), pytest.param("ddp", 2, marks=pytest.mark.slow)]
)
def test_a_stub_ends_the_run_on_every_rank_after_the_first_save(tmp_path, strategy, world_size):
    results = run_stock(tmp_path, strategy, StubModel, world_size=world_size, trainer={"max_steps": 50})
    for result in results:
        assert f"holds 0 of {NUM_TENSORS} model tensors (" in result["error"]
        assert "KB where at least 2.1 KB are expected); missing: net.embed.weight, " in result["error"]
        assert "checkpoint of step 2 at" in result["error"]
        assert 2 <= result["step"] <= 3
    assert len({result["error"] for result in results}) == 1
    assert results[0]["bad"] == 1


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_our_own_engine_is_not_trusted_either(tmp_path, world_size):
    strategy = "ddp" if world_size == 2 else "one"
    results = run_ours(tmp_path, strategy, StubModel, world_size=world_size, extra={"max_steps": 50})
    for result in results:
        assert f"holds 0 of {NUM_TENSORS} model tensors" in result["error"]
        assert 2 <= result["step"] <= 3


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_last_save_is_verified_before_fit_returns(tmp_path, world_size):
    strategy = "ddp" if world_size == 2 else "one"
    results = run_stock(tmp_path, strategy, StubModel, world_size=world_size, trainer={"max_steps": 2})
    assert all(f"holds 0 of {NUM_TENSORS} model tensors" in result["error"] for result in results)


def test_warn_goes_on_and_counts(tmp_path):
    (result,) = run_stock(tmp_path, "one", StubModel, verification={"on_bad": "warn"})
    assert (result["error"], result["step"], result["bad"], result["verified"]) == (None, 6, 3, 0)
    assert len(result["warnings"]) == 3
    assert result["warnings"][2].endswith("(3 bad so far)")


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        (ForgetfulModel, f"holds the state of optimizer 0 for 0 of {NUM_PARAMETERS} parameters"),
        (HalfForgetfulModel, f"lacks {NUM_PARAMETERS} tensors of optimizer 0: net.embed.weight's exp_avg_sq"),
        (HalfPrecisionModel, "net.embed.weight (bfloat16 [11, 6], live float32 [11, 6])"),
        (FrozenPartModel, "missing: teacher.weight, teacher.bias"),
        (PathModel, "holds a pathlib.PosixPath, which is not plain data, and was not loaded"),
    ],
)
def test_a_checkpoint_that_lacks_or_changes_something_is_named(tmp_path, model_type, words):
    (result,) = run_stock(tmp_path, "one", model_type)
    assert words in result["error"]


def test_one_ranks_part_of_an_optimizer_does_not_pass_for_the_whole(tmp_path):
    results = run_stock(tmp_path, "zero", OneRanksPartModel, world_size=2)
    for result in results:
        found = re.search(r"holds the state of optimizer 0 for (\d) of 7 parameters", result["error"])
        assert found is not None
        assert 0 < int(found[1]) < NUM_PARAMETERS


def test_what_is_left_out_on_purpose_can_be_ignored(tmp_path):
    (result,) = run_stock(tmp_path, "one", FrozenPartModel, verification={"ignore": ["teacher.*"]})
    assert (result["error"], result["verified"]) == (None, 3)


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_weights_that_are_no_numbers_are_found_beside_training(tmp_path, world_size):
    strategy = "ddp" if world_size == 2 else "one"
    options = {"every_n_train_steps": 1, "trainer": {"max_steps": 30}}
    quick = run_stock(tmp_path / "quick", strategy, DivergedModel, world_size=world_size, **options)
    assert [result["error"] for result in quick] == [None] * world_size
    full = run_stock(
        tmp_path / "full", strategy, DivergedModel, world_size=world_size, verification={"finite": True}, **options
    )
    for result in full:
        assert "values that are not finite in " in result["error"]
        assert "mask" not in result["error"]
    # The checkpoint of the first step is good: all its values are numbers, and a mask may be infinite.
    assert full[0]["verified"] == 1


class CountReads(Callback):
    """Counts what this process opens and lists under a directory, by step."""

    def __init__(self, root: Path) -> None:
        self.root, self.step, self.reads = str(root), 0, Counter()
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(self.root):
            self.reads[self.step] += 1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.step = trainer.global_step


def fit_and_count_reads(root):
    reads = CountReads(root)
    saver = ModelCheckpoint(dirpath=root, every_n_train_steps=4, save_top_k=-1)
    result = fit(root, "one", [saver, reads], max_steps=7, poll_seconds=1e6, directory=root)
    return result["verified"], reads.reads


def test_the_disk_is_left_alone_while_nothing_is_saved(tmp_path):
    ((verified, reads),) = run_ranks(fit_and_count_reads, 1, tmp_path)
    assert verified == 1
    assert [reads[step] for step in (1, 2, 5)] == [0, 0, 0]
    assert reads[4] > 0


def fit_with_log(root):
    logger = CSVLogger(root, name="log", version=0)
    saver = ModelCheckpoint(dirpath=root, every_n_train_steps=2, save_top_k=-1)
    fit(root, "one", [saver], logger=logger)
    return (root / "log/version_0/metrics.csv").read_text(encoding="utf-8")


def test_each_verdict_is_logged_at_its_step(tmp_path):
    (text,) = run_ranks(fit_with_log, 1, tmp_path)
    rows = [row for row in csv.DictReader(text.splitlines()) if row["checkpoint/verified"]]
    assert [(row["step"], row["checkpoint/verified"], row["checkpoint/bad"]) for row in rows] == [
        ("2", "1.0", "0.0"),
        ("4", "2.0", "0.0"),
        ("6", "3.0", "0.0"),
    ]
    assert all(0.0 < float(row["checkpoint/verify_seconds"]) < 60.0 for row in rows)


def fit_without_savers(root):
    with pytest.warns(UserWarning, match="CheckpointVerification has nothing to watch"):
        Trainer(
            accelerator="cpu",
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[CheckpointVerification()],
        ).fit(PlainModel(), DataLoader(range(100)))


def test_a_verification_that_has_nothing_to_watch_says_so(tmp_path):
    run_ranks(fit_without_savers, 1, tmp_path)


def fit_without_files(root):
    saver = ModelCheckpoint(dirpath=root, every_n_train_steps=2)
    return fit(root, "one", [saver], plugins=WritesNothing())


def test_a_save_that_wrote_nothing_is_bad(tmp_path):
    (result,) = run_ranks(fit_without_files, 1, tmp_path)
    assert "was reported as saved but does not exist" in result["error"]


def fit_and_lose_a_shard(root):
    saver = ModelCheckpoint(dirpath=root, every_n_train_steps=2, save_top_k=-1)
    return fit(root, "fsdp2", [saver, LoseShard()], max_steps=50)


def test_a_lost_shard_ends_the_run_on_both_ranks(tmp_path):
    for result in run_ranks(fit_and_lose_a_shard, 2, tmp_path):
        assert "__1_0.distcp is missing, with parts of " in result["error"]
        assert 2 <= result["step"] <= 3


def test_an_export_that_is_cut_is_found_before_fit_returns(tmp_path):
    (result,) = run_ranks(fit_with_exports, 1, tmp_path, 2, {"poll_seconds": 0.05})
    assert "model-2.safetensors is truncated: it has" in result["error"]


def fit_under_fsdp1(root):
    with pytest.raises(CheckpointError, match="FSDP1"):
        CheckpointVerification().setup(_TrainerOf(FSDPStrategy.__new__(FSDPStrategy)), None, "fit")


class _TrainerOf:
    def __init__(self, strategy):
        self.strategy = strategy


def test_a_strategy_that_hides_its_parameters_is_refused_by_name(tmp_path):
    fit_under_fsdp1(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad": "stop"}, "on_bad must be 'raise' or 'warn', not 'stop'"),
        ({"directory_holds": "some"}, "directory_holds must be 'all' or 'weights', not 'some'"),
        ({"poll_seconds": 0.0}, "poll_seconds must be positive, not 0.0"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointVerification(**options)


# ---- what is read


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_planted_code_is_named_and_does_not_run(tmp_path):
    marker = tmp_path / "it-ran"
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": Payload(marker)}, path)
    with pytest.raises(CheckpointError, match=r"holds a posix\.mkdir, which is not plain data"):
        read_contents(path)
    directory = tmp_path / "dcp"
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(CheckpointError, match=r"holds a posix\.mkdir, which is not one of DCP's own records"):
        read_contents(directory)
    assert not marker.exists()
    pickle.loads((directory / ".metadata").read_bytes())
    assert marker.exists()


@pytest.mark.parametrize("name", ["builtins.getattr", "torch.load", "torch.Tensor", "collections.Counter"])
def test_no_name_but_dcps_own_is_unpickled(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(CheckpointError, match=f"holds a {name}"):
        read_contents(tmp_path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A directory that Lightning's ModelParallelStrategy wrote on two ranks."""
    root = tmp_path_factory.mktemp("sharded")
    run_stock(root, "fsdp2", world_size=2, trainer={"max_steps": 2})
    (path,) = root.glob("*.ckpt")
    return path


def test_a_sharded_directory_is_read_by_its_names(sharded):
    contents = read_contents(sharded)
    assert (contents.format, contents.step, contents.problems) == ("dcp", 2, ())
    assert contents.model["net.embed.weight"].shape == (11, 6)
    assert set(contents.optimizers[0]["net.embed.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert find_non_finite(contents) == {}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: os.truncate(path / "__0_0.distcp", 1000), "__0_0.distcp has 1,000 bytes where at least"),
    ],
)
def test_a_damaged_shard_is_named(sharded, tmp_path, damage, problem):
    path = Path(shutil.copytree(sharded, tmp_path / "copy"))
    damage(path)
    (found,) = read_contents(path).problems
    assert problem in found


def test_a_tensor_of_which_a_block_is_missing_is_named(sharded, tmp_path):
    path = Path(shutil.copytree(sharded, tmp_path / "copy"))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    name = "state_dict.net.embed.weight"
    del metadata.state_dict_metadata[name].chunks[1]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_contents(path).problems == (f"{name}: 36 of its 66 elements are there",)
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != name}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_contents(path).problems[1] == f"{name}: 0 of its 1 block were written"


def test_a_file_outside_of_the_directory_is_never_read(sharded, tmp_path):
    path = Path(shutil.copytree(sharded, tmp_path / "copy"))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    (problem,) = read_contents(path).problems
    assert f"{path / '.metadata'} lists '../secret', which leads upwards" in problem


def test_a_value_that_is_no_number_is_found_in_a_shard(sharded, tmp_path):
    path = Path(shutil.copytree(sharded, tmp_path / "copy"))
    contents = read_contents(path)
    name = "net.body.0.weight"
    weight = torch.zeros(7, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is used to ranks
        dcp.load({"state_dict": {name: weight}}, checkpoint_id=path)
    bad = weight.clone()
    bad[1, 1], bad[2, 2] = torch.inf, torch.nan
    shard = path / "__0_0.distcp"
    data = shard.read_bytes()
    assert data.count(weight[:3].numpy().tobytes()) == 1
    shard.write_bytes(data.replace(weight[:3].numpy().tobytes(), bad[:3].numpy().tobytes()))
    assert find_non_finite(contents) == {name: 2}
    assert find_non_finite(contents, may_be_infinite={name}) == {name: 1}


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 100])
def test_a_damaged_file_of_torch_save_is_corrupt(tmp_path, damage):
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": {"a": torch.ones(1000)}}, path)
    assert read_contents(path).model["a"].shape == (1000,)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptCheckpointError, match=r"model\.ckpt is"):
        read_contents(path)


def test_views_and_odd_dtypes_are_read_where_they_lie(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    base[3, 5] = torch.nan
    tensors = {
        "whole": base,
        "first_rows": base[:2],
        "transposed": base.t()[2:],
        "half": torch.tensor([1.0, torch.inf]).bfloat16(),
        "eighth": torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 1j, complex(torch.nan, 0)]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(torch.nan),
        "numbers": torch.arange(3),
    }
    torch.save(tensors, tmp_path / "model.pt")
    contents = read_contents(tmp_path / "model.pt")
    assert {name: tensor.shape for name, tensor in contents.model.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    expected = {"whole": 1, "transposed": 1, "half": 1, "eighth": 1, "complex": 1, "scalar": 1}
    assert find_non_finite(contents) == expected


def write_safetensors(directory: Path) -> Path:
    directory.mkdir()
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2)}, directory / "model-1.safetensors")
    save_file({"c": torch.ones(5, dtype=torch.bfloat16)}, directory / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def test_a_directory_of_safetensors_is_read_by_its_headers(tmp_path):
    contents = read_contents(write_safetensors(tmp_path / "export"))
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in contents.model.items()}
    assert shapes == {"a": ((3, 4), torch.float32), "b": ((2,), torch.float32), "c": ((5,), torch.bfloat16)}
    assert contents.problems == ()
    assert find_non_finite(contents) == {}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / "model-2.safetensors").unlink(), "model-2.safetensors is missing, with 1 tensor"),
        (lambda path: os.truncate(path / "model-1.safetensors", 120), "model-1.safetensors is truncated"),
        (lambda path: os.truncate(path / "model-1.safetensors", 5), "model-1.safetensors is truncated, or is no"),
        (
            lambda path: save_file({"a": torch.ones(3, 4)}, path / "model-1.safetensors"),
            "model-1.safetensors lacks 1 tensor that the index lists, such as b",
        ),
    ],
)
def test_a_damaged_directory_of_safetensors_is_named(tmp_path, damage, problem):
    path = write_safetensors(tmp_path / "export")
    damage(path)
    assert any(problem in found for found in read_contents(path).problems)


def test_formats_are_told_apart_by_names(tmp_path, sharded):
    for name in ("notes", "a.ckpt.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.csv").write_text("step")
    assert find_format(sharded) == "dcp"
    assert [find_format(tmp_path / name) for name in ("notes", "a.ckpt.d", "metrics.csv", "nothing")] == [None] * 4
    with pytest.raises(CheckpointError, match="is not a checkpoint of a known format"):
        read_contents(tmp_path / "notes")


# ---- what is due


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def contents_of(tmp_path: Path, content: dict) -> object:
    torch.save(content, tmp_path / "model.ckpt")
    return read_contents(tmp_path / "model.ckpt")


@pytest.mark.parametrize("left_out", [None, "embed.weight", "head.weight"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_tied_tensors_and_outer_names_do_not_matter(tmp_path, left_out, prefix):
    module = Tied()
    state = {prefix + name: value for name, value in module.state_dict().items() if name != left_out}
    contents = contents_of(tmp_path, {"state_dict": state})
    expectation = build_expectation(module, [])
    assert find_problems(expectation, contents) == []
    assert name_buffers(expectation, contents) == {prefix + "mask"}


def test_a_tied_tensor_that_is_saved_under_neither_name_is_missing(tmp_path):
    contents = contents_of(tmp_path, {"state_dict": {"mask": torch.ones(2)}})
    (problem,) = find_problems(build_expectation(Tied(), []), contents)
    assert problem.startswith("holds 1 of 2 model tensors")
    assert problem.endswith("missing: embed.weight")


def test_optimizer_state_is_matched_by_number_and_by_name(tmp_path):
    module = Tied()
    optimizer = stepped(module)
    expectation = build_expectation(module, [optimizer])
    numbered = optimizer.state_dict()
    assert set(numbered["state"]) == {0}
    for parameter in ("embed.weight", "head.weight", 0):
        state = {"state": {parameter: numbered["state"][0]}, "param_groups": []}
        contents = contents_of(tmp_path, {"state_dict": module.state_dict(), "optimizer_states": [state]})
        assert find_problems(expectation, contents) == []
    contents = contents_of(tmp_path, {"state_dict": module.state_dict()})
    (problem,) = find_problems(expectation, contents)
    assert problem == "holds the state of optimizer 0 for 0 of 1 parameter; missing: embed.weight"
    assert find_problems(expectation, contents, has_optimizer=False) == []


def test_what_two_ranks_hold_of_an_optimizer_is_due_together(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = stepped(module)
    parts = []
    for kept in (0, 1):
        part = torch.optim.AdamW(module.parameters())
        for parameter in module[kept].parameters():
            part.state[parameter] = optimizer.state[parameter]
        parts.append(build_expectation(module, [part]))
    assert merge_expectations(parts) == build_expectation(module, [optimizer])
    assert merge_expectations(parts[:1]) != build_expectation(module, [optimizer])
    state = parts[0].optimizers[0].state
    assert set(state) == {"0.weight", "0.bias"}
