"""The debug protocol on whole recipes: a clean recipe passes, and a fault of its run is caught by name."""

import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import RunEndedError, UserError
from genesis.cli.doctor_recipe import main
from genesis.data.corpus_data import CorpusData
from genesis.export.importing import save_weights
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.recipe import dump_decoder_config
from genesis.operations.doctor import facts
from genesis.operations.doctor.checks import Check
from genesis.operations.doctor.observe import Watch
from genesis.operations.doctor.protocol import Examination, examine
from genesis.optim import AdamW, Parts
from genesis.strategies import wrap
from genesis.strategies.tensor_parallel import RowShare
from genesis.tokenizer.open import open_tokenizer
from genesis.train.module import GenesisModule
from genesis_callbacks.checkpoint import plan
from tests.data.pair_corpora import SEQ_LEN, write_pair_corpus
from tests.operations.doctor.recipes import DECODER, builder, have_room, write_recipe
from tests.outside.test_kto import SHAPE, prepare_answers

pytestmark = [pytest.mark.slow, pytest.mark.process]

ALL = [
    *("sample", "initial loss", "loss", "labels", "documents", "later tokens", "accumulation"),
    *("checkpoint", "loader", "resume", "memory", "overfit", "sharded"),
]


def examine_recipe(recipe: Path) -> Examination:
    directory = recipe.parent / "examination"
    directory.mkdir()
    return examine(builder(recipe), directory, have_room, lambda line: None)


def test_a_fault_of_one_axis_is_found_in_its_checks_alone(
    tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = RowShare.scatter
    monkeypatch.setattr(RowShare, "scatter", lambda share, x: 0.5 * scatter(share, x))
    strategy = {"class_path": "genesis.strategies.Sharded", "init_args": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    found = examine_recipe(write_recipe(tmp_path, tiny_corpus, trainer={"strategy": strategy}))
    assert [check.name for check in found.checks] == [*ALL, "tensor", "pipeline", "axes"]
    assert failures(found).keys() == {"tensor", "axes"}
    assert "tensor_parallel 2" in failures(found)["tensor"].remedy


def failures(found: Examination) -> dict[str, Check]:
    return {check.name: check for check in found.checks if check.status == "failed"}


def test_a_clean_recipe_passes_all_checks_of_the_command(
    tmp_path: Path, tiny_corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, tiny_corpus)
    status = main(["--config", str(recipe), "--json", "report.json"])
    text = capsys.readouterr().out
    report = json.loads(Path("report.json").read_text())
    assert status == 0, text
    assert [check["name"] for check in report["recipe"]["checks"]] == ALL
    assert {check["status"] for check in report["recipe"]["checks"]} == {"passed"}
    assert report["verdict"] == "passed"
    assert str(tmp_path) not in json.dumps(report["recipe"]["checks"])
    assert "0 failed" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "report.json"]  # nothing is left


def lose_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    load = CorpusData.load_state

    def skip(self: CorpusData, state: Any) -> Any:
        note = load(self, state)
        self.data_position += self.options.global_batch_size
        return note

    monkeypatch.setattr(CorpusData, "load_state", skip)


def keep_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    step, kept = GenesisModule.training_step, []

    def training_step(self: GenesisModule, *arguments: Any) -> Any:
        out = step(self, *arguments)
        kept.append(out["loss"])  # with its graph
        return out

    monkeypatch.setattr(GenesisModule, "training_step", training_step)


def lose_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = plan.local_shards

    def without_norm(name: str, *arguments: Any, **options: Any) -> Any:
        return [] if name.endswith("decoder.norm.weight") else shards(name, *arguments, **options)

    monkeypatch.setattr(plan, "local_shards", without_norm)


def average_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap, "_sum_gradients", lambda decoder: None)


def train_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    update = AdamW.update

    def update_a_little(self: AdamW, options: Mapping[str, Any], parts: Parts) -> None:
        update(self, {**options, "lr": 1e-8}, parts)

    monkeypatch.setattr(AdamW, "update", update_a_little)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lose_a_batch, "resume"),
        (keep_losses, "memory"),
        (lose_a_tensor, "checkpoint"),
        (average_gradients, "sharded"),
        (train_nothing, "overfit"),
    ],
)
def test_a_fault_of_the_run_is_caught_by_name(
    tmp_path: Path,
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    expected: str,
) -> None:
    fault(monkeypatch)
    examination = examine_recipe(write_recipe(tmp_path, tiny_corpus))
    found = failures(examination)
    assert expected in found, [check for check in examination.checks if check.name == expected]
    assert found[expected].remedy


# ---- other recipes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """Returns an import whose weights are those of a model that has learned nothing."""
    return write_base(tmp_path_factory.mktemp("base") / "run", tiny_corpus, DecoderConfig(**DECODER))


def write_base(run_dir: Path, corpus: Path, config: DecoderConfig) -> Path:
    decoder = Decoder(config)
    decoder.init_weights(0)
    run_dir.mkdir()
    save_weights(decoder.state_dict(), config, open_tokenizer(corpus), run_dir / "checkpoints")
    return run_dir


