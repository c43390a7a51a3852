import csv
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.corpus import open_corpus
from genesis.data.loader import Ranks, TrainWindows
from genesis.data.packing import Packing
from genesis.data.plans import measure_source, write_plan
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from genesis.train.data_module import CorpusDataModule
from genesis.train.recipe_policy import RECIPE_POLICY
from genesis_callbacks import checkpoint
from genesis_callbacks.checkpoint.drift import find_drift
from genesis_callbacks.testing import run_ranks
from tests.data.corpora import EOS, Documents, make_documents, write_corpus

GLOBAL_BATCH = 4
SEQ_LEN = 12
WEB, CODE = make_documents(40, 6, seed=1), make_documents(12, 6, seed=2)
PACKINGS: tuple[Packing, ...] = ("chunk", "best_fit", "pad")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "".join(
        f"line {number}: the quick brown fox jumps over {number * number} lazy dogs\n" for number in range(200)
    )
    model = train_tokenizer([text], TokenizerOptions(vocab_size=320), tmp_path_factory.mktemp("tokenizer"))
    path = write_corpus(
        tmp_path_factory.mktemp("corpus"),
        {"web": WEB, "code": CODE},
        {"web": make_documents(9, 6, seed=3)},
        weights={"web": 2, "code": 1},
        tokenizer=model.read_bytes(),
    )
    for packing in ("best_fit", "pad"):
        write_plan(open_corpus(path), packing, SEQ_LEN)
    return path


class Recorder(pl.LightningModule):
    """Trains one number; remembers what it saw, in plain types, so that it crosses processes."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.fail_at = fail_at
        self.trained: list[tuple[int, list[Any]]] = []
        self.validated: list[tuple[int, int]] = []

    def training_step(self, window: AccumulationWindow, batch_idx: int) -> Tensor:
        if self.fail_at == window.data_position:
            raise RuntimeError("as the test wants it")
        self.trained.append((window.data_position, [m.input_ids.tolist() for m in window.micro_batches]))
        return self.weight * 0.0

    def validation_step(self, window: AccumulationWindow, batch_idx: int) -> None:
        labels = torch.cat([micro_batch.labels for micro_batch in window.micro_batches])
        self.validated.append((int((labels != IGNORE_INDEX).sum()), window.num_bytes))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_module(corpus: Path, **changes: Any) -> CorpusDataModule:
    arguments = {"seq_len": SEQ_LEN, "micro_batch_size": 1, "global_batch_size": GLOBAL_BATCH} | changes
    return CorpusDataModule(str(corpus), **arguments)


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
        "inference_mode": False,
    }
    return pl.Trainer(**arguments | changes)


def fit(folder: Path, data: CorpusDataModule, max_steps: int, ckpt: Path | None = None, **changes: Any) -> Recorder:
    module = Recorder()
    trainer(folder, max_steps, **changes).fit(module, data, ckpt_path=ckpt)
    return module


class SaveEveryStep(Callback):
    """Saves where most callbacks that save do: before the LightningModule's own `on_train_batch_end`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def test_training_sees_the_windows_of_the_order_across_lightnings_epochs(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus)
    num_steps = 3 * len(data.train_dataloader()) + 2
    module = fit(tmp_path, data, num_steps)
    assert [position for position, _ in module.trained] == [GLOBAL_BATCH * step for step in range(1, num_steps + 1)]
    assert data.training.cursor.position == GLOBAL_BATCH * num_steps
    windows = list(data_module(corpus).train_dataloader())
    expected = [[micro_batch.input_ids.tolist() for micro_batch in window.micro_batches] for window in windows]
    assert [rows for _, rows in module.trained[: len(windows)]] == expected


