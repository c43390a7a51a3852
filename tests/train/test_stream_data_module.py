"""A stream under a real Trainer: exact positions, the end of the data, ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.sources import SourceOptions
from genesis.data.stream.options import StreamOptions
from genesis.data.window import AccumulationWindow
from genesis.model.decoder import DecoderConfig
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.testing import run_ranks
from tests.data.stream.streams import (
    GLOBAL_BATCH,
    SEQ_LEN,
    count_pairs,
    expected_pairs,
    make_texts,
    make_tokenizer,
    rows_of,
    write_files,
)
from tests.data.stream.test_pool import is_alive

TEXTS = {"web": make_texts(50, seed=1), "code": make_texts(30, seed=2)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the model file of a real tokenizer of 320 ids."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    for name, texts in TEXTS.items():
        write_files(directory / name, texts, ".jsonl")
    return directory


class Recorder(pl.LightningModule):
    """Trains one number; remembers the rows that it saw, in plain types, so that they cross processes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[tuple[int, list[Any]]] = []

    def training_step(self, window: AccumulationWindow, batch_idx: int) -> Tensor:
        self.trained.append((window.data_position, rows_of(window)))
        return self.weight * 0.0

    def validation_step(self, window: AccumulationWindow, batch_idx: int) -> None:
        raise AssertionError("there is no validation set")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_module(directory: Path, tokenizer: Path, num_workers: int = 0, **changes: Any) -> CorpusDataModule:
    options = StreamOptions(
        sources=tuple(SourceOptions(name, (str(directory / name),)) for name in TEXTS),
        tokenizer=str(tokenizer),
        block_tokens=100,
        num_workers=num_workers,
    )
    arguments = {"seq_len": SEQ_LEN, "micro_batch_size": 2, "global_batch_size": GLOBAL_BATCH, "stream": options}
    return CorpusDataModule(**arguments | changes)  # type: ignore[arg-type]


def trainer(folder: Path, max_steps: int, **changes: Any) -> pl.Trainer:
    arguments: dict[str, Any] = {
        "max_steps": max_steps,
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 50,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**arguments | changes)


def fit(folder: Path, data: CorpusDataModule, max_steps: int, ckpt: Path | None = None, **changes: Any) -> Recorder:
    module = Recorder()
    trainer(folder, max_steps, **changes).fit(module, data, ckpt_path=ckpt)
    return module


