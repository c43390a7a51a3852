"""The gated delta rule by the kernels of flash-linear-attention, on CUDA where that package is installed.

Letters as in `delta_rule`.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from genesis.model.delta_rule import DeltaInputs

PACKAGE: Final = "flash-linear-attention"
_MODULE: Final = "fla.ops.gated_delta_rule"
_DTYPES: Final = (torch.bfloat16, torch.float16)
_distrusted_devices: set[str] = set()


@cache
def find_version() -> str | None:
    """Returns the version of the installed package; None if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def suits_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the package is installed, and its kernels take this dtype and have given correct results on this device.

    Args:
        device: The device of the inputs.
        dtype: The dtype of queries, keys and values; the kernels refuse float32.
    """
    is_trusted = device.type == "cuda" and device.type not in _distrusted_devices
    return is_trusted and dtype in _DTYPES and find_version() is not None


def distrust_kernel(device: torch.device) -> None:
    """Makes linear layers on this type of device compute in chunks from now on, after a kernel gave wrong results."""
    _distrusted_devices.add(device.type)


def _import_kernels() -> Any:
    if torch.are_deterministic_algorithms_enabled():
        pin_triton_choices()
    return import_module(_MODULE)


@cache
def pin_triton_choices() -> None:
    """Makes Triton's autotuner take the first variant of a kernel, for the rest of this process.

    It would take the fastest in a measurement, which differs between starts; other variants add in another order. A
    variant that a device has no room for fails in the proof of the kernels, and the slower way is taken.
    """
    autotuner: Any = import_module("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs

    def take_first(self: Any, *arguments: Any, **options: Any) -> Any:
        return prune(self, *arguments, **options)[:1]

    autotuner.prune_configs = take_first


def run_kernel(
    inputs: DeltaInputs,
    offsets: Int32[Tensor, " num_documents+1"] | None = None,
    state: Float[Tensor, "B H E F"] | None = None,
) -> tuple[Float[Tensor, "B S H F"], Float[Tensor, "B H E F"] | None]:
    """Returns the outputs, and the state after the last token if `state` is given.

    Args:
        inputs: Queries, keys, values, decays, betas.
        offsets: Where documents begin in the flattened batch, and its end; None if rows are one document each.
        state: The state before the first token of each row, with rows of one document; None for zeros.
    """
    assert offsets is None or state is None, "a row that continues a state is one document"
    kernels = _import_kernels()
    shape = inputs.value.shape
    query, key, value, decay, beta = inputs
    decay, beta = decay.float(), beta.to(value.dtype)
    given = [query, key, value, decay, beta]
    if offsets is not None:  # the kernel takes documents of any lengths in one row
        given = [part.flatten(0, 1).unsqueeze(0) for part in given]
    is_step = state is not None and shape[1] == 1
    run = kernels.fused_recurrent_gated_delta_rule if is_step else kernels.chunk_gated_delta_rule
    read, after = run(
        **dict(zip(("q", "k", "v", "g", "beta"), given, strict=True)),
        initial_state=state,
        output_final_state=state is not None,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if offsets is None else offsets.long(),
    )
    return read.view(shape), after
