"""The bill of every recipe, as golden text: a review sees what a change costs."""

from pathlib import Path

import pytest

from genesis.cli.plan import main
from tests.golden.files import GOLDEN, read_golden

REPOSITORY = Path(__file__).parents[3]
CONFIGS = REPOSITORY / "configs"
NAMES = sorted(
    str(path.relative_to(CONFIGS).with_suffix(""))
    for path in (*CONFIGS.glob("*.yaml"), *(CONFIGS / "finetune").glob("*.yaml"))
)
_MEMORY = {"397b": "141GB", "8-cards": "80GB", "genesis-3b": "48GB", "nf4": "12GB", "": "24GB"}
"""A device's memory by a part of the recipe's name."""
_GPUS = {"genesis-1b": "2,1,8", "genesis-1b-deep": "2,1"}


# Bills with remedies of 40 and 60 layers take longer than all others.
_SLOW = ("finetune/qwen3.5-397b-lora", "finetune/qwen3.5-397b-to-35b-distill")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in NAMES]
)
def test_the_bill_of_a_recipe_is_its_golden_one(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "configs").symlink_to(CONFIGS)  # a corpus that a demo has left in the checkout changes a bill
    monkeypatch.chdir(tmp_path)
    gpus = ["--gpus", _GPUS[name]] if name in _GPUS else []
    base = ["--base_dtype", "nf4"] if name.endswith("nf4") else []
    memory = next(memory for words, memory in _MEMORY.items() if words in name)
    assert main(["--config", f"configs/{name}.yaml", "--memory", memory, *gpus, *base]) == 0
    text = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert text == read_golden(f"plan/{name}.txt", text)


def test_every_golden_bill_has_its_recipe() -> None:
    golden = GOLDEN / "plan"
    assert sorted(str(path.relative_to(golden).with_suffix("")) for path in golden.rglob("*.txt")) == NAMES
