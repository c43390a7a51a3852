"""Weights in MXFP4: every value is that of transformers, and what does not belong together is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from genesis.base.errors import UserError
from genesis.huggingface import mxfp4
from genesis.huggingface.mxfp4 import join_mxfp4

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def draw(num_experts: int = 5, outputs: int = 6, blocks: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (num_experts, outputs, blocks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(250, (num_experts, outputs, blocks), dtype=torch.uint8, generator=generator)
    return packed, scales


@pytest.mark.parametrize("has_file", [True, False])
def test_every_value_is_that_of_transformers(has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "_PIECE_VALUES", 2 * 6 * 96)  # two experts at a time, and one that is left
    packed, scales = draw()
    other = torch.zeros(2)
    tensors = iter([(f"{NAME}_scales", scales), ("other", other), (f"{NAME}_blocks", packed)])
    found = dict(join_mxfp4(tensors, tmp_path if has_file else None))
    assert found.keys() == {"other", NAME}
    wanted = convert_moe_packed_tensors(packed, scales)
    assert found[NAME].dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(found[NAME], wanted)
    assert list(tmp_path.iterdir()) == []
    sizes = {f"{NAME}_blocks": packed.to("meta"), f"{NAME}_scales": scales.to("meta")}
    assert dict(join_mxfp4(iter(sizes.items()), None))[NAME].shape == wanted.shape


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (None, (5, 6, 3), "gate_up_proj_blocks is missing"),
        ((5, 6, 3, 16), None, "gate_up_proj_scales is missing"),
        ((5, 6, 3, 16), (5, 6, 4), r"are no blocks of 16 bytes with a scale for each"),
        ((5, 6, 3, 8), (5, 6, 3), r"_blocks is \[5, 6, 3, 8\]"),
        ((6, 3, 16), (6, 3), r"_blocks is \[6, 3, 16\]"),
        ((1, 2, 1, 16), (1, 2, 1), "scales of 255, which are no numbers"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    blocks: tuple[int, ...] | None, scales: tuple[int, ...] | None, message: str
) -> None:
    sizes = {"_blocks": blocks, "_scales": scales}
    full = (torch.full(size, 255, dtype=torch.uint8) for size in sizes.values() if size is not None)
    tensors = zip((NAME + end for end, size in sizes.items() if size is not None), full, strict=True)
    with pytest.raises(UserError, match=message):
        dict(join_mxfp4(tensors, None))