class SaveEveryStep(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def test_a_resume_at_every_step_goes_on_with_the_next_window(directory: Path, tokenizer: Path, tmp_path: Path) -> None:
    straight = fit(
        tmp_path, data_module(directory, tokenizer, prefetch_windows=3), 9, callbacks=[SaveEveryStep(tmp_path)]
    )
    assert [position for position, _ in straight.trained] == [GLOBAL_BATCH * step for step in range(1, 10)]
    for step in range(1, 9):
        resumed = fit(tmp_path, data_module(directory, tokenizer), 9, tmp_path / f"step={step}.ckpt")
        assert resumed.trained == straight.trained[step:], f"resumed after step {step}"


def test_a_trainer_that_fits_twice_goes_on_and_leaves_no_worker(
    directory: Path, tokenizer: Path, tmp_path: Path
) -> None:
    straight = fit(tmp_path, data_module(directory, tokenizer), 6)
    data, module = data_module(directory, tokenizer, num_workers=2), Recorder()
    workers: list[int] = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            workers.extend(data.training.windows._supply.process_ids)

    running = trainer(tmp_path, 3, callbacks=[Watch()])
    running.fit(module, data)
    running.fit_loop.epoch_loop.max_steps = 6
    running.fit(module, data)
    assert module.trained == straight.trained
    assert len(set(workers)) == 4
    assert not any(map(is_alive, workers))


def test_a_failed_step_leaves_no_worker(directory: Path, tokenizer: Path, tmp_path: Path) -> None:
    data = data_module(directory, tokenizer, num_workers=1)
    workers: list[int] = []

    class Fail(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            workers.extend(data.training.windows._supply.process_ids)
            raise RuntimeError("as the test wants it")

    with pytest.raises(RuntimeError, match="as the test wants it"):
        fit(tmp_path, data, 3, callbacks=[Fail()])
    assert len(workers) == 1
    assert not any(map(is_alive, workers))


def small_module(vocab_size: int = 320) -> GenesisModule:
    return GenesisModule(
        DecoderConfig(
            vocab_size=vocab_size, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, max_seq_len=SEQ_LEN
        )
    )


class Remember(Callback):
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.metrics: dict[str, float] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, _: int
    ) -> None:
        self.rows.extend(rows_of(batch))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics = {key: float(value) for key, value in trainer.logged_metrics.items()}


def test_a_run_of_one_epoch_sees_every_token_once_and_ends_by_itself(
    directory: Path, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, remember = data_module(directory, tokenizer, max_epochs={"web": 1, "code": 1}), Remember()
    running = trainer(tmp_path, 1_000, callbacks=[remember], inference_mode=False)
    with caplog.at_level("INFO"):
        running.fit(small_module(), data)
    assert running.global_step < 1_000
    assert f"training ends at position {data.training.cursor.position}" in caplog.text
    assert count_pairs(remember.rows) == expected_pairs(data.training.stream.tokenizer, TEXTS["web"] + TEXTS["code"])
    assert remember.metrics["data/epochs_web"] == remember.metrics["data/epochs_code"] == 1.0
    assert remember.metrics["data/bad_documents_web"] == 0.0
    again = data_module(directory, tokenizer, max_epochs={"web": 1, "code": 1})
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert again.training.has_ended


def _run_rank(directory: Path, tokenizer: Path, folder: Path, world_size: int, max_steps: int) -> list[Any]:
    checkpoint = AsyncProcessCheckpoint(run_dir=folder, mode="sync", every_n_steps=2)
    data, module = data_module(directory, tokenizer, num_workers=1, micro_batch_size=1), Recorder()
    running = trainer(
        folder,
        max_steps,
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        callbacks=[checkpoint],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    running.fit(module, data, ckpt_path=checkpoint.latest())
    return module.trained


@pytest.mark.slow
def test_two_ranks_then_four_then_one_go_on_from_real_checkpoints_with_the_same_global_batches(
    directory: Path, tokenizer: Path, tmp_path: Path
) -> None:
    straight = fit(tmp_path / "straight", data_module(directory, tokenizer, num_workers=1), 6).trained
    run: Callable[..., Any] = run_ranks
    found = []
    for world_size, max_steps in ((2, 2), (4, 4), (1, 6)):
        ranks = run(
            _run_rank, world_size, directory, tokenizer, tmp_path / "run", world_size, max_steps, timeout_seconds=200
        )
        for windows in zip(*ranks, strict=True):
            assert len({position for position, _ in windows}) == 1
            found.append((windows[0][0], sorted(row for _, rows in windows for row in rows)))
    assert found == [(position, sorted(rows)) for position, rows in straight]


def test_a_changed_mix_holds_from_the_restored_position_on(directory: Path, tokenizer: Path) -> None:
    data = data_module(directory, tokenizer)
    for window in [data.training.windows.window(step * GLOBAL_BATCH) for step in range(4)]:
        data.training.advance(window)
    changed = data_module(directory, tokenizer, mix={"web": 2, "code": 5})
    changed.setup("fit")  # a fit makes the windows before it restores
    changed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    for step in range(4, 12):
        changed.training.advance(changed.training.windows.window(step * GLOBAL_BATCH))
        usage = changed.training.windows.usage(changed.training.cursor.position)
        consumed = dict(
            zip(
                changed.training.cursor.order.names,
                changed.training.cursor.order.sequences_consumed(changed.training.cursor.position),
                strict=True,
            )
        )
        assert {name: entry.num_sequences for name, entry in usage.items()} == consumed
    assert [mix.weights for mix in changed.training.cursor.order.mixes] == [(1, 1), (2, 5)]


def test_a_corpus_beside_the_stream_gives_the_validation_set_and_the_tokenizer(
    directory: Path, tiny_corpus: Path, tokenizer: Path
) -> None:
    options = StreamOptions(sources=(SourceOptions("web", (str(directory / "web"),)),), block_tokens=100, num_workers=0)
    data = data_module(directory, tokenizer, stream=options, corpus=str(tiny_corpus))
    assert len(data.val_dataloader()) > 0
    assert data.training.identity["tokenizer_hash"] == data.training.corpus.manifest.tokenizer_hash
    other = data_module(directory, tokenizer, corpus=str(tiny_corpus))
    with pytest.raises(UserError, match=r"the stream's tokenizer is .*, the tokenizer of .* is .*; use the same"):
        other.setup("fit")
    with pytest.raises(UserError, match=r"the stream has no tokenizer; give data\.stream\.tokenizer"):
        data_module(directory, tokenizer, stream=options).setup("fit")
    with pytest.raises(UserError, match=r"there is nothing to train on; give data\.corpus"):
        data_module(directory, tokenizer, stream=None)


def test_a_checkpoint_of_a_corpus_is_no_checkpoint_of_a_stream(
    directory: Path, tiny_corpus: Path, tokenizer: Path
) -> None:
    corpus = CorpusDataModule(str(tiny_corpus), seq_len=SEQ_LEN, micro_batch_size=2, global_batch_size=GLOBAL_BATCH)
    stream = data_module(directory, tokenizer)
    with pytest.raises(UserError, match="was trained on a corpus, but this run trains on a stream"):
        stream.load_state_dict(corpus.state_dict())
    with pytest.raises(UserError, match="was trained on a stream, but this run trains on a corpus"):
        corpus.load_state_dict(stream.state_dict())


def test_a_vocabulary_larger_than_the_models_is_refused(directory: Path, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the stream's tokenizer has a vocabulary of 320"):
        trainer(tmp_path, 1).fit(small_module(vocab_size=300), data_module(directory, tokenizer))
