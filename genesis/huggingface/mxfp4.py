"""Weights in MXFP4 in published checkpoints of GPT-OSS: read, and dequantised to bfloat16.

G  experts     O  outputs     K  blocks of 32 inputs     I  inputs, 32 K

A weight is two tensors of bytes: `NAME_blocks` [G, O, K, 16], each byte two values, the first one in its low half, and
`NAME_scales` [G, O, K], an exponent of 2 for each block, from which 127 is subtracted.

References:
    Open Compute Project, OCP Microscaling Formats (MX) Specification, version 1.0, sections 5.3.3 and 5.4.1.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from genesis.base.errors import UserError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES: Final = 16
_BIAS, _NAN = 127, 255
_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PIECE_VALUES: Final = 1 << 24


def is_mxfp4(content: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is that of weights in MXFP4."""
    quantisation = content.get("quantization_config")
    return isinstance(quantisation, Mapping) and quantisation.get("quant_method") == "mxfp4"


def join_mxfp4(tensors: Iterator[tuple[str, Tensor]], scratch: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of files, with those in MXFP4 as one tensor [G, I, O] in bfloat16, as other files have it.

    Args:
        tensors: Name and tensor of everything in the files; on the meta device, shapes alone are computed.
        scratch: A directory for mapped files, which have no name there; None to dequantise into memory.

    Raises:
        UserError: Blocks and scales do not belong together, or a scale is no number.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        kind = next((end for end in (_BLOCKS, _SCALES) if name.endswith(end)), None)
        if kind is None or tensor.dtype != torch.uint8:
            yield name, tensor
            continue
        weight = name.removesuffix(kind)
        found = waiting.setdefault(weight, {})
        found[kind] = tensor
        if len(found) > 1:
            parts = waiting.pop(weight)
            yield weight, _dequantise(weight, parts[_BLOCKS], parts[_SCALES], scratch).mT
    if waiting:
        weight, found = next(iter(waiting.items()))
        missing = next(kind for kind in (_BLOCKS, _SCALES) if kind not in found)
        raise UserError(f"{weight}{missing} is missing, and {weight}{next(iter(found))} is there")


def _dequantise(name: str, blocks: Tensor, scales: Tensor, scratch: Path | None) -> Tensor:
    """Returns the weight [G, O, I], a few experts at a time."""
    if blocks.ndim != 4 or blocks.shape[:3] != scales.shape or blocks.shape[3] != _BLOCK_BYTES:
        raise UserError(
            f"{name}{_BLOCKS} is {list(blocks.shape)} and {name}{_SCALES} is {list(scales.shape)}: these are no blocks "
            f"of {_BLOCK_BYTES} bytes with a scale for each"
        )
    shape = (*blocks.shape[:2], 2 * _BLOCK_BYTES * blocks.shape[2])
    if blocks.device.type == "meta":
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")
    if scratch is None:
        out = torch.empty(shape, dtype=torch.bfloat16)
    else:
        with tempfile.NamedTemporaryFile(dir=scratch) as file:
            out = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=torch.bfloat16).view(shape)
    # All 256 bytes, the value of the low half first.
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    step = max(1, _PIECE_VALUES // math.prod(shape[1:]))
    for start in range(0, len(out), step):
        exponents = scales[start : start + step]
        if bool((exponents == _NAN).any()):
            raise UserError(f"{name}{_SCALES} has scales of {_NAN}, which are no numbers")
        held = pairs[blocks[start : start + step].int()].flatten(3)  # [g, O, K, 32]
        torch.ldexp(held, exponents.int().unsqueeze(3) - _BIAS, out=held)
        out[start : start + step] = held.flatten(2)
    return out