def test_an_epoch_is_as_many_windows_as_the_corpus_has_and_max_epochs_counts_them(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus)
    num_sequences = sum(data.training.cursor.order.num_sequences)
    module = fit(tmp_path, data, -1, max_epochs=2)
    assert len(module.trained) == 2 * (num_sequences // GLOBAL_BATCH)
    alone = data_module(corpus, mix={"code": 5})
    assert len(alone.train_dataloader()) == alone.training.cursor.order.num_sequences[1] // GLOBAL_BATCH


def test_a_number_of_epochs_sets_the_steps_and_the_end_of_the_schedule(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus, num_epochs=2, max_epochs={"code": 1})
    counts = dict(zip(data.training.cursor.order.names, data.training.cursor.order.num_sequences, strict=True))
    num_sequences = sum((1 if name == "code" else 2) * count for name, count in counts.items())
    num_steps = num_sequences // GLOBAL_BATCH

    class End(Callback):
        """What a schedule finds when it is set up, and when training begins."""

        def __init__(self) -> None:
            self.found: list[int] = []

        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            self.found.append(trainer.max_steps)

        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.found.append(trainer.max_steps)

    end = End()
    callbacks = [end, SaveEveryStep(tmp_path)]
    straight = fit(tmp_path, data, -1, max_epochs=-1, callbacks=callbacks)
    assert len(straight.trained) == num_steps > 4
    assert end.found == [num_steps, num_steps]
    dropped = data.training.usage
    assert sum(dropped[name]["epochs"] * count for name, count in counts.items()) == num_steps * GLOBAL_BATCH
    again, later = data_module(corpus, num_epochs=2, max_epochs={"code": 1}), End()
    resumed = fit(tmp_path, again, -1, tmp_path / "step=4.ckpt", max_epochs=-1, callbacks=[later])
    assert resumed.trained == straight.trained[4:]
    assert later.found == end.found


def test_a_number_of_epochs_that_makes_no_sense_is_refused(corpus: Path, tmp_path: Path) -> None:
    both = r"data.num_epochs 2 \(\d+ steps\) and trainer.max_steps 5 both say how long to train; leave one out"
    with pytest.raises(UserError, match=both):
        fit(tmp_path, data_module(corpus, num_epochs=2), 5)
    with pytest.raises(UserError, match=r"data.num_epochs is 0; it must be at least 1"):
        fit(tmp_path, data_module(corpus, num_epochs=0), -1, max_epochs=-1)
    with pytest.raises(
        UserError,
        match=r"data.num_epochs 1 gives fewer sequences than data.global_batch_size 4000; lower it, or raise data.num",
    ):
        fit(tmp_path, data_module(corpus, num_epochs=1, global_batch_size=4000), -1, max_epochs=-1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_resume_at_every_step_goes_on_with_the_next_window(corpus: Path, tmp_path: Path, packing: Packing) -> None:
    """Saved by a callback in `on_train_batch_end`, with windows read ahead, within and at the end of an epoch.

    The source "code" reaches its limit on the way.
    """
    options: dict[str, Any] = {"packing": packing, "max_epochs": {"code": 1}}
    data = data_module(corpus, **options, prefetch_windows=3)
    num_steps = len(data.train_dataloader()) + 3
    straight = fit(tmp_path, data, num_steps, callbacks=[SaveEveryStep(tmp_path)])
    assert len(straight.trained) == num_steps
    assert data.training.usage["code"]["epochs"] == 1.0
    for step in range(1, num_steps):
        resumed_data = data_module(corpus, **options)
        resumed = fit(tmp_path, resumed_data, num_steps, tmp_path / f"step={step}.ckpt")
        assert resumed.trained == straight.trained[step:], f"resumed after step {step}"
        assert resumed_data.state_dict() == data.state_dict()


def test_validation_in_the_middle_does_not_move_the_position(corpus: Path, tmp_path: Path) -> None:
    plain = fit(tmp_path, data_module(corpus), 7)
    validating = fit(
        tmp_path, data_module(corpus), 7, limit_val_batches=1.0, val_check_interval=2, check_val_every_n_epoch=None
    )
    assert validating.trained == plain.trained
    assert validating.validated


def test_a_failed_step_leaves_the_position_after_the_last_trained_window(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus)
    with pytest.raises(RuntimeError, match="as the test wants it"):
        trainer(tmp_path, 9).fit(Recorder(fail_at=4 * GLOBAL_BATCH), data)
    assert data.training.cursor.position == 3 * GLOBAL_BATCH


def test_a_callback_that_stands_first_reads_the_moved_position(corpus: Path, tmp_path: Path) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            data: CorpusDataModule = trainer.datamodule  # type: ignore[attr-defined]
            self.seen.append(data.state_dict()["data_position"])

    watch = Watch()
    fit(tmp_path, data_module(corpus), 3, callbacks=[watch])
    assert watch.seen == [GLOBAL_BATCH, 2 * GLOBAL_BATCH, 3 * GLOBAL_BATCH]


def test_a_trainer_that_fits_twice_goes_on_and_keeps_no_callback_of_ours(corpus: Path, tmp_path: Path) -> None:
    data, module = data_module(corpus), Recorder()
    running = trainer(tmp_path, 3)
    callbacks_before = list(running.callbacks)  # type: ignore[attr-defined]
    running.fit(module, data)
    running.fit_loop.epoch_loop.max_steps = 6
    running.fit(module, data)
    assert [position for position, _ in module.trained] == [GLOBAL_BATCH * step for step in range(1, 7)]
    assert running.callbacks == callbacks_before  # type: ignore[attr-defined]


def test_the_global_batch_may_change_on_resume_and_no_sequence_is_lost(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus)
    fit(tmp_path, data, 3)
    larger = data_module(corpus, global_batch_size=6)
    larger.load_state_dict(data.state_dict())
    module = fit(tmp_path, larger, 3)
    assert [position for position, _ in module.trained] == [18, 24, 30]
    sequences = [row for _, window in module.trained for micro_batch in window for row in micro_batch]
    straight = [row for _, window in fit(tmp_path, data_module(corpus), 8).trained for m in window for row in m]
    assert sequences == straight[12:30]


# ---- state


def test_state_is_plain_and_counts_tokens_consumed(corpus: Path) -> None:
    data = data_module(corpus)
    data.load_state_dict({**data.state_dict(), "data_position": 30})
    state = data.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state["tokens_consumed"] == {"web": 20 * SEQ_LEN, "code": 10 * SEQ_LEN}


def test_a_changed_mix_holds_from_the_restored_position_on(corpus: Path) -> None:
    data = data_module(corpus)
    data.load_state_dict({**data.state_dict(), "data_position": 30})
    changed = data_module(corpus, mix={"code": 1})
    changed.load_state_dict(data.state_dict())
    assert [mix.start_position for mix in changed.training.cursor.order.mixes] == [0, 30]
    assert set(changed.training.cursor.order.sequences(30, 20)[0].tolist()) == {1}
    again = data_module(corpus, mix={"code": 1})
    again.load_state_dict({**changed.state_dict(), "data_position": 40})
    assert again.training.cursor.order == changed.training.cursor.order


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 8}, "seq_len 12, but this run has 8"),
        ({"seed": 4}, "seed 0, but this run has 4; set data.seed"),
        ({"packing": "pad"}, "packing chunk, but this run has pad"),
    ],
)
def test_a_state_of_another_order_is_refused(corpus: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        data_module(corpus, **changes).load_state_dict(data_module(corpus).state_dict())
    assert words in str(error.value)


def test_windows_are_advanced_in_order_and_each_once(corpus: Path) -> None:
    data = data_module(corpus)
    first, second, third = list(data.train_dataloader())[:3]
    data.training.advance(first)
    data.training.advance(first)
    data.training.advance(second)
    with pytest.raises(RuntimeError, match="in order"):
        data.training.advance(first)
    data.training.advance(third)
    assert data.training.cursor.position == 3 * GLOBAL_BATCH


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_usage_counts_the_tokens_that_were_consumed(corpus: Path, packing: Packing) -> None:
    """As the windows show them: places that a document's token fills, by source."""
    data = data_module(corpus, packing=packing, mix={"code": 1})
    num_tokens = 0
    for window in list(data.train_dataloader()):
        data.training.advance(window)
        for batch in window.micro_batches:
            is_padding = (batch.input_ids == EOS) & (batch.input_ids.roll(1, dims=1) == EOS)
            is_padding[:, 0] = False
            num_tokens += int((~is_padding).sum())
    assert data.training.usage["web"] == {"tokens": 0, "epochs": 0.0}
    assert data.training.usage["code"]["tokens"] == num_tokens
    assert (
        data.training.usage["code"]["epochs"]
        == data.training.cursor.position / data.training.cursor.order.num_sequences[1]
    )
    state = json.loads(json.dumps(data.state_dict()))
    assert (state["tokens_consumed"]["code"], state["epochs_consumed"]["code"]) == tuple(
        data.training.usage["code"].values()
    )
    again = data_module(corpus, packing=packing, mix={"code": 1})
    again.load_state_dict(state)
    assert again.training.usage == data.training.usage


@pytest.mark.parametrize("packing", PACKINGS)
def test_tokens_are_mixed_in_the_proportions_asked_for(corpus: Path, packing: Packing) -> None:
    """Whatever the sources' sequences hold: those of "code" are longer here, so that fewer of them are consumed."""
    data = data_module(corpus, packing=packing, mix={"web": 1, "code": 1})
    while data.training.cursor.position < 5_000:
        data.training.advance(AccumulationWindow((), 0, 0, data.training.cursor.position + GLOBAL_BATCH))
    web, code = (consumed["tokens"] for consumed in data.training.usage.values())
    assert abs(code / web - 1) < 0.01
    consumed = data.training.cursor.order.sequences_consumed(data.training.cursor.position)
    assert (consumed[0] == consumed[1]) == (packing == "chunk")


def test_data_usage_is_logged_by_source(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus, packing="best_fit")
    logger = CSVLogger(tmp_path)
    fit(tmp_path, data, 4, logger=logger, log_every_n_steps=2)
    logger.save()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    last = {name: float(value) for name, value in rows[-1].items() if name.startswith("data/")}
    assert len(rows) == 2
    assert last == pytest.approx(
        {
            f"data/{what}_{name}": value
            for name, consumed in data.training.usage.items()
            for what, value in consumed.items()
        }
    )


# ---- every token once, and the end of the data


def pairs_of_windows(windows: Iterable[AccumulationWindow]) -> Counter[tuple[int, int]]:
    """How often each token with the label after it counts."""
    pairs: Counter[tuple[int, int]] = Counter()
    for window in windows:
        for batch in window.micro_batches:
            valid = batch.labels != IGNORE_INDEX
            pairs.update(zip(batch.input_ids[valid].tolist(), batch.labels[valid].tolist(), strict=True))
    return pairs


def pairs_of(documents: Documents) -> Counter[tuple[int, int]]:
    return Counter((token, label) for document in documents for token, label in pairwise(document))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_one_epoch_shows_every_token_once_or_says_what_it_dropped(
    corpus: Path, packing: Packing, world_size: int
) -> None:
    data = data_module(corpus, packing=packing, max_epochs={"web": 1, "code": 1})
    last, end = data.training.cursor.last_position, data.training.cursor.order.end
    assert last is not None
    assert end is not None
    assert end == sum(data.training.cursor.order.num_sequences)
    assert last == end - end % GLOBAL_BATCH
    data_windows = [
        TrainWindows(
            data.training.cursor.order,
            data.training.corpus.train,
            data.training.sequence_format,
            GLOBAL_BATCH,
            1,
            Ranks(rank, world_size),
            data.training.plans,
        )
        for rank in range(world_size)
    ]
    trained = [windows.window(at) for at in range(0, last, GLOBAL_BATCH) for windows in data_windows]
    alone = replace(data_windows[0], global_batch_size=1, ranks=Ranks())
    dropped = [alone.window(at) for at in range(last, end)]
    expected = pairs_of(WEB) + pairs_of(CODE)
    if packing == "chunk":  # a source's last, incomplete sequence
        for documents, source in zip((WEB, CODE), data.training.corpus.train, strict=True):
            figures = measure_source(source, SEQ_LEN, "chunk")
            rest = [token for document in documents for token in document][figures.num_sequences * SEQ_LEN :]
            lost = Counter((token, label) for token, label in pairwise(rest) if token != EOS)
            assert lost.total() == figures.num_labels - figures.num_valid_tokens
            expected -= lost
    assert pairs_of_windows(trained + dropped) == expected


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_run_ends_with_the_data_and_says_what_is_left(
    corpus: Path, tmp_path: Path, packing: Packing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = data_module(corpus, packing=packing, max_epochs={"web": 1, "code": 2}, global_batch_size=7)
    last, end = data.training.cursor.last_position, data.training.cursor.order.end
    assert last is not None
    assert end is not None
    module = fit(tmp_path, data, 10_000, callbacks=[SaveEveryStep(tmp_path)])
    assert len(module.trained) * 7 == data.training.cursor.position == last
    (message,) = [record.message for record in caplog.records if "training ends" in record.message]
    left = [
        b - a
        for a, b in zip(
            data.training.cursor.order.sequences_consumed(last),
            data.training.cursor.order.sequences_consumed(end),
            strict=True,
        )
    ]
    assert sum(left) == (end - last) > 0
    told = [f"{name} {count}" for name, count in zip(("web", "code"), left, strict=True) if count]
    assert f"at position {last}; dropped sequences, too few for a global batch: {', '.join(told)}" in message
    again = data_module(corpus, packing=packing, max_epochs={"web": 1, "code": 2}, global_batch_size=7)
    ended = fit(tmp_path, again, 10_000, tmp_path / f"step={len(module.trained)}.ckpt")
    assert ended.trained == []
    more = data_module(corpus, packing=packing, max_epochs={"web": 2, "code": 2}, global_batch_size=7)
    longer = fit(tmp_path, more, 10_000, tmp_path / f"step={len(module.trained)}.ckpt")
    assert longer.trained[0][0] == last + 7
    assert more.training.cursor.order.end is not None
    assert more.training.cursor.order.end - more.training.cursor.position < 7


def test_more_steps_than_the_data_have_are_refused_where_they_are_a_must(corpus: Path, tmp_path: Path) -> None:
    data = data_module(corpus, max_epochs={"web": 1, "code": 1})
    with pytest.raises(UserError, match=r"trainer.min_steps is 999, but data.max_epochs ends the data after \d+ steps"):
        fit(tmp_path, data, 1_000, min_steps=999)


def test_a_change_of_the_mix_is_named_when_it_comes_and_when_a_run_goes_on_with_another(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = data_module(corpus, max_epochs={"code": 1})
    (_, mix) = data.training.cursor.order.mixes
    num_steps = mix.start_position // GLOBAL_BATCH + 1
    fit(tmp_path, data, num_steps, callbacks=[SaveEveryStep(tmp_path)])
    told = [record.message for record in caplog.records if "mix of sources" in record.message]
    assert told == [f"the mix of sources changes: web 2 (100%) from position {mix.start_position} on"]
    caplog.clear()
    fit(tmp_path, data_module(corpus, max_epochs={"code": 1}), num_steps, tmp_path / "step=2.ckpt")
    fit(tmp_path, data_module(corpus, mix={"web": 1, "code": 3}), 3, tmp_path / "step=2.ckpt")
    told = [record.message for record in caplog.records if "mix of sources" in record.message]
    assert told[1:] == [f"the mix of sources changes: web 1 (25%), code 3 (75%) from position {2 * GLOBAL_BATCH} on"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_changed_mix_is_named_by_the_weights_that_the_user_wrote(corpus: Path, packing: Packing) -> None:
    """Not by those of the order, which count sequences, and are large where packed sources' sequences differ."""
    state = data_module(corpus, packing=packing).state_dict()
    changed = data_module(corpus, packing=packing, mix={"web": 5, "code": 10})
    assert changed.training.load_state(state) == (
        "the mix of sources changes: web 5 (33.3%), code 10 (66.7%) from position 0 on"
    )
    assert data_module(corpus, packing=packing).training.load_state(state) is None


def test_a_changed_mix_is_in_the_difference_of_recipes(tmp_path: Path) -> None:
    before = {"data": {"mix": {"web": 2}, "max_epochs": None}}
    now = {"data": {"mix": {"web": 1}, "max_epochs": {"code": 2}}}
    target = checkpoint.SaveTarget(tmp_path, checkpoint.Ranks(), origin=checkpoint.RunMetadata({}, before))
    manifest = checkpoint.read_manifest(checkpoint.save_blocking(target, lambda: checkpoint.Snapshot(1, {}, [], {})))
    found = find_drift(manifest, identity={}, recipe=now, versions=manifest.versions, policy=RECIPE_POLICY)
    assert [(difference.area, difference.text, difference.verdict) for difference in found] == [
        ("data", "data.max_epochs is {'code': 2} and was None", "refused"),
        ("data", "data.mix.web is 1 and was 2", "refused"),
    ]


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 100_000}, "lower data.seq_len"),
        ({"seq_len": 0}, "data.seq_len is 0"),
        ({"micro_batch_size": 3}, "set data.micro_batch_size to one of 1, 2, 4"),
        ({"mix": {"wbe": 1}}, "did you mean 'web'?"),
        ({"max_epochs": {"wbe": 1}}, "did you mean 'web'?"),
        ({"max_epochs": {"web": 0}}, "'web' 0 epochs"),
        ({"packing": "pad", "seq_len": 20}, "--packing pad --seq_len 20`"),
        ({"limit_validation_sequences": 0}, "data.limit_validation_sequences is 0"),
        ({"prefetch_windows": -1}, "data.prefetch_windows is -1"),
        ({"tokenizer_hash": "e" * 64}, "this run's is eeee"),
    ],
)
def test_bad_options_are_refused_before_training(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        fit(tmp_path, data_module(corpus, **changes), 1)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_source_too_short_for_a_sequence_is_fine_with_weight_0(corpus: Path, tmp_path: Path) -> None:
    path = write_corpus(
        tmp_path / "corpus",
        {"web": make_documents(40, 6), "tiny": [[2, 20, 3]]},
        tokenizer=(corpus / "tokenizer.model").read_bytes(),
    )
    with pytest.raises(UserError, match="source 'tiny' has 3 tokens"):
        data_module(path).setup("fit")
    module = fit(tmp_path, data_module(path, mix={"web": 1, "tiny": 0}), 2)
    assert len(module.trained) == 2


def test_a_damaged_shard_stops_training_with_one_line(corpus: Path, tmp_path: Path) -> None:
    path = write_corpus(
        tmp_path / "corpus", {"web": make_documents(40, 6)}, tokenizer=(corpus / "tokenizer.model").read_bytes()
    )
    shard = path / "train/web/00000.ds"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="the shard is damaged or has changed"):
        fit(tmp_path, data_module(path), 30)


