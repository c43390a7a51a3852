"""Code that a model brings runs in no command, whatever somebody types meanwhile."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from genesis.cli.table import COMMANDS
from genesis.model.adapter import AdapterConfig
from genesis_callbacks.checkpoint import read_manifest
from tests.commands import PIPE, ForkedCommand
from tests.data.corpus_support import write_jsonl
from tests.evaluate.support import write_choices
from tests.planted import plant_code
from tests.serve.support import start
from tests.serve.test_adapters import write_peft
from tests.tiny_runs import build_decoder, save_adapted
from tests.tokenizer.test_huggingface import TEXTS, qwen

SHAPE = {
    **{"vocab_size": 640, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_window_layers": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
"""Widths that NF4 takes."""
SMALL = (
    *("--data.seq_len", "64", "--data.global_batch_size", "1", "--trainer.max_steps", "1"),
    *("--trainer.accelerator", "cpu"),
)
OPENS_NO_MODEL = {
    **dict.fromkeys(("demo", "recipes", "recipes copy", "completion"), "nothing of others"),
    **dict.fromkeys(("tokenizer train", "data clean"), "text alone"),
    "serve": "tried by `start`",
}


def run(*arguments: object, statuses: tuple[int, ...] = (0,)) -> str:
    """Runs a command while `y` is typed, and returns its output."""
    words = [str(word) for word in arguments]
    with ForkedCommand("genesis", *words, stdin=PIPE, stdout=PIPE, stderr=PIPE) as command:
        assert command.stdin is not None
        with command.stdin:
            command.stdin.write("y\n" * 1000)
        out, err = command.communicate()
    assert command.returncode in statuses, f"{words}: {err}"
    return str(out)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Returns a tiny Qwen2 with a tokenizer, a chat template, and code that would leave `it-ran`."""
    directory = tmp_path / "theirs"
    directory.mkdir()
    qwen(directory)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).save_pretrained(directory)
    plant_code(directory, tmp_path / "it-ran")
    return directory


def plant_in_run(directory: Path) -> None:
    plant_code(directory, directory.parent / "it-ran")
    (directory / "config.json").unlink()  # a run has none


def prepare(theirs: Path) -> Path:
    """Prepares a corpus by a model's tokenizer."""
    root = theirs.parent
    write_jsonl(root / "web.jsonl", TEXTS)
    sources = json.dumps([{"name": "web", "paths": [str(root / "web.jsonl")]}])
    run("data", "prepare", "--name", "web", "--out", root / "corpora", "--tokenizer", theirs, "--sources", sources)
    return root / "corpora/web"


