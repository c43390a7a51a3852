"""One loss for one set: logged during training, by `genesis validate`, on any number of ranks, under any strategy.

All are compared with the slow obvious way, in float64: every sequence of the set alone, every document in it alone, one
forward each. Ranks run the real command line, many commands one after another.
"""

import csv
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.cli.main import main
from genesis.data.corpus import open_corpus
from genesis.data.plans import write_plan
from genesis.generate.load import load_decoder
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from genesis_callbacks.testing import run_ranks
from tests.cli.tiny import build_recipe, write_recipe
from tests.data.corpora import BOS, EOS, Documents, write_corpus
from tests.data.stream.streams import write_files

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("validation")]

STEPS = 3
TOLERANCE = 1e-5
WORDS = ("ante", " rests", "on\n", "  see", " a", "train", "\u00e9t\u00e9", " 7", "\u65e5\u672c", "==")


def write_texts(seed: int, num_texts: int, max_words: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(WORDS, draw.integers(0, max_words + 1))) for _ in range(num_texts)]


TRAIN = {"web": write_texts(1, 60, 20), "code": write_texts(2, 40, 30)}
HELD_OUT = {
    # Three sources of lengths that nothing divides, one of them shorter than a sequence, and one without a document.
    "ragged": {"web": write_texts(3, 9, 17), "code": write_texts(4, 4, 40), "empty": [], "note": ["see \u00e9"]},
    # One sequence, whatever the number of ranks.
    "scarce": {"note": ["a train"]},
    "none": {"web": [], "code": []},
}


# ---- the slow obvious way


@dataclass(frozen=True)
class Figures:
    loss: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int


def read_sequences(corpus: Path, seq_len: int) -> list[list[int]]:
    """Returns all tokens of the validation set in the files' order, cut: inputs and the token after them."""
    manifest = json.loads((corpus / "manifest.json").read_text())
    sequences = []
    for source in manifest["validation"]:
        files = sorted((corpus / "validation" / source["name"]).glob("*.ds"))
        tokens = [int(token) for file in files for token in np.fromfile(file, "<u2")]
        sequences += [tokens[start : start + seq_len + 1] for start in range(0, len(tokens) - 1, seq_len)]
    return sequences


