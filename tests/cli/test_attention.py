"""`model.attention` is resolved when a run starts, recorded resolved, kept by a run that goes on, and proved."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from genesis.base.errors import RunEndedError, UserError
from genesis.cli import attention
from genesis.cli.attention import build_policy, build_proofs, resolve_attention
from genesis.cli.trainer import read_recipe
from genesis.generate.checkpoint_reference import read_reference
from genesis.model.attend import fa4
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import FLASH, KERNELS, choose_kernel
from genesis.strategies import Replicated
from genesis.strategies.agree import agree_on_kernel
from genesis.train.module import GenesisModule
from genesis_callbacks.base.manifest import MANIFEST_NAME
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.checkpoint.drift import find_drift
from genesis_callbacks.testing import run_ranks
from tests.cli.conftest import Genesis
from tests.golden.files import GOLDEN
from tests.train.support import TINY

SAVED_WITHOUT = GOLDEN / "run-schema-2/step-00000005"
"""Of a recipe from before there was a choice."""
CPU = Place("cpu", None, torch.float32, 64)
AMPERE = Place("cuda", (8, 0), torch.bfloat16, 64)
HOPPER = AMPERE._replace(capability=(9, 0))
TURING = AMPERE._replace(capability=(7, 5))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the lines that the start of a run logs, without the package of fa4."""
    found: list[str] = []
    monkeypatch.setattr(attention, "rank_zero_info", found.append)
    monkeypatch.setattr(fa4, "find_version", lambda: None)
    return found


# ---- runs on the CPU


def test_a_run_records_its_kernel_resolved_and_a_change_is_drift(genesis: Genesis, recipe: Path) -> None:
    run = ("fit", "--config", str(recipe))
    assert genesis(*run, "--model.attention", "mask").status == 0
    run_dir = recipe.parent / "run"
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["model"]["attention"] == "mask"
    saved = json.loads((run_dir / "checkpoints/step-00000004" / MANIFEST_NAME).read_text())["recipe"]
    assert saved["model"]["attention"] == "mask"
    # With auto it goes on with its own, although another kernel is the best here.
    longer = ("--ckpt_path", "latest", "--trainer.max_steps", "6", "--checkpoint.allow_changed", "[trainer.max_steps]")
    assert genesis(*run, *longer).status == 0
    assert yaml.safe_load((run_dir / "config.resume-1.yaml").read_text())["model"]["attention"] == "mask"
    changed = (*run, "--ckpt_path", "latest", "--trainer.max_steps", "6", "--model.attention", "flash")
    refused = genesis(*changed)
    assert refused.status == 2
    assert "model.attention is 'flash' and was 'mask'" in refused.err
    assert "--checkpoint.allow_changed" in refused.err
    assert genesis(*changed, "--checkpoint.allow_changed", "[model.attention]").status == 0


def test_a_kernel_that_the_machine_lacks_is_refused_in_one_line(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--model.attention", "flex")
    assert refused.status == 2
    assert refused.err == (
        "genesis: error: model.attention is flex, but it needs a CUDA device, and this is cpu; give "
        "--model.attention flash, or auto\n"
    )
    unknown = genesis("fit", "--config", str(recipe), "--model.attention", "triton")
    assert unknown.status == 2
    assert "one of auto, fa4, flex, flash, mask" in unknown.err


def test_the_kernel_is_auto_by_default(genesis: Genesis, recipe: Path) -> None:
    outcome = genesis("fit", "--config", str(recipe), "--print_config")
    assert yaml.safe_load(outcome.out)["model"]["attention"] == "auto"


# ---- the choice


def test_the_best_kernel_runs_and_one_line_has_the_reasons_against_better_ones(lines: list[str]) -> None:
    assert resolve_attention("auto", HOPPER, None) == "flex"
    assert lines.pop() == (
        "attention runs by flex; not by fa4: flash-attn-4 is not installed (pip install 'genesis-lm[cuda]')"
    )
    assert resolve_attention("auto", TURING, None) == "mask"
    old = "it needs a GPU of compute capability {} or newer, and this one has 7.5"
    assert lines.pop() == (
        f"attention runs by mask; not by fa4: {old.format('9.0')}; not by flex: {old.format('8.0')}; not by flash: "
        f"{old.format('8.0')}"
    )
    assert resolve_attention("auto", HOPPER, None, is_shown=False) == "flex"
    assert lines == [], "a model of another library attends by itself"
    assert resolve_attention("auto", CPU, None) == "flash"
    assert lines == [], "a CPU has no better kernel"


def test_fa4_is_the_best_where_it_is_installed(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "find_version", lambda: "4.0")
    assert resolve_attention("auto", HOPPER, None) == "fa4"
    assert lines == ["attention runs by fa4 (flash-attn-4 4.0)"]
    assert resolve_attention("auto", AMPERE, None) == "flex"


def test_a_kernel_that_is_named_and_missing_is_refused_with_the_remedy(lines: list[str]) -> None:
    with pytest.raises(UserError, match=r"fa4, but flash-attn-4 is not installed \(pip install 'genesis-lm\[cuda\]'\)"):
        resolve_attention("fa4", HOPPER, None)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        (torch.float32, 64, "flex"),
        (torch.float16, 256, "flex"),
        (torch.bfloat16, 80, "flex"),  # padded by torch
        (torch.bfloat16, 8, "flash"),
        (torch.float32, 8, "mask"),
        (torch.bfloat16, 512, "mask"),
    ],
)
def test_dtype_and_width_decide_which_kernels_there_are(
    lines: list[str], dtype: torch.dtype, head_dim: int, name: str
) -> None:
    assert choose_kernel(AMPERE._replace(dtype=dtype, head_dim=head_dim)).name == name


