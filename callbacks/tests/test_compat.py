"""The private API of torch and Lightning that the package leans on is as it was."""

import contextlib
import pickle

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.data import DataLoader

from genesis_callbacks._compat import (
    NothingToRestore,
    build_dcp_metadata,
    finish_before_hooks,
    give_methods_back,
    ignore_actions,
    ignore_backward,
    listen_to_actions,
    listen_to_backward,
    loader_generators,
    log_step_values,
    offset_in_file,
    read_fetch_generators,
    read_loader_states,
    route_load_checkpoint,
    shield_validation,
)
from genesis_callbacks.base.local_shards import local_chunks
from genesis_callbacks.base.manifest import ChunkRecord, TensorRecord


def test_a_plain_tensor_is_one_chunk_that_shares_its_memory():
    tensor = torch.nn.Parameter(torch.zeros(2, 3))
    ((offsets, sizes, data),) = local_chunks(tensor)
    assert (offsets, sizes) == ((0, 0), (2, 3))
    data[1, 2] = 5.0
    assert tensor[1, 2] == 5.0


def test_metadata_is_what_dcp_writes():
    shapes = {"model.a": (4, 6), "model.b.c": (), "d": (1 << 40,), "e": (2, 0)}
    records = {
        name: TensorRecord(
            shape,
            "bfloat16" if name == "d" else "float32",
            0,
            [ChunkRecord((n,) * len(shape), shape, f"__{n}_0.distcp", n << 33, 9, 0) for n in range(1 + len(shape))],
        )
        for name, shape in shapes.items()
    }
    tensors, places = {}, {}
    for name, record in records.items():
        chunks = [ChunkStorageMetadata(torch.Size(it.offsets), torch.Size(it.sizes)) for it in record.chunks]
        properties = TensorProperties(record.torch_dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
        for number, it in enumerate(record.chunks):
            places[MetadataIndex(name, it.offsets, number)] = _StorageInfo(it.file, it.byte_offset, it.num_bytes)
    parts = {"model.a": ("model", "a"), "model.b.c": ("model", "b.c"), "d": ("d",), "e": ("e",)}
    expected = Metadata(tensors, parts, places, StorageMeta("step-1"), version=CURRENT_DCP_VERSION)
    found = pickle.loads(build_dcp_metadata(records, "step-1"))
    assert found == expected
    # What a comparison of indices leaves out, and one of tuples does not tell apart.
    assert [index.index for index in found.storage_data] == [index.index for index in places]
    assert all(type(index.offset) is torch.Size for index in found.storage_data)


def make_trainer():
    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)


def test_the_strategys_load_is_routed_and_given_back():
    trainer = make_trainer()
    strategy = trainer.strategy
    method = type(strategy).load_checkpoint
    route_load_checkpoint(strategy, lambda original, path: {"path": path, "original": callable(original)})
    assert strategy.load_checkpoint("x", weights_only=True) == {"path": "x", "original": True}
    give_methods_back(trainer)
    give_methods_back(trainer)
    assert strategy.load_checkpoint.__func__ is method


def test_two_routes_come_off_in_one_go():
    trainer = make_trainer()
    route_load_checkpoint(trainer.strategy, lambda original, path: original(path))
    route_load_checkpoint(trainer.strategy, lambda original, path: {"path": path})
    assert trainer.strategy.load_checkpoint("x") == {"path": "x"}
    give_methods_back(trainer)
    assert "load_checkpoint" not in vars(trainer.strategy)


def test_nothing_to_restore_passes_lightnings_migration_and_is_false():
    checkpoint, _ = migrate_checkpoint(NothingToRestore({"pytorch-lightning_version": "2.6.0"}))
    assert not checkpoint


def test_a_storages_place_in_its_file_is_where_its_bytes_are(tmp_path):
    torch.save({"a": torch.arange(5.0), "b": torch.full((3,), 7.0)}, tmp_path / "x.ckpt")
    loaded = torch.load(tmp_path / "x.ckpt", map_location="meta", weights_only=True)
    start = offset_in_file(loaded["b"])
    data = (tmp_path / "x.ckpt").read_bytes()[start : start + 12]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [7.0, 7.0, 7.0]