@cache
def compute_reference(checkpoint: Path, corpus: Path, seq_len: int, limit: int | None = None) -> Figures:
    decoder = load_decoder(checkpoint).decoder.double()
    num_bytes_of = open_tokenizer(corpus).token_num_bytes
    sequences = read_sequences(corpus, seq_len)
    if limit is not None:
        sequences = [sequences[index * len(sequences) // limit] for index in range(limit)]
    loss_sum, num_tokens, num_bytes = 0.0, 0, 0
    for sequence in sequences:
        for document in split_documents(sequence):
            inputs, labels = torch.tensor(document[:-1]), torch.tensor(document[1:])
            with torch.no_grad():
                log_p = decoder(inputs[None])[0].log_softmax(-1)
            loss_sum -= float(log_p[torch.arange(len(labels)), labels].sum())
            num_tokens += len(labels)
            num_bytes += sum(int(num_bytes_of[label]) for label in labels)
    return Figures(loss_sum / num_tokens, loss_sum / num_bytes / math.log(2), num_tokens, num_bytes)


def split_documents(sequence: list[int]) -> list[list[int]]:
    """Returns the parts of documents in a sequence that have a token to predict."""
    parts: list[list[int]] = [[]]
    for token in sequence:
        parts[-1].append(token)
        if token == EOS:
            parts.append([])
    return [part for part in parts if len(part) > 1]


# ---- ranks


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one validation; tokens and bytes are its own, the loss is everybody's."""

    step: int
    loss: float
    num_tokens: int
    num_bytes: int
    num_forwards: int
    num_collectives: int


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace in ("c10d", "_c10d_functional")
        return function(*args, **(kwargs or {}))


class Watch(pl.Callback):
    """Looks at every validation of its process."""

    seen: ClassVar[list[Seen]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.num_forwards = self.num_tokens = self.num_bytes = 0
        self.collectives = CountCollectives()
        self.collectives.__enter__()
        self.hook = pl_module.decoder.register_forward_pre_hook(self.count_forward)

    def count_forward(self, module: Any, inputs: Any) -> None:
        self.num_forwards += 1

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # Before the module's hook: these are still the sums of this rank.
        self.num_tokens, self.num_bytes = pl_module.validation_sums.counts.tolist()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.collectives.__exit__(None, None, None)
        self.hook.remove()
        if not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["validation/loss"])
            counts = (self.num_tokens, self.num_bytes, self.num_forwards, self.collectives.count)
            self.seen.append(Seen(trainer.global_step, loss, *counts))


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str
    seen: list[Seen]

    def printed(self, key: str) -> float:
        found = re.search(rf"{key}\W+([0-9.]+)", self.out)
        assert found is not None, self.out + self.err
        return float(found[1])


def run_commands(commands: Sequence[Sequence[str]]) -> list[Answer]:
    """Runs each command on this rank, as a shell would."""
    answers = []
    # Or else Lightning gives each rank threads of its own, which get in each other's way.
    os.environ["OMP_NUM_THREADS"] = "1"
    for command in commands:
        environment, Watch.seen = dict(os.environ), []
        sys.argv = ["genesis", *command]
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = main(list(command))
        # Lightning takes WORLD_SIZE away at a run's end.
        os.environ.update(environment)
        answers.append(Answer(status, out.getvalue(), err.getvalue(), Watch.seen))
    return answers


# ---- runs


def sharded(**options: Any) -> dict[str, Any]:
    return {"class_path": "genesis.strategies.Sharded", "init_args": options}


STRATEGIES: dict[str, Any] = {
    "replicated": "replicated",
    "zero1": {"class_path": "genesis.strategies.Replicated", "init_args": {"optimizer_states": "sharded"}},
    "full": sharded(),
    "grad_op": sharded(shard="grad_op"),
    "hybrid": sharded(shard="hybrid", ranks_per_shard_group=2),
    "gather_float32": sharded(gather_dtype="float32"),
}


@dataclass(frozen=True)
class Place:
    """Where something runs."""

    world_size: int
    strategy: str

    def __str__(self) -> str:
        return f"{self.world_size}-{self.strategy}"


@dataclass(frozen=True)
class Run:
    """A run of `genesis fit`, with validation after every step, or without."""

    place: Place
    corpus: str = "ragged"
    seq_len: int = 16
    micro_batch_size: int = 1
    packing: str = "chunk"
    is_stream: bool = False
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    suffix: str = ""

    def __str__(self) -> str:
        data = "stream" if self.is_stream else self.packing
        return f"{self.place}-{self.corpus}-{data}-{self.seq_len}x{self.micro_batch_size}{self.suffix}"


REPLICATED = Place(1, "replicated")
RUNS = (
    Run(REPLICATED),
    Run(REPLICATED, seq_len=13, micro_batch_size=5, packing="best_fit"),
    Run(Place(1, "full"), packing="pad", micro_batch_size=3),
    Run(Place(2, "replicated"), micro_batch_size=4),
    Run(Place(2, "zero1"), is_stream=True, micro_batch_size=2),
    Run(Place(2, "grad_op"), seq_len=13, packing="pad", micro_batch_size=3),
    Run(Place(3, "zero1"), micro_batch_size=2),
    Run(Place(3, "full"), seq_len=13, packing="best_fit", micro_batch_size=5),
    Run(Place(4, "replicated"), "scarce", micro_batch_size=3),
    Run(Place(4, "full"), "scarce"),
    Run(Place(4, "hybrid"), micro_batch_size=3),
)
PLACES = (
    REPLICATED,
    Place(2, "full"),
    Place(3, "replicated"),
    Place(3, "full"),
    Place(4, "zero1"),
    Place(4, "hybrid"),
)
"""Where other runs' checkpoints are validated."""


@dataclass(frozen=True)
class Validation:
    """`genesis validate` of the checkpoint in the middle of a run."""

    run: Run
    place: Place
    micro_batch_size: int
    limit: int | None = None

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"-first{self.limit}"
        return f"{self.run}-at-{self.place}x{self.micro_batch_size}{limit}"


VALIDATIONS = (
    *(Validation(run, run.place, run.micro_batch_size) for run in RUNS),
    *(Validation(RUNS[0], place, 1 + number) for number, place in enumerate(PLACES)),
    *(Validation(RUNS[4], place, 3) for place in PLACES[::2]),
    *(Validation(run, PLACES[number % len(PLACES)], 4) for number, run in enumerate(RUNS[5:])),
    *(Validation(RUNS[3], place, 2, limit=5) for place in (PLACES[0], PLACES[3])),
)
MIXED = Run(REPLICATED, changes={"trainer.precision": "bf16-mixed"}, suffix="-mixed")
MIXED_VALIDATIONS = tuple(Validation(MIXED, Place(2, strategy), 1) for strategy in ("replicated", "gather_float32"))
UNTOUCHED = tuple(RUNS[number] for number in (0, 4, 5, 10))
"""Runs that are made once more without validation."""
CHECKED_BEFORE = tuple(RUNS[number] for number in (0, 5))
"""Runs that are made once more with a part of a validation before the first step."""


def without_validation(run: Run) -> Run:
    return replace(run, changes={"trainer.limit_val_batches": 0}, suffix="-without")


def with_sanity_check(run: Run) -> Run:
    return replace(run, changes={"trainer.num_sanity_val_steps": 2}, suffix="-sanity")


@dataclass(frozen=True)
class Trial:
    """A command with one more setting, and the words of its refusal; without words it is none."""

    command: Literal["fit", "validate"]
    run: Run
    changes: dict[str, Any] = field(hash=False)
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = "-".join(f"{key}={value}" for key, value in self.changes.items())
        return f"{self.command}-{self.run.place}-{self.run.corpus}-{changes}"


TRIALS = (
    Trial(
        "fit", RUNS[0], {"trainer.limit_val_batches": 1}, ("limit_val_batches is 1:", "data.limit_validation_sequences")
    ),
    Trial("fit", RUNS[0], {"trainer.limit_val_batches": 0.5}, ("trainer.limit_val_batches is 0.5:",)),
    Trial("validate", RUNS[3], {"trainer.limit_val_batches": 3}, ("trainer.limit_val_batches is 3:",)),
    Trial("validate", RUNS[0], {"trainer.limit_val_batches": 0}, ("nothing would be validated", "remove it")),
    Trial("validate", RUNS[0], {"data.corpus": "none"}, ("none has no validation set", "validation_fraction")),
    Trial("validate", RUNS[4], {"data.corpus": None}, ("data.stream has no validation set", "by data.corpus")),
    Trial("fit", RUNS[3], {"trainer.val_check_interval": "00:00:00:01"}, ("val_check_interval is a time", "of steps")),
    # One rank has one clock.
    Trial("fit", RUNS[0], {"trainer.val_check_interval": "00:00:10:00"}),
    Trial("fit", RUNS[0], {"trainer.fast_dev_run": True}),
)


@dataclass(frozen=True)
class Lab:
    """Where the runs lie, and what was said and seen on each rank."""

    directory: Path
    runs: dict[Run, list[Answer]] = field(default_factory=dict)
    validations: dict[Validation, list[Answer]] = field(default_factory=dict)
    trials: dict[Trial, list[Answer]] = field(default_factory=dict)

    def corpus(self, run: Run) -> Path:
        return self.directory / run.corpus

    def checkpoint(self, run: Run, step: int) -> Path:
        return self.directory / str(run) / f"checkpoints/step-{step:08d}"

    def rows(self, run: Run) -> list[dict[str, str]]:
        with (self.directory / str(run) / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    def recipe(self, name: str, run: Run, place: Place, changes: dict[str, Any]) -> str:
        """Writes the recipe of `run` at `place`, and returns its path."""
        recipe = build_recipe(self.corpus(run), self.directory / str(run))
        settings = {
            "model.decoder.dropout": 0.1,
            "data.seq_len": run.seq_len,
            "data.micro_batch_size": 1,
            "data.global_batch_size": 12,
            "data.validation_micro_batch_size": run.micro_batch_size,
            "data.packing": run.packing,
            "checkpoint.every_n_steps": 1,
            "trainer.max_steps": STEPS,
            "trainer.val_check_interval": 1,
            "trainer.devices": place.world_size,
            "trainer.strategy": STRATEGIES[place.strategy],
            "trainer.callbacks": [{"class_path": "tests.train.test_validation.Watch"}],
            "trainer.enable_progress_bar": False,
        }
        if run.is_stream:
            sources = [{"name": name, "paths": [str(self.directory / "sources" / name)]} for name in TRAIN]
            settings["data.stream"] = {"sources": sources, "num_lanes": 4, "block_tokens": 100, "num_workers": 0}
        return str(write_recipe(self.directory / f"{name}.yaml", recipe, settings | run.changes | changes))

    def fit(self, run: Run) -> list[str]:
        return ["fit", "--config", self.recipe(str(run), run, run.place, {})]

    def validate(self, validation: Validation) -> list[str]:
        changes = {
            "data.validation_micro_batch_size": validation.micro_batch_size,
            "data.limit_validation_sequences": validation.limit,
        }
        recipe = self.recipe(str(validation), validation.run, validation.place, changes)
        return ["validate", "--config", recipe, "--ckpt_path", str(self.checkpoint(validation.run, STEPS - 1))]

    def try_out(self, trial: Trial) -> list[str]:
        changes = {"run_dir": str(self.directory / str(trial)), "data.stream.tokenizer": str(self.directory)}
        changes |= trial.changes
        if changes.get("data.corpus"):
            changes["data.corpus"] = str(self.directory / changes["data.corpus"])
        if not trial.run.is_stream:
            del changes["data.stream.tokenizer"]
        checkpoint = ["--ckpt_path", str(self.checkpoint(trial.run, 1))] if trial.command == "validate" else []
        return [trial.command, "--config", self.recipe(str(trial), trial.run, trial.run.place, changes), *checkpoint]


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Returns the runs and validations that the selected tests ask for, made by as few starts of ranks as can be."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = [value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    validations = [one for one in (*VALIDATIONS, *MIXED_VALIDATIONS) if one in wanted]
    trials = [trial for trial in TRIALS if trial in wanted]
    asked = [*wanted, *(one.run for one in (*validations, *trials)), *map(first_run_on, HELD_OUT)]
    runs = [run for run in (*RUNS, MIXED) if run in asked]
    runs += [without_validation(run) for run in UNTOUCHED if run in wanted]
    runs += [with_sanity_check(run) for run in CHECKED_BEFORE if run in wanted]
    lab = Lab(tmp_path_factory.mktemp("lab"))
    model = train_tokenizer(["an ant eats the tree, then rests on it " * 9], TokenizerOptions(300), lab.directory)
    tokenizer = open_tokenizer(model)

    def encode(sources: dict[str, list[str]]) -> dict[str, Documents]:
        return {
            name: [[BOS, *tokenizer.encode(text), EOS] for text in texts if text] for name, texts in sources.items()
        }

    for name, held_out in HELD_OUT.items():
        write_corpus(
            lab.directory / name, encode(TRAIN), encode(held_out), tokenizer=tokenizer.files["tokenizer.model"]
        )
        for run in RUNS:
            if run.packing != "chunk" and run.corpus == name:
                write_plan(open_corpus(lab.corpus(run)), run.packing, run.seq_len)
    for name, texts in TRAIN.items():
        write_files(lab.directory / "sources" / name, texts, ".jsonl")
    for world_size in (1, 2, 3):
        run_at(lab, world_size, runs, (), ())
    run_at(lab, 4, runs, validations, ())
    for world_size in (3, 2, 1):
        run_at(lab, world_size, (), validations, trials)
    return lab


def first_run_on(corpus: str) -> Run:
    return next(run for run in RUNS if run.corpus == corpus)


def run_at(
    lab: Lab, world_size: int, runs: Sequence[Run], validations: Sequence[Validation], trials: Sequence[Trial]
) -> None:
    """Makes those that want `world_size` ranks, and enters their answers."""
    runs = [run for run in runs if run.place.world_size == world_size]
    validations = [validation for validation in validations if validation.place.world_size == world_size]
    trials = [trial for trial in trials if trial.run.place.world_size == world_size]
    commands = [*map(lab.fit, runs), *map(lab.validate, validations), *map(lab.try_out, trials)]
    if not commands:
        return
    answers = (
        list(ranks) for ranks in zip(*run_ranks(run_commands, world_size, commands, timeout_seconds=600.0), strict=True)
    )
    lab.runs.update((run, next(answers)) for run in runs)
    lab.validations.update((validation, next(answers)) for validation in validations)
    lab.trials.update((trial, next(answers)) for trial in trials)


def check_ranks(ranks: Sequence[Seen], run: Run, micro_batch_size: int, reference: Figures, num_sequences: int) -> None:
    """Ranks did as much as each other, and no more than the set needs; each token counted once."""
    assert sum(seen.num_tokens for seen in ranks) == reference.num_tokens
    assert sum(seen.num_bytes for seen in ranks) == reference.num_bytes
    assert {seen.num_forwards for seen in ranks} == {math.ceil(num_sequences / (micro_batch_size * len(ranks)))}
    (num_collectives,) = {seen.num_collectives for seen in ranks}
    assert num_collectives > 0 or len(ranks) == 1
    assert {seen.loss for seen in ranks} == {ranks[0].loss}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_training_logs_the_loss_of_every_token_once_and_keeps_ranks_in_step(lab: Lab, run: Run) -> None:
    answers = lab.runs[run]
    assert [answer.status for answer in answers] == [0] * run.place.world_size, answers[0].err
    num_sequences = len(read_sequences(lab.corpus(run), run.seq_len))
    rows = lab.rows(run)
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    for step, row in enumerate(rows, start=1):
        reference = compute_reference(lab.checkpoint(run, step), lab.corpus(run), run.seq_len)
        assert float(row["validation/loss"]) == pytest.approx(reference.loss, rel=0, abs=TOLERANCE)
        assert float(row["validation/bits_per_byte"]) == pytest.approx(reference.bits_per_byte, rel=0, abs=TOLERANCE)
        assert float(row["validation/perplexity"]) == pytest.approx(math.exp(reference.loss), rel=TOLERANCE)
        ranks = [answer.seen[step - 1] for answer in answers]
        assert {seen.step for seen in ranks} == {step}
        check_ranks(ranks, run, run.micro_batch_size, reference, num_sequences)
    assert len({row["validation/loss"] for row in rows}) == STEPS


@pytest.mark.parametrize("validation", VALIDATIONS, ids=str)
def test_a_checkpoint_validates_to_what_training_logged_at_its_step(lab: Lab, validation: Validation) -> None:
    run, answers = validation.run, lab.validations[validation]
    assert [answer.status for answer in answers] == [0] * validation.place.world_size, answers[0].err
    checkpoint, corpus = lab.checkpoint(run, STEPS - 1), lab.corpus(run)
    reference = compute_reference(checkpoint, corpus, run.seq_len, validation.limit)
    num_sequences = validation.limit or len(read_sequences(corpus, run.seq_len))
    ranks = [seen for answer in answers for seen in answer.seen]
    assert len(ranks) == len(answers)
    check_ranks(ranks, run, validation.micro_batch_size, reference, num_sequences)
    printed = {key: answers[0].printed(f"validation/{key}") for key in ("loss", "bits_per_byte")}
    assert printed["loss"] == pytest.approx(reference.loss, rel=0, abs=TOLERANCE)
    assert printed["bits_per_byte"] == pytest.approx(reference.bits_per_byte, rel=0, abs=TOLERANCE)
    if validation.limit is None:
        logged = lab.rows(run)[STEPS - 2]
        for key, value in printed.items():
            assert value == pytest.approx(float(logged[f"validation/{key}"]), rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("validation", MIXED_VALIDATIONS, ids=str)
def test_mixed_precision_validates_alike_where_shards_are_gathered_in_float32(lab: Lab, validation: Validation) -> None:
    answers, logged = lab.validations[validation], lab.rows(MIXED)[STEPS - 2]
    assert [answer.status for answer in answers] == [0, 0], answers[0].err
    assert answers[0].printed("validation/loss") == pytest.approx(
        float(logged["validation/loss"]), rel=0, abs=TOLERANCE
    )


def test_bytes_are_those_of_the_text(lab: Lab) -> None:
    for name in ("ragged", "scarce"):
        run, held_out = first_run_on(name), HELD_OUT[name]
        reference = compute_reference(lab.checkpoint(run, 1), lab.corpus(run), run.seq_len)
        assert reference.num_bytes == sum(len(text.encode()) for texts in held_out.values() for text in texts)


def test_some_ranks_had_no_sequence_at_all(lab: Lab) -> None:
    run = first_run_on("scarce")
    assert [answer.seen[0].num_tokens > 0 for answer in lab.runs[run]] == [True, False, False, False]


def read_end(lab: Lab, run: Run) -> tuple[dict[str, str], list[Any]]:
    """Returns the digest of every tensor, of weights and of the optimizer, and each rank's state of its data."""
    checkpoint = lab.checkpoint(run, STEPS)
    tensors = json.loads((checkpoint / "manifest.json").read_text())["tensors"]
    sections = json.loads((checkpoint / "state.json").read_text())["sections"]
    digests = {name: tensor["digest"] for name, tensor in tensors.items()}
    return digests, [section["trainer"]["CorpusDataModule"] for section in sections]


@pytest.mark.parametrize("run", UNTOUCHED, ids=str)
def test_validation_leaves_weights_optimizer_and_data_as_they_are_without(lab: Lab, run: Run) -> None:
    plain = without_validation(run)
    assert [answer.seen for answer in lab.runs[plain]] == [[]] * run.place.world_size
    digests, data = read_end(lab, plain)
    assert data[0]["data_position"] == STEPS * 12
    assert any(name.startswith("optimizer") for name in digests)
    assert read_end(lab, run) == (digests, data)
    assert [row["train/loss"] for row in lab.rows(run)] == [row["train/loss"] for row in lab.rows(plain)]


@pytest.mark.parametrize("run", CHECKED_BEFORE, ids=str)
def test_a_sanity_check_changes_nothing_and_is_not_logged(lab: Lab, run: Run) -> None:
    checked = with_sanity_check(run)
    assert read_end(lab, checked) == read_end(lab, run)
    columns = ("step", "train/loss", "validation/loss", "validation/bits_per_byte")
    logged, expected = ([[row[column] for column in columns] for row in lab.rows(which)] for which in (checked, run))
    assert logged == expected


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_what_would_not_validate_the_whole_set_alike_on_all_ranks_is_refused(lab: Lab, trial: Trial) -> None:
    for answer in lab.trials[trial]:
        assert answer.status == (2 if trial.words else 0), answer.err
        assert answer.err.startswith("genesis: error: ") == bool(trial.words)
        assert answer.err.count("\n") == bool(trial.words), answer.err
        assert all(word in answer.err for word in trial.words), answer.err
    checkpoints = list((lab.directory / str(trial)).glob("checkpoints/step-*"))
    assert bool(checkpoints) == (trial.command == "fit" and not trial.words and "fast_dev_run" not in str(trial))
