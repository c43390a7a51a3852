"""Every file of `configs/` resolves, and to what it did."""

from pathlib import Path

import pytest

from genesis.huggingface.shape import find_family
from genesis.model.recipe import read_decoder_config
from tests.cli.conftest import Genesis
from tests.golden.files import GOLDEN, read_golden

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))
PRINT = "--print_config"


def command_of(name: str) -> list[str]:
    """Returns the command that takes the file `name`: recipes lie at the top and in finetune, parts elsewhere."""
    file = str(CONFIGS / name)
    match Path(name).parent.name:
        case "" | "finetune":
            return ["fit", "--config", file, PRINT]
        case "loggers" | "strategies":
            return ["fit", "--config", str(CONFIGS / "demo.yaml"), "--config", file, PRINT]
        case "model":
            return ["model", "describe", "--config", file, "--json"]
        case "clean":
            return ["data", "clean", "--config", file, PRINT]
        case "corpora":
            return ["data", "prepare", "--config", file, PRINT]
        case "tokenizers":
            return ["tokenizer", "train", "--config", file, PRINT]
        case folder:
            raise AssertionError(f"configs/{folder}: no command is known here that takes its files")


@pytest.mark.parametrize("name", NAMES)
def test_a_config_resolves_to_its_golden_text(
    name: str, genesis: Genesis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = genesis(*command_of(name))
    assert (outcome.status, outcome.err) == (0, "")
    # The first line of a recipe may be a comment with Lightning's version.
    text = "".join(line for line in outcome.out.splitlines(keepends=True) if not line.startswith("#"))
    assert str(REPOSITORY) not in text
    assert str(Path.home()) not in text
    assert text == read_golden(f"configs/{name}", text)


def test_every_golden_config_has_its_file() -> None:
    golden = GOLDEN / "configs"
    assert sorted(str(path.relative_to(golden)) for path in golden.rglob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if Path(name).parent.name in ("", "model")])
def test_the_model_of_every_config_is_exported_for_transformers(name: str) -> None:
    find_family(read_decoder_config(CONFIGS / name))
