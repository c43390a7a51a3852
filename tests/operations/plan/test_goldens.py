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
_GPUS = {"genesis-1b": "2,1,8", "genesis-1b-deep": "2,1"}


# Bills with remedies of 40 and 60 layers take longer than all others.
_SLOW = ("finetune/qwen3.5-397b-lora", "finetune/qwen3.5-397b-to-35b-distill")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in NAMES]
)
def test_the_bill_of_a_recipe_is_its_golden_one(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    gpus = ["--gpus", _GPUS[name]] if name in _GPUS else []
    memory = (
        "141GB"
        if "397b" in name
        else "80GB"
        if name.endswith("8-cards")
        else "48GB"
        if name == "genesis-3b"
        else "24GB"
    )
    assert main(["--config", f"configs/{name}.yaml", "--memory", memory, *gpus]) == 0
    text = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert text == read_golden(f"plan/{name}.txt", text)


def test_every_golden_bill_has_its_recipe() -> None:
    golden = GOLDEN / "plan"
    assert sorted(str(path.relative_to(golden).with_suffix("")) for path in golden.rglob("*.txt")) == NAMES
