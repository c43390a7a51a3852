"""One option says how long a run is, and the rate ends with the run, however the user says it."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.export.recipe import build_recipe as build_imported
from genesis.model.decoder import DecoderConfig
from genesis.recipe.yaml import load_yaml
from genesis.train import progress
from tests.chat.support import write_tokenizer
from tests.cli.conftest import Genesis
from tests.cli.test_chat import SEQ_LEN, build_chat_recipe, make_chats
from tests.cli.tiny import write_recipe

NUM_CHATS, BATCH = 40, 2
IMPORTED = {"data.num_epochs": 3, "schedule.warmup_share": 0.05}
"""The length and the rate of the recipe that `genesis import` writes."""
EARLIER = {
    "data.num_epochs": None,
    "trainer.max_steps": 1000,
    "schedule.total_updates": 1000,
    "schedule.warmup_updates": 50,
}
"""The same of earlier releases."""
_SLOW = pytest.mark.slow
SHARE = ("--schedule.warmup_share", "0.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a corpus of conversations without a plan, of which best_fit cuts none."""
    directory = tmp_path_factory.mktemp("chats")
    write_tokenizer(directory / "tokenizer")
    lines = [json.dumps({"messages": chat}) for chat in make_chats(NUM_CHATS, seed=1)]
    (directory / "chat.jsonl").write_text("\n".join(lines))
    sources = (SourceOptions("chat", (str(directory / "chat.jsonl"),), chat="auto"),)
    options = PrepareOptions(
        "corpus", directory / "tokenizer", sources, out=directory, validation_fraction=0.1, num_workers=1
    )
    prepare_corpus(options)
    return options.corpus


Fit = Callable[..., tuple[str, list[dict[str, str]]]]
"""Takes changes of the recipe, options, and `name` of the directory; returns what is printed, and the log."""