# ---- validation


def test_validation_counts_tokens_and_bytes_of_the_whole_set(corpus: Path, tmp_path: Path) -> None:
    documents = make_documents(9, 6, seed=3)
    num_bytes = open_tokenizer(corpus).token_num_bytes
    for micro_batch_size in (1, 2, 7):
        data, module = data_module(corpus, validation_micro_batch_size=micro_batch_size), Recorder()
        trainer(tmp_path, 1, limit_val_batches=1.0).validate(module, data, verbose=False)
        assert sum(tokens for tokens, _ in module.validated) == sum(len(document) - 1 for document in documents)
        assert sum(count for _, count in module.validated) == sum(
            int(num_bytes[token]) for document in documents for token in document[1:]
        )


def test_a_corpus_without_a_validation_set_trains_and_validates_nothing(corpus: Path, tmp_path: Path) -> None:
    path = write_corpus(
        tmp_path / "corpus", {"web": make_documents(40, 6)}, tokenizer=(corpus / "tokenizer.model").read_bytes()
    )
    module, running = Recorder(), trainer(tmp_path, 2, limit_val_batches=1.0)
    running.fit(module, data_module(path))
    assert (len(module.trained), module.validated) == (2, [])
    assert running.limit_val_batches == 1.0
    running.validate(module, data_module(corpus), verbose=False)
    assert module.validated


