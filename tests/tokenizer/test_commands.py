import json
import random
import signal
import subprocess
import sys

import pytest

from genesis.cli.main import main
from genesis.tokenizer.open import open_tokenizer


@pytest.fixture
def config(tmp_path):
    (tmp_path / "prose.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    (tmp_path / "code.jsonl").write_text('{"body": "def fox(self):\\n\\treturn dog ▁"}\n' * 50)
    path = tmp_path / "sources.yaml"
    path.write_text(
        f"sources:\n- name: prose\n  paths: [{tmp_path}/prose.txt]\n"
        f"- name: code\n  paths: [{tmp_path}/code.jsonl]\n  text_field: body\n  weight: 3\n"
    )
    return path


def test_train_and_inspect_read_one_file_of_sources(config, tmp_path, capsys):
    assert (
        main(["tokenizer", "train", "--config", str(config), "--out", str(tmp_path / "new"), "--vocab_size", "320"])
        == 0
    )
    tokenizer = open_tokenizer(tmp_path / "new")
    assert tokenizer.hash[:16] in capsys.readouterr().out
    assert main(["tokenizer", "inspect", "--config", str(config), "--tokenizer", str(tmp_path / "new")]) == 0
    page = capsys.readouterr().out
    assert page.count("exact") == 2
    assert "never used: " in page


def test_a_vocabulary_too_large_is_one_line(config, tmp_path, capsys):
    assert main(["tokenizer", "train", "--config", str(config), "--out", str(tmp_path / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "vocab_size 49152 is too large for this text: choose" in line


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_an_existing_tokenizer_is_not_replaced_unasked(name, config, tmp_path, capsys):
    out = tmp_path / "new"
    out.mkdir()
    (out / name).write_text("of another run")
    arguments = ["tokenizer", "train", "--config", str(config), "--out", str(out), "--vocab_size", "320"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"genesis: error: {out} already has a tokenizer ({name}): give another --out, or add --replace"
    assert (out / name).read_text() == "of another run"
    if name == "tokenizer.model":
        assert main([*arguments, "--replace"]) == 0
        assert open_tokenizer(out).vocab_size == 320


@pytest.mark.slow
@pytest.mark.process
def test_an_interrupted_training_of_a_tokenizer_ends_at_once_and_leaves_nothing(tmp_path):
    """SentencePiece does not return to Python while it trains."""
    chooser = random.Random(0)
    words = ("".join(chooser.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(1_500_000))
    (tmp_path / "text.txt").write_text(" ".join(words))
    source = json.dumps([{"name": "text", "paths": [str(tmp_path / "text.txt")]}])
    arguments = ("tokenizer", "train", "--sources", source, "--out", tmp_path / "new", "--vocab_size", "30000")
    command = [sys.executable, "-m", "genesis", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # a line of progress, after two seconds of a stage
            if line.startswith("training 30,000 pieces"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(60)
    assert (process.returncode, err.splitlines()[-1]) == (130, "genesis: interrupted")
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_commands_of_text_import_neither_torch_nor_lightning():
    program = (
        "import sys; import genesis.cli.data, genesis.cli.tokenizer, genesis.data.tokenize_worker; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'datatrove')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
