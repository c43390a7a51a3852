"""The card says what the checkpoint says, and nothing of the machine that it was made on."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from genesis.evaluate.results import Measure, Result, write_result
from genesis.export.card import describe_reading, hide_paths, write_card
from genesis.export.tensors import Source
from genesis.generate.load import load_decoder
from genesis.model.decoder import DecoderConfig
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.base.manifest import Ancestor, read_committed_hash
from genesis_callbacks.checkpoint import Ranks, RunMetadata, SaveTarget, Snapshot, read_manifest, save_blocking
from genesis_callbacks.checkpoint.tagged_json import encode_tagged
from tests.tiny_runs import SHAPE, build_decoder
from tests.tokenizer.test_huggingface import smollm

RECIPE = {
    "run_dir": "/home/somebody/runs/secret-place",
    "ckpt_path": "runs/old/checkpoints/step-00000007",
    "trainer": {"logger": [{"init_args": {"save_dir": "/scratch/somebody", "entity": "somebody"}}], "max_steps": 9},
    "data": {
        "stream": {
            "tokenizer": "tokenizers/of-somebody/ours",
            "sources": [{"name": "web", "paths": ["s3://a-bucket/web/*.jsonl.zst", "C:\\texts\\web"]}],
        }
    },
    "checkpoint": {"monitor": "validation/loss", "run_dir": "../secret-place"},
    "other": "~/notes.txt",
    "profiler": {"class_path": "lightning.pytorch.profilers.SimpleProfiler", "dirpath": "of-somebody/profiles"},
}


def test_a_recipe_has_the_last_component_of_its_paths_alone() -> None:
    assert hide_paths(RECIPE) == {
        "ckpt_path": "step-00000007",
        "trainer": {"max_steps": 9},
        "data": {"stream": {"tokenizer": "ours", "sources": [{"name": "web", "paths": ["*.jsonl.zst", "web"]}]}},
        "checkpoint": {"monitor": "validation/loss"},
        "other": "notes.txt",
        "profiler": {"class_path": "lightning.pytorch.profilers.SimpleProfiler", "dirpath": "profiles"},
    }


def save(
    directory: Path,
    step: int,
    data_state: dict[str, Any],
    identity: dict[str, Any],
    corpus: Path,
    previous: Ancestor | None = None,
) -> Path:
    parts = [
        part
        for name, tensor in build_decoder(step).state_dict().items()
        for part in local_shards(f"model.decoder.{name}", tensor, "parameter")
    ]
    recipe = {"model": {"decoder": SHAPE}, "data": {"corpus": str(corpus)}}
    state, _ = encode_tagged({"trainer": {"CorpusDataModule": data_state}}, "state.0")
    directory.mkdir(parents=True, exist_ok=True)
    target = SaveTarget(directory, Ranks(), origin=RunMetadata(identity, recipe))
    target.continue_from(previous, step - 1)
    return save_blocking(target, lambda: Snapshot(step, {"step": step}, parts, state))


def write(*checkpoints: Path) -> str:
    sources = [Source(path, read_manifest(path)) for path in checkpoints]
    return write_card("tiny", sources, DecoderConfig(**SHAPE), "float32", "huggingface")


def test_the_card_has_what_the_corpus_holds_beside_what_was_consumed_of_it(tiny_corpus: Path, tmp_path: Path) -> None:
    identity = {"tokenizer_hash": open_tokenizer(tiny_corpus).hash, "corpus": tiny_corpus.name}
    state = {"tokens_consumed": {"web": 4321}, "epochs_consumed": {"web": 1.25}}
    path = save(tmp_path / "checkpoints", 1, state, identity, tiny_corpus)
    held = {one["name"]: one for one in json.loads((tiny_corpus / "manifest.json").read_bytes())["train"]}
    card = write(path)
    assert f"| web | 2 | {held['web']['num_documents']} | {held['web']['num_tokens']:,} | 4,321 | 1.25 |" in card
    assert f"| {held['code']['num_tokens']:,} | not recorded | not recorded |" in card
    assert str(tiny_corpus.parent) not in card


def test_the_data_usage_is_known_without_the_corpus(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1, {"tokens_consumed": {"web": 4321}}, {}, tmp_path / "gone")
    card = write(path)
    assert "The corpus was not available" in card
    assert "| web | 4,321 | not recorded |" in card
    assert str(tmp_path) not in card


def test_the_card_names_the_checkpoint_before_and_the_run_that_it_was_forked_from(tmp_path: Path) -> None:
    old = save(tmp_path / "old/checkpoints", 1, {}, {}, tmp_path)
    fork = Ancestor(old.name, read_committed_hash(old), "../../old/checkpoints")
    second = save(tmp_path / "new/checkpoints", 2, {}, {}, tmp_path, fork)
    before = Ancestor(second.name, read_committed_hash(second))
    third = save(tmp_path / "new/checkpoints", 3, {}, {}, tmp_path, before)
    lines = [line for line in write(third).splitlines() if line.lstrip().startswith("- ")]
    assert lines[1:] == [
        f"- `step-00000003`, step 3, manifest `{read_committed_hash(third)}`",
        f"  - after `step-00000002`, manifest `{read_committed_hash(second)}`",
        f"  - after `step-00000001` of the run `old`, manifest `{read_committed_hash(old)}`",
    ]


def test_an_average_names_all_its_checkpoints(tmp_path: Path) -> None:
    paths = [save(tmp_path / "checkpoints", step, {}, {}, tmp_path) for step in (1, 2)]
    card = write(*paths)
    assert "the mean of these 2 checkpoints" in card
    assert all((path / "COMMITTED").read_text() in card for path in paths)


def measure(checkpoint: Path, name: str, question: dict[str, Any], *measures: Measure, digest: str = "") -> None:
    """Files a result as `genesis evaluate` does."""
    digest = digest or read_committed_hash(checkpoint)
    result = Result(checkpoint.name, 1, digest, name, {**question, "dtype": "float32"}, measures)
    write_result(checkpoint.parent.parent / "evaluations", result)


def test_the_card_has_what_was_measured_of_just_this_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1, {}, {}, tmp_path)
    shots = {"kind": "task", "num_fewshot": {"arc": 5}, "limit": None}
    measure(path, "arc-5shot", shots, Measure("arc-5shot", "acc_norm", 0.25, 0.0125, True, 1000))
    few = {"kind": "task", "num_fewshot": {"arc": None}, "limit": 10}
    measure(path, "arc-limit10", few, Measure("arc-limit10", "acc", 0.5, None, True, 10))
    own = {"kind": "task", "num_fewshot": {"arc": 5}, "limit": None, "data_hash": "blake3:rows"}
    measure(path, "arc-own", own, Measure("arc-5shot", "acc_norm", 0.9, None, True, 3))
    bits = Measure("web", "bits_per_byte", 1.23456, None, False, 54321)
    measure(path, "heldout", {"kind": "heldout"}, bits, Measure("web", "loss", 3.3, None, False, 9))
    measure(
        path, "old", {"kind": "heldout"}, Measure("web", "bits_per_byte", 9.9, None, False, 1), digest="blake3:other"
    )
    card = write(path)
    table = card.partition("## Evaluation")[2].partition("\n## ")[0]
    assert "on the checkpoint in float32" in table
    assert table.strip().splitlines()[4:] == [
        "| arc | acc_norm | 0.2500 ± 0.0125 | 5 |  | 1,000 |",
        "| arc | acc | 0.5000 | 0 | 10 | 10 |",
        "| arc (rows of a folder) | acc_norm | 0.9000 | 5 |  | 3 |",
        "| held-out: web | bits_per_byte | 1.2346 |  |  | 54,321 |",
    ]
    (found,) = ModelCard(card).data.eval_results
    assert (found.dataset_name, found.metric_type, found.metric_value) == ("arc", "acc_norm", 0.25)
    assert (found.dataset_config, found.dataset_args) == ("5-shot", {"num_few_shot": 5})
    assert found.metric_args == {"dtype": "float32"}


def test_an_average_has_no_evaluation_of_its_own(tmp_path: Path) -> None:
    paths = [save(tmp_path / "checkpoints", step, {}, {}, tmp_path) for step in (1, 2)]
    for path in paths:
        measure(path, "arc", {"kind": "task"}, Measure("arc", "acc", 0.25, None, True, 10))
    assert "## Evaluation" in write(paths[1])
    card = write(*paths)
    assert "## Evaluation" not in card
    assert "model-index" not in card


def test_an_exported_directory_says_nothing_of_where_it_was_made(exported: Path, run: Path) -> None:
    load_decoder(exported)
    for path in exported.glob("*"):
        if path.suffix in (".md", ".json"):
            assert str(run.parent) not in path.read_text()
            assert str(Path.home()) not in path.read_text()


def test_the_card_says_how_the_exported_tokenizer_reads_a_text_and_no_other(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tokenizer = open_tokenizer(tokenizer_file)
    ours.mkdir()
    write_files(tokenizer.huggingface_files(64) or {}, ours)
    text = describe_reading(tokenizer, ours)
    assert text == (
        "The tokenizer adds bos to the beginning of a text. The name of a control symbol in a text is read as text "
        "(`split_special_tokens`), as in training."
    )
    theirs.mkdir()
    text = describe_reading(open_tokenizer(smollm(theirs)), theirs)
    assert text.startswith("The tokenizer adds nothing to the beginning of a text. The name of a control symbol in a ")
    assert "is read as that symbol; training read it as text" in text