@pytest.mark.repeat  # the objective on answers below has adapters
def test_adapters_on_an_untrained_base_fail_by_their_first_loss_alone(
    tmp_path: Path, tiny_corpus: Path, base: Path
) -> None:
    model = {"adapter": {"base": str(base), "rank": 8, "alpha": 16, "dropout": 0.1}}
    found = examine_recipe(write_recipe(tmp_path, tiny_corpus, model=model))
    # Nor do small adapters beside random weights learn a batch by heart.
    assert set(failures(found)) == {"initial loss", "overfit"}, failures(found)
    assert [check.name for check in found.checks] == ALL


def test_a_distillation_fails_by_the_first_loss_of_its_untrained_student_alone(
    tmp_path: Path, tiny_corpus: Path, base: Path
) -> None:
    objective = {
        "class_path": "genesis.objectives.Distillation",
        "init_args": {"teacher": str(base), "top_k": 4, "teacher_share": 0.5},
    }
    recipe = write_recipe(tmp_path, tiny_corpus, model={"objective": objective}, checkpoint={"restore": "weights"})
    recipe.write_text(recipe.read_text() + f"ckpt_path: {base}\n")
    found = examine_recipe(recipe)
    assert set(failures(found)) == {"initial loss"}, failures(found)


@pytest.mark.repeat
def test_preferences_pass(tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    corpus = write_pair_corpus(tmp_path / "pairs")
    shape = {**DECODER, "vocab_size": 400, "max_seq_len": SEQ_LEN}
    run = write_base(tmp_path / "base", corpus, DecoderConfig(**shape))
    objective = {"class_path": "genesis.objectives.DPO", "init_args": {"beta": 0.5}}
    model = {"decoder": shape, "adapter": {"base": str(run), "rank": 4, "alpha": 8}, "objective": objective}
    data = {"corpus": str(corpus), "seq_len": SEQ_LEN}
    found = examine_recipe(write_recipe(tmp_path, corpus, model=model, data=data))
    assert not failures(found), failures(found)
    assert {check.name for check in found.checks if check.status == "does not apply"} == {"loss"}


def test_a_reward_model_computes_what_it_must(tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    corpus = write_pair_corpus(tmp_path / "pairs")
    shape = {**DECODER, "vocab_size": 400, "max_seq_len": SEQ_LEN, "num_scores": 1}
    model = {"decoder": shape, "objective": {"class_path": "genesis.objectives.RewardModel"}}
    data = {"corpus": str(corpus), "seq_len": SEQ_LEN}
    found = examine_recipe(write_recipe(tmp_path, corpus, model=model, data=data))
    passed = {check.name for check in found.checks if check.status == "passed"}
    wanted = {"labels", "documents", "later tokens", "accumulation", "checkpoint", "resume", "overfit", "sharded"}
    assert wanted <= passed, failures(found)


@pytest.mark.parametrize("path", ["tests.outside.kto.KTO", "genesis.objectives.KTO"])
def test_an_objective_on_answers_with_values_learns_one_batch_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("GENESIS_ALLOW_IMPORTS", "tests")
    corpus = prepare_answers(tmp_path)
    shape = dump_decoder_config(SHAPE)
    run = write_base(tmp_path / "base", corpus, SHAPE)
    objective = {"class_path": path, "init_args": {"beta": 1.0}}
    model = {"decoder": shape, "adapter": {"base": str(run), "rank": 4, "alpha": 8}, "objective": objective}
    found = examine_recipe(write_recipe(tmp_path, corpus, model=model, data={"seq_len": SHAPE.max_seq_len}))
    assert not failures(found), failures(found)


# ---- mistakes


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"data": {"corpus": "/no/such/corpus"}}, "/no/such/corpus"),
        ({"model": {"decoder": {**DECODER, "num_heads": 5}}}, "num_heads"),
        ({"data": {"seq_len": 4096}}, "data.seq_len 4096"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(
    tmp_path: Path, tiny_corpus: Path, sections: dict[str, Any], line: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_corpus, **sections)
    with pytest.raises(UserError) as caught:
        examine_recipe(recipe)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "no-such.yaml"], "no such recipe: no-such.yaml"),
        (["--json", "/no/such/a.json"], "no such directory: /no/such"),
        (["--json", "/"], "--json is /, which is no file"),
        (["--dir", "/no/such"], "--dir is /no/such"),
        (["--", "--trainer.max_steps", "3"], "changes a recipe: give one by --config"),
        (["--confg", "a.yaml"], "did you mean --config"),
        (["--parts", "copies"], "--parts"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        main(words)


# ---- interruptions


def left_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".genesis-doctor")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_fit_ends_the_command_and_leaves_nothing(
    tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = Watch.on_train_batch_end

    def interrupted(self: Watch, trainer: Any, *arguments: Any) -> None:
        keep(self, trainer, *arguments)
        if trainer.global_step == 3:
            assert left_in(tmp_path)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Watch, "on_train_batch_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--config", str(write_recipe(tmp_path, tiny_corpus))])
    assert left_in(tmp_path) == []


def test_a_full_disk_is_one_line_that_names_the_save_and_leaves_nothing(
    tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "_WRITTEN_BYTES", 1 << 14)
    monkeypatch.setattr(facts, "_SPARED_BYTES", 1 << 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(RunEndedError, match="File too large") as caught:
            main(["--config", str(write_recipe(tmp_path, tiny_corpus))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path) == []