def test_a_validation_is_shielded_and_given_back():
    trainer = make_trainer()
    loop = trainer.fit_loop.epoch_loop.val_loop
    entered = []

    @contextlib.contextmanager
    def shield():
        entered.append(loop)
        yield

    loop.run = lambda: "ran"  # as the loop's own would
    shield_validation(trainer, shield)
    assert loop.run() == "ran"
    assert entered == [loop]
    give_methods_back(trainer)
    give_methods_back(trainer)
    assert loop.run.__func__ is type(loop).run


def test_a_fits_end_is_heard_of_before_the_hooks_and_given_back():
    trainer = make_trainer()
    loop, order = trainer.fit_loop, []
    loop.on_run_end = lambda: order.append("hooks")  # as the loop's own would
    finish_before_hooks(trainer, lambda: order.append("finish"))
    loop.on_run_end()
    assert order == ["finish", "hooks"]
    give_methods_back(trainer)
    give_methods_back(trainer)
    assert loop.on_run_end.__func__ is type(loop).on_run_end


def test_a_trainer_without_loaders_has_no_states_of_loaders():
    trainer = make_trainer()
    assert (read_loader_states(trainer), loader_generators(trainer), read_fetch_generators(trainer)) == ([], [], None)


@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_values_that_are_logged_again_are_what_lightning_logs(tmp_path):
    class Rows(Logger):
        name, version = "rows", 0

        def __init__(self):
            super().__init__()
            self.rows = []

        def log_hyperparams(self, *_):
            pass

        def log_metrics(self, metrics, step):
            self.rows.append((step, {key: value for key, value in metrics.items() if key != "epoch"}))

    class Log(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            step = trainer.global_step
            values = {"a": torch.tensor(step + 0.1, dtype=torch.float64)}
            if step != 2:
                values["b"] = torch.tensor(2**24 + step, dtype=torch.float64)
            log_step_values(pl_module, values)

    rows = Rows()
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    trainer = Trainer(max_steps=3, accelerator="cpu", callbacks=[Log()], logger=rows, log_every_n_steps=1, **options)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 4)))
    assert [row["a"] for _, row in rows.rows] == [1.1, 2.1, 3.1]
    assert [rows.rows[index][1]["b"] for index in (0, 2)] == [2**24 + 1, 2**24 + 3]
    assert trainer.callback_metrics["a"] == 3.1


@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_profiler_names_the_actions_of_a_step_and_gets_its_methods_back(tmp_path):
    class Model(BoringModel):
        pass

    actions, others, ends, backwards = [], [], [], []

    @contextlib.contextmanager
    def within():
        backwards.append("backward")
        yield

    class Listen(Callback):
        def on_train_start(self, trainer, pl_module):
            listen_to_actions(trainer, others.append, ends.append)
            listen_to_actions(trainer, actions.append, lambda name: actions.append(f"end {name}"))
            listen_to_backward(trainer.strategy, within)

        def on_train_end(self, trainer, pl_module):
            ignore_actions(trainer, others.append)
            assert "start" in vars(trainer.profiler)
            ignore_actions(trainer, actions.append)
            ignore_backward(trainer.strategy)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    profiler = SimpleProfiler()
    trainer = Trainer(max_steps=1, accelerator="cpu", callbacks=[Listen()], profiler=profiler, **options)
    trainer.fit(Model(), DataLoader(RandomDataset(32, 4)))
    wanted = [
        "[_TrainingEpochLoop].train_dataloader_next",
        "[Strategy]SingleDeviceStrategy.batch_to_device",
        "[LightningModule]Model.optimizer_step",
        "[Strategy]SingleDeviceStrategy.training_step",
    ]
    assert [name for name in actions if name in wanted] == wanted
    assert {f"end {name}" for name in wanted} <= set(actions)
    assert set(wanted) <= set(others) & set(ends)
    assert backwards == ["backward"]
    assert {*wanted} <= profiler.recorded_durations.keys()
    assert not {"start", "stop"} & vars(profiler).keys()
    assert "backward" not in vars(trainer.strategy)
