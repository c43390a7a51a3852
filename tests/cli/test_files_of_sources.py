"""What the commands that read sources print about files that they read, do not read, and drop from."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.data.corpus import open_corpus
from genesis.tokenizer.open import open_tokenizer
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe
from tests.data.corpus_support import make_texts, make_tokenizer

TEXTS = [text for text in make_texts(60, seed=5) if text.strip()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of a user: three kinds in a folder, behind a link, with what a folder collects in time."""
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "UP.JSONL").write_text("".join(json.dumps({"text": text}) + "\r\n" for text in (*TEXTS[:20], " \n")))
    (folder / "array.json").write_text(json.dumps([{"text": text} for text in TEXTS[20:40]]))
    (folder / "notes.md").write_text("notes")
    (folder / ".ipynb_checkpoints/copy.txt").write_text("copy")
    (elsewhere / "rest.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS[40:]), newline="")
    (folder / "link").symlink_to(elsewhere)
    (folder / "AGAIN.JSONL").symlink_to("UP.JSONL")
    return folder


def write(tmp_path: Path, folder: Path, **more: Any) -> str:
    source = {"name": "web", "paths": [str(folder)], "suffixes": [".jsonl", ".json", ".csv"]}
    path = tmp_path / f"{'-'.join(more)}.yaml"
    path.write_text(yaml.safe_dump({"sources": [source], **more}))
    return str(path)


LINE = (
    "source web: reads 3 files (1 csv, 1 json, 1 jsonl); does not read 1 .md, 1 hidden ({0}/.ipynb_checkpoints/), "
    "1 that are read by another name ({0}/AGAIN.JSONL)"
)


def test_prepare_prints_which_files_it_reads_and_what_it_drops(tmp_path: Path, folder: Path, genesis: Genesis) -> None:
    make_tokenizer(tmp_path)
    config = write(
        *(tmp_path, folder),
        name="corpus",
        out=str(tmp_path),
        tokenizer=str(tmp_path),
        validation_fraction=0,
        num_workers=1,
    )
    outcome = genesis("data", "prepare", "--config", config)
    assert outcome.status == 0
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("source web"))
    assert line == LINE.format(folder)
    assert "source web: dropped 1 document without a text, or with white space alone" in outcome.err
    (source,) = open_corpus(tmp_path / "corpus").train
    tokenizer = open_tokenizer(tmp_path)
    assert source.num_documents == len(TEXTS)
    assert source.num_tokens == sum(len(tokenizer.encode(text)) + 2 for text in TEXTS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<!DOCTYPE html>\n<html>", "the file is an HTML page, as a download without permission gives; get the file"),
        (b'\n <html lang="en"><body>Sign in</body></html>', "the file is an HTML page"),
        (b'{"text": "one"}\r{"text": "two"}\r', "its lines end in CR alone, as on old Macs; write it with LF: tr "),
        (b'{"text": "one"\n', "fix or remove it"),
    ],
)
def test_a_file_that_is_no_json_lines_is_named_as_what_it_is(
    tmp_path: Path, genesis: Genesis, content: bytes, reason: str
) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "web.jsonl").write_bytes(content)
    options = {"name": "corpus", "out": str(tmp_path), "tokenizer": str(tmp_path), "num_workers": 1}
    outcome = genesis("data", "prepare", "--config", write(tmp_path, tmp_path / "web.jsonl", **options))
    assert outcome.status == 2
    assert reason in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("fraction", "advice"),
    [(0.1, "prepare it again with --validation_fraction 0.2 --restart."), (0.2, "give more documents (")],
)
def test_the_advice_for_few_held_out_documents_is_not_the_share_that_was_given(
    tmp_path: Path, folder: Path, genesis: Genesis, fraction: float, advice: str
) -> None:
    make_tokenizer(tmp_path)
    if fraction == 0.2:
        (folder / "array.json").unlink()  # too few are left for any share
    config = write(
        *(tmp_path, folder),
        name="corpus",
        out=str(tmp_path),
        tokenizer=str(tmp_path),
        validation_fraction=fraction,
        num_workers=1,
    )
    outcome = genesis("data", "prepare", "--config", config)
    assert advice in " ".join(outcome.out.split())


def test_training_a_tokenizer_and_cleaning_print_it_too(tmp_path: Path, folder: Path, genesis: Genesis) -> None:
    outcome = genesis(
        "tokenizer", "train", "--config", write(tmp_path, folder, out=str(tmp_path / "t"), vocab_size=310)
    )
    assert outcome.status == 0
    assert LINE.format(folder) in outcome.err
    assert "dropped 1 document without a text, or with white space alone" in outcome.err
    stages = [{"filter": "length", "min_words": 1}]
    local = {"workers": 1}
    outcome = genesis(
        "data",
        "clean",
        "--config",
        write(tmp_path, folder, out=str(tmp_path / "c"), stages=stages, tasks=1, local=local),
    )
    assert outcome.status == 0
    assert LINE.format(folder) in outcome.out
    assert "source web: dropped 1 document without a text, or with white space alone" in outcome.out


@pytest.mark.slow
def test_a_run_from_a_stream_logs_it(
    tmp_path: Path, folder: Path, tiny_corpus: Path, genesis: Genesis, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [{"name": "web", "paths": [str(folder)], "suffixes": [".jsonl", ".json", ".csv"]}]
    stream = {"sources": sources, "tokenizer": str(tiny_corpus), "num_workers": 0, "block_tokens": 200}
    changes = {"data.stream": stream, "data.mix": None, "trainer.max_steps": 2}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), changes)
    assert genesis("fit", "--config", str(recipe)).status == 0
    assert LINE.format(folder) in caplog.text
    assert "data/blank_documents_web" in (tmp_path / "run/metrics.csv").read_text()