@pytest.fixture
def fit(genesis: Genesis, caplog: pytest.LogCaptureFixture, corpus: Path, tmp_path: Path) -> Fit:
    """Returns a function that trains by a recipe on the corpus."""

    def run(changes: dict[str, Any], *options: str, name: str = ".") -> tuple[str, list[dict[str, str]]]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        recipe = build_chat_recipe(corpus, directory / "run", "best_fit", BATCH)
        del recipe["data"]["packing"]
        recipe["checkpoint"] |= {"every_n_steps": 10_000}
        del recipe["trainer"]["val_check_interval"]
        caplog.clear()
        done = genesis("fit", "--config", str(write_recipe(directory / "fit.yaml", recipe, changes)), *options)
        printed = done.err + caplog.text
        if done.status:
            return printed, []
        with (directory / "run/metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["optim/lr_factor"]]
        return printed, rows

    return run


def count_sequences(corpus: Path) -> int:
    plan = json.loads((corpus / f"packing/best_fit-{SEQ_LEN}/plan.json").read_text())
    return int(plan["sources"]["chat"]["figures"]["num_sequences"])


@pytest.mark.parametrize(
    ("recipe", "options", "num_epochs"),
    [
        pytest.param(*(IMPORTED, (), 3), marks=_SLOW),
        (IMPORTED, ("--data.num_epochs", "2"), 2),
        (IMPORTED, ("--data.num_epochs", "2", "--trainer.max_steps", "-1"), 2),
        (IMPORTED, ("--trainer.max_epochs", "2"), 2),
        pytest.param(*(IMPORTED, ("--trainer.max_steps", "null"), 3), marks=_SLOW),
        (IMPORTED, ("--data.max_epochs", "{chat: 2}"), 2),
        pytest.param(*(IMPORTED, ("--data.num_epochs", "2", "--schedule.warmup_updates", "2"), 2), marks=_SLOW),
        pytest.param(*(IMPORTED, ("--data={num_epochs: 1}",), 1), marks=_SLOW),
        pytest.param(*(EARLIER, ("--data.num_epochs", "2", *SHARE), 2), marks=_SLOW),
        (EARLIER, ("--data.num_epochs=2", "--trainer.max_steps=-1", *SHARE), 2),
        pytest.param(*(EARLIER, ("--data.num_epochs", "2", "--trainer.max_steps", "null", *SHARE), 2), marks=_SLOW),
        (EARLIER, ("--trainer.max_epochs", "2", *SHARE), 2),
    ],
)
def test_a_length_on_the_command_line_is_that_of_the_run_and_of_its_rate(
    fit: Fit, corpus: Path, recipe: dict[str, Any], options: tuple[str, ...], num_epochs: int
) -> None:
    """Reported as unslothai/unsloth#594, NVIDIA-NeMo/Automodel#3767 (of two lengths the wrong one wins in silence),
    vllm-project/speculators#1104 and ecmwf/anemoi-training#67 (the rate ends with another length)."""
    printed, rows = fit(recipe, *options)
    assert rows, printed
    num_sequences = count_sequences(corpus)
    num_steps = num_epochs * num_sequences // BATCH
    if "--trainer.max_epochs" in options:
        num_steps = num_epochs * (num_sequences // BATCH)
    assert int(rows[-1]["step"]) == num_steps
    factors = [float(row["optim/lr_factor"]) for row in rows]
    assert max(factors) == 1.0
    assert factors[-1] < 0.15  # the floor is 0.1
    assert f"length: {num_steps} steps of {BATCH} sequences" in printed
    assert "the schedule does not end with the run" not in printed


@pytest.mark.parametrize(
    ("recipe", "options", "line"),
    [
        (
            EARLIER,
            ("--trainer.max_steps", "5"),
            "to end both together, give --schedule.total_updates null and --schedule.warmup_share 0.05",
        ),
        (EARLIER, ("--data.max_epochs", "{chat: 2}"), "data.max_epochs ends the data after"),
        (EARLIER, ("--data.num_epochs", "2"), "a warm-up of 50 and a decay of 0 do not fit into a run of"),
        (
            IMPORTED,
            ("--data.max_epochs", "2"),
            "data.max_epochs is '2': give a mapping of names to whole numbers or null",
        ),
        (IMPORTED, ("--data.max_epochs", "2"), "for all sources alike, give data.num_epochs"),
        (IMPORTED, ("--data.num_epochs", "null"), "no option sets the length of the run: give data.num_epochs"),
        (IMPORTED, ("--data.num_epochs", "2", "--trainer.max_steps", "5"), "both say how long to train; leave one out"),
        (IMPORTED, ("--data.num_tokens", "9", "--data.num_epochs", "2"), "both say how long to train; leave one out"),
        (IMPORTED, ("--schedule.warmup_share", "0.1", "--schedule.warmup_updates", "3"), "give only one of them"),
    ],
)
def test_what_the_command_line_cannot_mean_is_one_line(
    fit: Fit, recipe: dict[str, Any], options: tuple[str, ...], line: str
) -> None:
    """A warm-up that is longer than the run is reported as Morizeyao/GPT2-Chinese#60."""
    printed, _ = fit(recipe, *options)
    assert line in printed


def test_the_sizes_of_an_import_follow_the_corpus_are_kept_and_drop_nothing(
    fit: Fit, genesis: Genesis, corpus: Path, tmp_path: Path
) -> None:
    auto = IMPORTED | {"data.seq_len": "auto", "data.global_batch_size": "auto", "data.micro_batch_size": 1}
    printed, rows = fit(auto, "--data.num_epochs", "1")
    assert rows, printed
    assert "data.seq_len is 96 and data.global_batch_size 1 (auto): a step learns from about" in printed
    assert "of all 37 conversations" in printed
    assert (len(rows), "no sequences are dropped" in printed) == (count_sequences(corpus), True)
    recorded = load_yaml((tmp_path / "run/config.yaml").read_text(), "config.yaml")["data"]
    assert (recorded["seq_len"], recorded["global_batch_size"]) == (96, 1)

    planned = genesis("plan", "--config", str(tmp_path / "fit.yaml"), "--data.num_epochs", "1", "--json")
    assert json.loads(planned.out)["run"]["num_steps"] == len(rows), planned.err
    resume = ("--ckpt_path", "latest", "--data.num_epochs", "1")
    printed, _ = fit(auto, *resume, "--data.global_batch_size", "2")
    assert "data.global_batch_size is 2 and was 1" in printed
    more = ("--ckpt_path", "latest", "--data.num_epochs", "2", "--checkpoint.allow_changed", "[data.num_epochs]")
    printed, longer = fit(auto, *more)
    assert len(longer) == 2 * len(rows), printed
    assert "(auto)" not in printed  # the run's own


def test_the_length_and_the_rate_of_a_later_recipe_replace_those_of_an_earlier_one(
    fit: Fit, genesis: Genesis, tmp_path: Path
) -> None:
    later, last = tmp_path / "later.yaml", tmp_path / "last.yaml"
    later.write_text("data: {num_epochs: 1}\nschedule: {warmup_share: 0.1}\n")
    last.write_text("trainer: {max_steps: 3}\n")
    options = ("--config", str(later), "--config", str(last))
    printed, rows = fit(EARLIER, *options)
    assert [row["step"] for row in rows] == ["1", "2", "3"], printed
    assert float(rows[-1]["optim/lr_factor"]) < 0.4
    for file, what in (
        (later, "data.num_epochs 1 replaces trainer.max_steps 1000 of"),
        (later, "schedule.warmup_share 0.1 replaces schedule.warmup_updates 50 of"),
        (last, "trainer.max_steps 3 replaces data.num_epochs 1 of"),
    ):
        assert f"{file}: {what}" in printed
    planned = genesis("plan", "--config", str(tmp_path / "fit.yaml"), *options, "--json")
    assert json.loads(planned.out)["run"]["num_steps"] == 3
    assert f"{last}: trainer.max_steps 3 replaces" in planned.err


def test_a_run_that_began_with_lengths_in_updates_resumes_by_the_same_ones_as_shares(fit: Fit) -> None:
    written = {"data.num_epochs": None, "trainer.max_steps": 4, "schedule.total_updates": 4}
    printed, rows = fit(written | {"schedule.warmup_updates": 1})
    assert rows, printed
    shares = {"data.num_epochs": None, "trainer.max_steps": 4, "schedule.total_updates": None}
    printed, _ = fit(shares | {"schedule.warmup_share": 0.5}, "--ckpt_path", "latest")
    assert "schedule.warmup_share, schedule.warmup_updates changed" in printed
    printed, rows = fit(shares | {"schedule.warmup_share": 0.25}, "--ckpt_path", "latest")
    assert rows, printed


def test_tokens_are_a_length_of_steps_with_padding(fit: Fit) -> None:
    printed, rows = fit(EARLIER, "--data.num_tokens", str(4 * BATCH * SEQ_LEN - 1), *SHARE)
    assert int(rows[-1]["step"]) == 4, printed


def test_conversations_are_whole_by_default_and_a_fit_prints_what_is_cut(fit: Fit, tmp_path: Path) -> None:
    """Reported as hiyouga/LlamaFactory#3957, huggingface/trl#5075 and allenai/open-instruct#1876."""
    printed, _ = fit(IMPORTED, "--trainer.max_steps", "1")
    assert "cut, 0 dropped, 0 without a learned token" in printed
    assert "by best_fit in sequences of 96 tokens: 0 cut" in printed
    assert "packing: best_fit" in (tmp_path / "run/config.yaml").read_text()
    printed, _ = fit(IMPORTED, "--data.packing", "chunk", name="chunk")
    assert "by chunk in sequences of 96 tokens: 0 cut" not in printed
    assert "data.packing best_fit keeps whole what fits into a sequence" in printed
    assert "held out for validation" in printed


def test_a_run_that_was_cut_evenly_continues_so_without_the_option(fit: Fit, tmp_path: Path) -> None:
    steps = ("--trainer.max_steps", "2")
    printed, rows = fit(IMPORTED, "--data.packing", "chunk", *steps)
    assert rows, printed
    longer = ("--ckpt_path", "latest", "--trainer.max_steps", "3", "--checkpoint.allow_changed", "[trainer.max_steps]")
    printed, rows = fit(IMPORTED, *longer)
    assert int(rows[-1]["step"]) == 3, printed
    assert "packing: chunk" in (tmp_path / "run/config.resume-1.yaml").read_text()


def test_the_progress_line_has_the_loss_of_its_own_step_and_names_learned_tokens(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOG_LINE_SECONDS", 0.0)
    printed, rows = fit(IMPORTED, "--trainer.max_steps", "4")
    shown = dict(re.findall(r"^step (\d+)/4 .* learned tokens .*loss (\d+\.\d+)$", printed, re.MULTILINE))
    assert shown == {row["step"]: f"{float(row['train/loss']):.4f}" for row in rows}


def test_the_recipe_of_an_import_has_one_length_a_rate_for_adapters_and_a_warm_up_that_fits_every_length() -> None:
    """The rate of all weights for adapters is reported as tloen/alpaca-lora#4 and haotian-liu/LLaVA#1172."""
    shape = DecoderConfig(
        dim=32, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=32, vocab_size=64, max_seq_len=4096
    )
    recipe = build_imported(Path("runs/a"), Path("runs/a/checkpoints/step-00000000"), shape, "hash")
    assert recipe["data"]["num_epochs"] in (2, 3)
    assert not {"max_steps", "max_epochs"} & recipe["trainer"].keys()
    assert not {"total_updates", "warmup_updates"} & recipe["schedule"].keys()
    assert (recipe["data"]["seq_len"], recipe["data"]["global_batch_size"]) == ("auto", "auto")
    assert "packing" not in recipe["data"]  # conversations are kept whole by default
    rates = recipe["model"]["optimizer"]["init_args"]
    assert rates["adapter_lr"] == pytest.approx(10 * rates["lr"])
