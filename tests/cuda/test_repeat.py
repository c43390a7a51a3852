"""On a real GPU, at 2,048 tokens: two equal fits end with the same bits, and kernels that vary are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model import attention
from genesis.operations.doctor.fits import SIZES, Size, build_strategy, build_trainer, random_windows
from genesis.operations.doctor.probe import Task
from genesis.optim import OptimizerOptions
from genesis.train.module import GenesisModule
from tests.train.test_repeat_proof import attend_in_any_order

# Lightning warns that there is nothing to validate.
pytestmark = [pytest.mark.cuda, pytest.mark.process, pytest.mark.filterwarnings("ignore")]
SIZE = Size(replace(SIZES["tiny"].decoder, max_seq_len=2048), 2)


def fit(
    kind: str, directory: Path, precision: str, *, is_compiled: bool = False, size: Size = SIZE
) -> dict[str, Tensor]:
    """Returns the weights after six steps."""
    trainer = build_trainer(
        Task(kind, "tiny", str(directory)),
        build_strategy(is_compiled),
        6,
        precision=precision,
        deterministic=True,
    )
    module = GenesisModule(size.decoder, OptimizerOptions(name="muon"))
    trainer.fit(module, datamodule=random_windows(size))
    return {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "16-mixed", "bf16-true"])
def test_two_equal_fits_end_with_the_same_bits(kind: str, tmp_path: Path, precision: str, is_compiled: bool) -> None:
    if is_compiled and kind not in ("cuda", "xpu"):
        pytest.skip("inductor makes no code for the device")
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        found.append(fit(kind, tmp_path, precision, is_compiled=is_compiled))
    first, second = found
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("is_compiled", [False, True])
def test_shapes_that_a_process_has_met_before_change_no_bit(kind: str, tmp_path: Path, is_compiled: bool) -> None:
    """As after a resume that begins with a validation, or with a window that is skipped."""
    if is_compiled and kind not in ("cuda", "xpu"):
        pytest.skip("inductor makes no code for the device")
    precision = "bf16-mixed" if kind in ("cuda", "xpu") else "32-true"
    torch._dynamo.reset()
    alone = fit(kind, tmp_path, precision, is_compiled=is_compiled)
    torch._dynamo.reset()
    for rows in (1, 3):
        fit(kind, tmp_path, precision, is_compiled=is_compiled, size=replace(SIZE, micro_batch_size=rows))
    after = fit(kind, tmp_path, precision, is_compiled=is_compiled)
    assert [name for name in alone if not torch.equal(alone[name], after[name])] == []


def test_a_fit_on_kernels_that_add_in_any_order_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attend", attend_in_any_order)
    with pytest.raises(UserError, match="gave other bits when the first micro-batch was computed again"):
        fit(kind, tmp_path, "32-true")
