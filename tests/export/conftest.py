"""The export's import, and the export of it: made once, for each costs seconds."""

from pathlib import Path

import pytest

from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory


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
