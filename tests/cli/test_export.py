"""`genesis export` and `genesis import`: training and validation go on from an import; bad input is one line."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
import yaml
from safetensors.torch import save_file

from genesis.cli.main import main
from genesis.export.recipe import write_recipe as write_import_recipe
from genesis.export.texts import SCRIPTS
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.shape import read_shape, write_shape
from genesis.model.decoder import Decoder
from genesis.model.recipe import build_decoder_config, read_decoder_config
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.sentencepiece import SentencePieceTokenizer
from genesis_callbacks.checkpoint import read_tensors
from tests.cli.conftest import Genesis, Outcome
from tests.cli.test_bad_input import check_is_one_line
from tests.cli.tiny import build_recipe, write_recipe
from tests.tiny_runs import build_decoder, save


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    """A directory of Hugging Face's layout with the tiny model and the tiny corpus's tokenizer."""
    directory = tmp_path_factory.mktemp("llama")
    config = read_decoder_config(write_recipe(directory / "recipe.yaml", build_recipe(tiny_corpus, directory)))
    decoder = Decoder(config)
    decoder.init_weights(11)
    save_file(LLAMA.to_theirs(decoder.state_dict()), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(write_shape(LLAMA, config)))
    shutil.copy(tiny_corpus / "tokenizer.model", directory)
    return directory


@pytest.fixture(scope="module")
def imported(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", str(llama), str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.repeat  # the run by the import's own recipe
def test_training_begins_with_the_weights_of_an_import(
    genesis: Genesis, imported: Path, recipe: Path, tmp_path: Path
) -> None:
    checkpoint = imported / "checkpoints/step-00000000"
    arguments = ["--ckpt_path", str(checkpoint), "--checkpoint.restore", "weights", "--model.optimizer.lr", "1e-20"]
    outcome = genesis("fit", "--config", str(recipe), *arguments)
    assert outcome.status == 0, outcome.err
    before, after = read_tensors(checkpoint), read_tensors(tmp_path / "run/checkpoints/step-00000004", prefix="model.")
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in before)


def test_training_goes_on_from_an_import_by_its_own_recipe(
    genesis: Genesis, imported: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    content = yaml.safe_load((imported / "recipe.yaml").read_text())
    assert content["data"]["tokenizer_hash"] == open_tokenizer(tiny_corpus).hash
    recipe = ("--config", str(imported / "recipe.yaml"), "--data.corpus", str(tiny_corpus))
    short = ("--trainer.max_steps", "2", "--trainer.accelerator", "cpu", "--checkpoint.mode", "sync")
    options = (*recipe, *short, "--run_dir", str(tmp_path / "run"), "--data.global_batch_size", "4")
    outcome = genesis("fit", *options, "--checkpoint.every_n_steps", "1", "--model.optimizer.lr", "1e-20")
    assert outcome.status == 0, outcome.err
    before = read_tensors(imported / "checkpoints/step-00000000")
    after = read_tensors(tmp_path / "run/checkpoints/step-00000002", prefix="model.")
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in before)


def test_a_recipe_of_an_import_without_tokenizer_names_none(llama: Path, tmp_path: Path) -> None:
    _, config = read_shape(llama)
    write_import_recipe(tmp_path / "run", tmp_path, "checkpoints/step-00000000", config, None)
    text = (tmp_path / "recipe.yaml").read_text()
    content = yaml.safe_load(text)
    assert "imported without a tokenizer" in text
    assert "tokenizer_hash" not in content["data"]
    assert content["ckpt_path"] == str(tmp_path / "run/checkpoints/step-00000000")
    assert build_decoder_config(content["model"]["decoder"], "the recipe") == config


def test_an_import_is_validated_and_continues_text(genesis: Genesis, imported: Path, recipe: Path) -> None:
    outcome = genesis("validate", "--config", str(recipe), "--ckpt_path", str(imported / "checkpoints/step-00000000"))
    assert outcome.status == 0, outcome.err
    assert "validation/loss" in outcome.out
    outcome = genesis("generate", str(imported), "--prompt", "line 3", "--max_new_tokens", "3", "--device", "cpu")
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("line 3")


def test_the_command_exports_a_run_and_says_what_was_proved(genesis: Genesis, imported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = genesis("export", str(imported), str(out), "--dtype", "bfloat16")
    assert outcome.status == 0, outcome.err
    for words in ("step-00000000 in bfloat16", "values bit-equal", "texts with equal ids", "1 of 1 token equal"):
        assert words in outcome.out
    assert json.loads((out / "config.json").read_bytes())["dtype"] == "bfloat16"
    check_is_one_line(genesis("export", str(imported), str(out)), str(out), "already exists")


def test_bad_input_of_export_is_one_line(genesis: Genesis, imported: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    check_is_one_line(genesis("export", str(tmp_path / "nowhere"), out), "nowhere", "no such directory")
    check_is_one_line(genesis("export", str(imported), out, "--dtype", "int8"), "int8", "bfloat16")
    check_is_one_line(genesis("export", str(imported), out, "--average", "2"), "--average is 2", "has 1 checkpoint")
    check_is_one_line(genesis("export", str(imported), out, "--average", "0"), "--average is 0")
    check_is_one_line(genesis("export", str(imported), out, "--best"), "no best checkpoint")
    check_is_one_line(genesis("export", str(imported), out, "--max_file_bytes", "0"), "max_file_bytes is 0")
    check_is_one_line(genesis("export", str(imported), out, "--tokeniser", "x"), "did you mean --tokenizer")
    shutil.copytree(imported / "checkpoints/step-00000000", tmp_path / "copy")
    check_is_one_line(genesis("export", str(tmp_path / "copy"), out, "--average", "2"), "is in none")
    damaged = tmp_path / "step-00000000"
    shutil.copytree(imported / "checkpoints/step-00000000", damaged)
    shard = next(damaged.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    check_is_one_line(genesis("export", str(damaged), out), shard.name, "its bytes have changed", status=1)
    assert not Path(out).exists()


def test_a_tokenizer_without_an_exact_fast_form_is_refused_and_nothing_is_left(
    genesis: Genesis, tmp_path: Path
) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in SCRIPTS.values() for _ in range(20)]),
        model_writer=model,
        model_type="unigram",  # chooses pieces by their likelihood, and not by merges in their order
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=3,
        minloglevel=3,
    )
    run = tmp_path / "run"
    save(run / "checkpoints", 1, build_decoder(1), {"tokenizer_hash": SentencePieceTokenizer(model.getvalue()).hash})
    (run / "tokenizer.model").write_bytes(model.getvalue())
    check_is_one_line(genesis("export", str(run), str(tmp_path / "out")), "no exact fast form")
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.slow
def test_a_disk_without_room_is_told_and_nothing_is_left(imported: Path, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    unshare = [shutil.which("unshare") or "unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    command = f'{mount} && "$0" "$@"; status=$?; ls -A {tmp_path}; exit $status'
    export = [sys.executable, "-m", "genesis", "export", str(imported), str(tmp_path / "out")]
    done = subprocess.run([*unshare, command, *export], capture_output=True, text=True, timeout=300, check=False)
    outcome = Outcome(done.returncode, done.stdout, done.stderr)
    check_is_one_line(outcome, f"{tmp_path} has 1,048,576 free: free space, or choose another disk")
    assert done.stdout == ""


def test_bad_input_of_import_is_one_line(genesis: Genesis, llama: Path, imported: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    check_is_one_line(genesis("import", str(tmp_path / "nowhere"), out), "nowhere", "Hugging Face")
    check_is_one_line(genesis("import", str(llama), str(imported)), str(imported), "already exists")
    (tmp_path / "config.json").write_text("{")
    check_is_one_line(genesis("import", str(tmp_path), out), "config.json", "is not JSON")
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    check_is_one_line(genesis("import", str(tmp_path), out), "has no tokenizer.model", "--no_tokenizer")
    check_is_one_line(genesis("import", str(tmp_path), out, "--no_tokenizer"), "neither model.safetensors nor")
    assert not Path(out).exists()


def test_what_no_gguf_is_written_of_is_one_line(genesis: Genesis, imported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = [
        (("--gguf", "Q4_K_M"), ("Q4_K_M", "--gguf f16", f"llama-quantize {out}/out-F16.gguf out-Q4_K_M.gguf Q4_K_M")),
        (("--gguf", "q8_0", "--dtype", "bfloat16"), ("--dtype", "leave out one of both")),
        (("--gguf", "q8_0", "--adapter"), ("--adapter", "leave out one of both")),
        (("--gguf", "q8_0", "--format", "safetensors"), ("--format", "leave out one of both")),
    ]
    for options, words in refused:
        check_is_one_line(genesis("export", str(imported), str(out), *options), *words)
    assert not out.exists()


def test_without_the_extra_the_command_names_it(
    genesis: Genesis, imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genesis.cli.export.find_spec", lambda name: None)
    outcome = genesis("export", str(imported), str(tmp_path / "out"))
    check_is_one_line(outcome, "needs transformers", "genesis-lm[export]")
    ours = (
        *("genesis.cli.export", "genesis.export.export", "genesis.export.adapter", "genesis.export.reading"),
        *("genesis.export.tokenizer", "genesis.tokenizer.huggingface"),
    )
    for module in (*ours, "tokenizers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    outcome = genesis("export", str(imported), str(tmp_path / "out"))
    check_is_one_line(outcome, "needs tokenizers", "genesis-lm[export]")
