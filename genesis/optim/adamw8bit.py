"""AdamW with moments of 8 bits: codes of bytes, and one float32 scale for each block of neighbouring values of a row.

W  width of a row     S  blocks of a row: W / block, rounded up, so that the last one may be shorter

average        uint8 [..., W]      codes of the first moment, from -1 to 1
average_scale  float32 [..., S]    the largest magnitude of each block
root           uint8 [..., W]      codes of the root of the second moment, from 0 to 1
root_scale     float32 [..., S]    the largest value of each block

No block reaches into another row, so that ranks which hold rows hold whole blocks, and any number of ranks restores the
bytes of any other. The root is kept in the place of the square, because both moments then lose values below the same
share of the largest one; and only a root of 0 has the code 0, since a division by a lost one would be an enormous step.

References:
    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, arXiv:2110.02861 (blocks, codes). Li et al.,
    Memory Efficient Optimizers with 4-bit States, 2023, arXiv:2309.01507 (no zero among the second moments).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn.functional import pad

from genesis.base.device import is_host
from genesis.base.errors import UserError
from genesis.model.compilation import choose_compilation, compile_each_shape
from genesis.model.nf4 import build_dynamic_code
from genesis.model.part import ADAPTERS, ParameterGroup
from genesis.optim.adamw import AdamW
from genesis.optim.algorithm import Algorithm, Form, Parts

_LEAST_BLOCK: Final = 16
_CHUNK: Final = 1 << 20
"""Values that are updated at a time where nothing is compiled, which takes some 40 bytes for each."""
_LEAST: Final = 1e-38  # a block of zeros has the scale 0, by which nothing can be divided


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AdamW):
    """AdamW with moments of 8 bits for the weights of matrices and the output weight, and in float32 for the rest.

    Norms, biases, embeddings and adapters are few, or their gradients are 0 in most rows: they are AdamW's.

    Args:
        block: Neighbouring values of a row that share a scale. Ranks that share the columns of a matrix must divide
            them into whole blocks.

    Raises:
        UserError: A value is out of its range.
    """

    moments: ClassVar[tuple[str, ...]] = ("average", "average_scale", "root", "root_scale")

    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < _LEAST_BLOCK:
            raise UserError(f"optimizer.block is {self.block}: it must be at least {_LEAST_BLOCK}, such as 128")

    @property
    def forms(self) -> Mapping[str, Form]:
        """The types and blocks of the moments."""
        codes, scales = Form(torch.uint8), Form(torch.float32, self.block)
        return {"average": codes, "average_scale": scales, "root": codes, "root_scale": scales}

    def of(self, group: ParameterGroup) -> Algorithm:
        """Returns this algorithm for matrices and the output weight, and AdamW with the same options for the rest."""
        if group.kind in ("matrix", "head") and group != ADAPTERS:
            return self
        return AdamW(**{field.name: getattr(self, field.name) for field in fields(AdamW)})

    def update_options(self) -> dict[str, Any]:
        """Returns the options that are the same for all groups."""
        return {"betas": self.betas, "eps": self.eps, "block": self.block}

    def divides(self, options: Mapping[str, Any]) -> bool:
        """Returns False: gradients are scaled before."""
        return False

    def update(self, options: Mapping[str, Any], parts: Parts) -> None:
        """Updates block by block, and adds 1 to the steps."""
        torch._foreach_add_(parts.steps, 1)
        fixed = (options["betas"], options["eps"], options["weight_decay"], options["block"])
        for weight, gradient, step, *moments in zip(
            parts.weights, parts.gradients, parts.steps, *parts.moments, strict=True
        ):
            if not weight.numel():  # a rank may hold no row
                continue
            # The rate changes with each step: as a tensor, it needs no new form of the compiled function.
            rate = torch.full((), options["lr"], dtype=torch.float32, device=weight.device)
            codes = _list_codes(weight.device)
            compiled = _find_compiled(weight.device.type)
            if compiled is not None:
                compiled(weight, gradient, *moments, step, rate, *codes, *fixed)
                continue
            update: Callable[..., None] = update_rows
            num_rows = max(1, _CHUNK * len(weight) // weight.numel())
            for rows in zip(*(one.split(num_rows) for one in (weight, gradient, *moments)), strict=True):
                update(*rows, step, rate, *codes, *fixed)


class Code(NamedTuple):
    """The values of the codes of a moment.

    Args:
        values: float32 [256], in order.
        bounds: The largest relative value of each code but the last, float32 [255].
    """

    values: Tensor
    bounds: Tensor

    def encode(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """Returns the code of each value, relative to the scale of its block."""
        relative = blocks / scale.clamp(min=_LEAST).unsqueeze(-1)
        return torch.bucketize(relative, self.bounds, out_int32=True).to(torch.uint8)


@cache
def _list_codes(device: torch.device) -> tuple[Code, Code]:
    """Returns the codes of the first moment and of the root."""
    signed, unsigned = (torch.tensor(build_dynamic_code(is_signed=is_signed)) for is_signed in (True, False))
    bounds, of_root = ((values[:-1] + values[1:]) / 2.0 for values in (signed, unsigned))
    of_root[0] = 0.0  # what is not 0 stays so
    return Code(signed.to(device), bounds.to(device)), Code(unsigned.to(device), of_root.to(device))


@cache
def _find_compiled(kind: str) -> Callable[..., None] | None:
    """Returns the compiled update for a kind of device that has a compiler for it; None elsewhere."""
    if is_host(kind) or not choose_compilation(kind):
        return None
    return compile_each_shape(update_rows, fullgraph=True)


def update_rows(
    weight: Float[Tensor, "*N W"],
    gradient: Float[Tensor, "*N W"],
    average_codes: UInt8[Tensor, "*N W"],
    average_scale: Float32[Tensor, "*N S"],
    root_codes: UInt8[Tensor, "*N W"],
    root_scale: Float32[Tensor, "*N S"],
    step: Float32[Tensor, ""],
    rate: Float32[Tensor, ""],
    signed: Code,
    unsigned: Code,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    block: int,
) -> None:
    """Updates rows of a weight and their moments in place; float32 arithmetic. The step is counted already."""
    width = weight.shape[-1]

    def divide(values: Tensor) -> Tensor:
        """Returns values [..., W] as blocks [..., S, block], with zeros behind the last ones."""
        padded = pad(values.float(), (0, -width % block))
        return padded.reshape(*padded.shape[:-1], -1, block)

    def join(blocks: Tensor) -> Tensor:
        return blocks.flatten(-2)[..., :width]

    grad = divide(gradient)
    average = torch.lerp(grad, divide(signed.values[average_codes.int()]) * average_scale.unsqueeze(-1), betas[0])
    square = (divide(unsigned.values[root_codes.int()]) * root_scale.unsqueeze(-1)).square()
    root = torch.lerp(grad.square(), square, betas[1]).sqrt()
    first, second = (1.0 - beta**step for beta in betas)
    direction = (average / first) / (root / second.sqrt() + eps)
    decayed = divide(weight) * (1.0 - rate * weight_decay)
    weight.copy_(join(decayed - rate * direction))

    average_scale.copy_(average.abs().amax(-1))
    average_codes.copy_(join(signed.encode(average, average_scale)))
    root_scale.copy_(root.amax(-1))
    root_codes.copy_(join(unsigned.encode(root, root_scale)))
