"""One run, its export, that one's import, and the export of it: made once, for each costs seconds."""

import random
import shutil
from pathlib import Path

import pytest

from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory
from genesis.export.texts import SCRIPTS
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from tests.export.support import build_decoder, save

WORDS = ("alpha", "beta", "    return", "class ", "def ", "\n\n", "====", "\u00e9t\u00e9", "\u65e5\u672c")


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chooser = random.Random(0)
    texts = ["".join(chooser.choice(WORDS) + str(chooser.randrange(100)) for _ in range(300)) for _ in range(20)]
    options = TokenizerOptions(vocab_size=700)
    return train_tokenizer([*texts, *SCRIPTS.values()], options, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """A run's directory with three checkpoints of other weights, and its tokenizer."""
    directory = tmp_path_factory.mktemp("run")
    shutil.copy(tokenizer_file, directory)
    for step in (1, 2, 3):
        save(directory / "checkpoints", step, build_decoder(step), {"tokenizer_hash": Tokenizer.load(directory).hash})
    return directory


@pytest.fixture(scope="session")
def checkpoint(run: Path) -> Path:
    return run / "checkpoints/step-00000003"


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """In several files."""
    out = tmp_path_factory.mktemp("exported") / "model"
    export_checkpoints([checkpoint], out, ExportOptions(max_file_bytes=60_000))
    return out


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    out = tmp_path_factory.mktemp("imported") / "run"
    import_directory(exported, out, has_tokenizer=True)
    return out


@pytest.fixture(scope="session")
def exported_again(tmp_path_factory: pytest.TempPathFactory, imported: Path) -> Path:
    out = tmp_path_factory.mktemp("again") / "model"
    export_checkpoints([imported / "checkpoints/step-00000000"], out, ExportOptions(max_file_bytes=60_000))
    return out