# ---- ranks


def _run_rank(
    corpus: Path, folder: Path, packing: Packing, num_ranks: int, max_steps: int, ckpt: Path | None
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    data, module = data_module(corpus, packing=packing, max_epochs={"code": 1}), Recorder()
    running = trainer(
        folder,
        max_steps,
        devices=num_ranks,
        strategy="ddp",
        limit_val_batches=1.0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        callbacks=[SaveEveryStep(folder)],
    )
    running.fit(module, data, ckpt_path=ckpt)
    return module.trained, module.validated, data.state_dict()


def _run_ranks(corpus: Path, folder: Path, packing: Packing, num_ranks: int, max_steps: int, ckpt: Path | None) -> Any:
    """Trains in processes of their own; returns the global batches, all ranks' counts of validation and their state."""
    run: Callable[..., Any] = run_ranks
    ranks = run(_run_rank, num_ranks, corpus, folder, packing, num_ranks, max_steps, ckpt, timeout_seconds=200)
    steps = zip(*(trained for trained, _, _ in ranks), strict=True)
    batches = [(of_ranks[0][0], [row for _, rows in of_ranks for row in rows]) for of_ranks in steps]
    (state,) = {json.dumps(state) for _, _, state in ranks}
    return batches, [validated for _, validated, _ in ranks], json.loads(state)


@pytest.mark.parametrize("packing", [pytest.param("chunk", marks=pytest.mark.slow), "best_fit"])
def test_two_then_four_ranks_then_one_train_the_same_global_batches(
    corpus: Path, tmp_path: Path, packing: Packing
) -> None:
    alone_data = data_module(corpus, packing=packing, max_epochs={"code": 1})
    alone = fit(tmp_path / "alone", alone_data, 9)
    two, validated, _ = _run_ranks(corpus, tmp_path, packing, 2, 3, None)
    assert len({len(of_rank) for of_rank in validated}) == 1
    four, _, state = _run_ranks(corpus, tmp_path, packing, 4, 6, tmp_path / "step=3.ckpt")
    assert state["data_position"] == 6 * GLOBAL_BATCH
    data = data_module(corpus, packing=packing, max_epochs={"code": 1})
    one = fit(tmp_path, data, 9, tmp_path / "step=6.ckpt")
    assert two + four + one.trained == alone.trained
    assert data.state_dict() == alone_data.state_dict()