def test_a_run_that_goes_on_keeps_its_kernel_where_the_machine_has_it(lines: list[str]) -> None:
    saved = {"model": {"attention": "flash"}}
    assert resolve_attention("auto", HOPPER, saved) == "flash"
    assert lines == ["attention runs by flash, as in the checkpoint"]
    assert resolve_attention("auto", CPU, {"model": {"attention": "flex"}}) == "flash"
    assert resolve_attention("mask", HOPPER, saved) == "mask"


@pytest.mark.parametrize(("place", "name"), [(CPU, "flash"), (HOPPER, "flash"), (TURING, "mask")])
def test_a_checkpoint_without_a_kernel_means_what_ran_then(lines: list[str], place: Place, name: str) -> None:
    recipe = read_recipe(read_reference(SAVED_WITHOUT))
    assert recipe is not None
    assert resolve_attention("auto", place, recipe) == name
    now = {**recipe, "model": {**recipe["model"], "attention": name}}

    def find_changes() -> list[str]:
        manifest = read_manifest(SAVED_WITHOUT)
        found = find_drift(manifest, identity={}, recipe=now, versions={}, policy=build_policy(place))
        return [difference.key for difference in found if difference.verdict == "refused"]

    assert find_changes() == []
    now["model"]["attention"] = "flex"
    assert find_changes() == ["model.attention"]


# ---- the proof


@pytest.fixture
def start(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str, str]]:
    """Returns a function that proves the kernel of a run in which some kernels are wrong."""

    def run(name: str, *wrong: str, is_given: bool = False) -> tuple[str, str, str]:
        for kernel in KERNELS.values():
            monkeypatch.setattr(kernel, "_distrusted", set())

        def prove(kernel: str, shape: Any, device: torch.device) -> None:
            assert shape[:4] == (*TINY.attention_heads[:3], 96)
            if kernel in wrong:
                raise RuntimeError(f"attention by {kernel} differs")

        monkeypatch.setattr(attention, "prove_kernel", prove)
        monkeypatch.setattr("genesis.model.device_proofs.prove_kernel", prove)
        model, recipe = GenesisModule(TINY, attention=name), {"model": {"attention": name}}  # type: ignore[arg-type]
        (proof,) = build_proofs(model, recipe, HOPPER, 96, is_given=is_given)
        try:
            proof.prove(torch.device("cuda"))
        except RuntimeError:
            proof.take_slow(torch.device("cuda"))
        agree_on_kernel(model.attention, model.attention_failure)
        return model.attention, recipe["model"]["attention"], proof.slow

    return run


def test_a_kernel_that_is_wrong_gives_way_to_the_next_which_the_recipe_names(start: Any) -> None:
    assert start("flex") == ("flex", "flex", "flash")
    assert start("flex", "flex") == ("flash", "flash", "flash")
    assert start("flash", "flash") == ("mask", "mask", "mask")
    assert FLASH.find_obstacle(HOPPER) == "it gave wrong results on this cuda device"


def test_a_kernel_that_is_named_is_never_replaced(start: Any) -> None:
    with pytest.raises(RunEndedError, match=r"model\.attention is flex, which does not attend correctly on cuda; give"):
        start("flex", "flex", is_given=True)


def test_the_next_kernel_is_proved_too(start: Any) -> None:
    with pytest.raises(RunEndedError, match=r"neither flex nor flash attends correctly on cuda; give .* mask"):
        start("flex", "flex", "flash")


def train_on_two_cards(run_dir: Path) -> tuple[str, bool]:
    """Fits with a proof that fails on rank 1 alone; returns the error, and whether the ranks have agreed on it."""
    model, recipe = GenesisModule(TINY, attention="flash"), {"model": {"attention": "flash"}}
    (proof,) = build_proofs(model, recipe, CPU, 96, is_given=False)

    class ProvesAttention(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer.global_rank == 1:
                proof.take_slow(torch.device("cpu"))

    options = {"callbacks": [ProvesAttention()], "logger": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=Replicated(), default_root_dir=run_dir, **options)
    try:
        trainer.fit(model)
    except RunEndedError as error:
        return str(error), error.ends_all_ranks
    raise AssertionError("it trained")


def test_a_rank_whose_proof_fails_alone_ends_all_ranks_before_the_model_is_built(tmp_path: Path) -> None:
    ours, others = run_ranks(train_on_two_cards, 2, tmp_path)
    assert ours == others
    assert "(flash on rank 0; mask on rank 1)" in ours[0]
    assert ours[1]


def test_a_checkpoint_of_an_earlier_version_with_the_same_kernel_is_no_drift(lines: list[str]) -> None:
    model = GenesisModule(TINY, attention="flash")
    (proof,) = build_proofs(model, {"model": {"attention": "flash"}}, AMPERE, 96, is_given=False)
    manifest = replace(read_manifest(SAVED_WITHOUT), versions={"device.attention": "varlen"})
    now = {f"device.{proof.name}": proof.fast}
    assert now == {"device.attention_kernel": "flash"}
    assert find_drift(manifest, identity={}, recipe={}, versions=now, policy=build_policy(AMPERE)) == []


def test_a_mask_needs_no_proof(lines: list[str]) -> None:
    model = GenesisModule(TINY, attention="mask")
    assert build_proofs(model, {"model": {}}, HOPPER, 96, is_given=False) == ()