@pytest.mark.process
@pytest.mark.slow
def test_code_of_a_model_runs_in_no_command_that_opens_it(theirs: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    own, back, corpora = tmp_path / "own", tmp_path / "back", tmp_path / "corpora"
    lines = run("import", theirs, own).splitlines()
    (line,) = [line for line in lines if line.startswith("code of the model was not run: ")]
    assert "auto_map in config.json" in line
    assert "configuration_planted.py" in line
    run("import", theirs, tmp_path / "weights", "--no_tokenizer", "--proof", "weights")
    plant_in_run(own)
    prepare(theirs)
    sources = json.dumps([{"name": "web", "paths": [str(tmp_path / "web.jsonl")]}])
    run("tokenizer", "inspect", "--tokenizer", theirs, "--sources", sources, statuses=(0, 1))
    corpus, tokens = corpora / "web", next(corpora.glob("web/train/web/*.ds"))
    run("data", "adopt", tokens, "--name", "mine", "--out", corpora, "--tokenizer", theirs)
    for command in (("data", "plan"), ("data", "inspect"), ("data", "verify")):
        run(*command, corpus, *(("--seq_len", "64") if command[1] == "plan" else ()))
    run("generate", own, "--prompt", "All", "--max_new_tokens", "1", "--device", "cpu")
    run("evaluate", own, "--heldout", tmp_path / "web.jsonl", "--device", "cpu")
    run("evaluate", own, "--tasks", write_choices(tmp_path / "animals", num_rows=1), "--device", "cpu")
    run("export", own, tmp_path / "own.gguf", "--gguf", "f16")
    run("export", own, back)
    plant_code(back, marker)
    proof = json.loads((back / "proof.json").read_text())
    (back / "proof.json").write_text(json.dumps({**proof, "files": hash_again(back, proof["files"])}))
    run("generate", back, "--prompt", "All", "--max_new_tokens", "1", "--device", "cpu")
    run("import", back, tmp_path / "again")
    run("release", back, tmp_path / "released", "--repo", "a/b", "--license", "mit", "--dry_run", statuses=(0, 2))
    run("data", "distill", corpora / "web", own, "--seq_len", "64", "--top_k", "4", "--device", "cpu")
    for place in (own, back):
        with start(place, told=None) as server:
            (model, *_) = server.ask("/v1/models")[1]["data"]
            status, _, _ = server.ask("/v1/completions", {"model": model["id"], "prompt": "All", "max_tokens": 1})
            assert status == 200
    assert not marker.exists()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_code_in_a_run_runs_in_no_command_that_reads_it(theirs: Path, tmp_path: Path) -> None:
    own, tuned = tmp_path / "own", tmp_path / "tuned"
    run("import", theirs, own)
    plant_in_run(own)
    recipe = ("--config", own / "recipe.yaml", "--data.corpus", prepare(theirs), *SMALL)
    run("fit", *recipe, "--run_dir", tuned)
    plant_in_run(tuned)
    run("validate", *recipe, "--ckpt_path", own)
    run("plan", *recipe, statuses=(0, 1))
    run("model", "describe", "--config", own / "recipe.yaml")
    run("model", "add-tokens", own, tmp_path / "more", "<|more|>")
    for command in (
        *(("checkpoint", "show"), ("checkpoint", "verify"), ("checkpoint", "list"), ("checkpoint", "repair")),
        *(("checkpoint", "prune"), ("report",), ("runs",), ("crashes",)),
    ):
        run(*command, tuned, *(("--keep_last", "1") if command[-1] == "prune" else ()), statuses=(0, 1))
    run("checkpoint", "to-lightning", tuned, tmp_path / "stock.ckpt")
    run("upcycle", own, tmp_path / "experts", "--experts", "2", "--top_k", "2", statuses=(0, 2))
    run("checkpoint", "diff", own, tuned, statuses=(0, 1))
    run("mirror", tuned, tmp_path / "mirror", "--once")
    run("mirror", "restore", tmp_path / "mirror", tmp_path / "restored")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_code_of_a_model_runs_in_no_command_that_runs_others(theirs: Path, tmp_path: Path) -> None:
    chats = [[("user", f"What is {number}?"), ("assistant", f"It is {number}.")] for number in range(60)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuned = tmp_path / "tuned"
    run("finetune", theirs, tmp_path / "chat.jsonl", "--out", tuned, "--proof", "weights", "--", *SMALL)
    for place in (tuned / "base", tuned / "run"):
        plant_in_run(place)
    recipe = ("--config", tuned / "base/recipe.yaml")
    fit = ("--data.corpus", tuned / "corpus", *SMALL)
    run("doctor", *recipe, "--", *fit, statuses=(0, 1))
    steps = ("--trainer.max_steps", "4", "--checkpoint.every_n_steps", "2")
    run("rehearse", *recipe, "--kills", "1", "--dir", tmp_path / "rehearsal", "--", *fit, *steps, statuses=(0, 1))
    run("supervise", "--", "fit", *recipe, *fit, "--run_dir", tmp_path / "supervised")
    assert not (tmp_path / "it-ran").exists()


def test_every_command_is_tried_here_that_opens_something_of_others() -> None:
    source = Path(__file__).read_text()
    untried = {command.name for command in COMMANDS if '", "'.join(command.name.split()).join('""') not in source}
    assert untried - OPENS_NO_MODEL.keys() == set()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_code_of_a_model_does_not_run_in_transformers_decoder(theirs: Path, tmp_path: Path) -> None:
    foreign, continued = tmp_path / "foreign", tmp_path / "continued"
    recipe = ("--config", foreign / "recipe.yaml", "--data.corpus", prepare(theirs), *SMALL)
    assert "auto_map in config.json" in run("import", theirs, foreign, "--as", "transformers")
    plant_in_run(foreign)
    run("fit", *recipe, "--run_dir", continued)
    plant_in_run(continued)
    run("evaluate", continued, "--heldout", tmp_path / "web.jsonl", "--device", "cpu")
    run("export", continued, tmp_path / "back")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_code_of_a_model_does_not_run_beside_adapters_of_a_base_in_nf4(theirs: Path, tmp_path: Path) -> None:
    small, tuned = tmp_path / "small", tmp_path / "tuned"
    recipe = ("--config", small / "recipe.yaml", "--data.corpus", prepare(theirs), *SMALL)
    run("import", theirs, small, "--dtype", "nf4")
    plant_in_run(small)
    run("fit", *recipe, "--model.adapter.rank", "2", "--run_dir", tuned)
    plant_in_run(tuned)
    run("generate", tuned, "--prompt", "All", "--max_new_tokens", "1", "--device", "cpu")
    run("evaluate", tuned, "--heldout", tmp_path / "web.jsonl", "--device", "cpu")
    run("export", tuned, tmp_path / "peft", "--adapter", "--base_name", str(theirs))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.process
@pytest.mark.slow
def test_code_of_an_adapter_and_of_its_base_runs_in_no_command_that_opens_them(own_run: Path, tmp_path: Path) -> None:
    base, marker = own_run / "checkpoints/step-00000001", tmp_path / "it-ran"
    options: dict[str, Any] = {"rank": 2, "alpha": 4.0, "include": ["*.attention.*"]}
    decoder = build_decoder(1)
    tuned = save_adapted(tmp_path / "tuned/checkpoints", base, decoder, read_manifest(base).identity, **options)
    theirs = write_peft(tmp_path / "theirs", decoder, AdapterConfig(**options))
    content = json.loads((theirs / "adapter_config.json").read_text())
    content |= {"auto_mapping": {"base_model_class": "PlantedModel", "parent_library": "modeling_planted"}}
    content |= {"base_model_name_or_path": str(theirs), "revision": "main"}
    (theirs / "adapter_config.json").write_text(json.dumps(content))
    for place in (theirs, own_run, tuned, base):
        plant_code(place, marker)
    with start(base, "--adapter", f"poet={theirs}", "--adapter", f"own={tuned}", PYTHONPATH=str(theirs)) as server:
        models = [model["id"] for model in server.ask("/v1/models")[1]["data"]]
        asked = [{"model": model, "prompt": "alpha", "max_tokens": 1} for model in models]
        assert [server.ask("/v1/completions", body)[0] for body in asked] == [200] * len(models)
        assert len(models) >= 3
    run("generate", tuned, "--prompt", "alpha", "--max_new_tokens", "1", "--device", "cpu")
    run("generate", theirs, "--prompt", "alpha", "--device", "cpu", statuses=(2,))
    run("export", base, tmp_path / "whole")
    plant_code(tmp_path / "whole", marker)
    run("export", tuned, tmp_path / "peft", "--adapter", "--base_name", str(tmp_path / "whole"))
    run("export", tuned, tmp_path / "none", "--adapter", "--base_name", str(theirs), statuses=(2,))
    run("import", theirs, tmp_path / "imported", statuses=(2,))
    assert not marker.exists()


def hash_again(directory: Path, names: Iterable[str]) -> dict[str, object]:
    """Returns what the proof of an export lists, as a stranger can write it."""
    contents = {name: (directory / name).read_bytes() for name in names}
    return {
        name: {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
