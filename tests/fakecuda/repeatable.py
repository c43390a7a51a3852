"""Which operators repeat on CUDA under `torch.use_deterministic_algorithms(True)`, from torch's own list.

Torch describes them by their names in Python; the operators that a step really runs, also in its backward, have other
names. An operator that torch refuses in this mode must not be in a step. One of which torch has a second, deterministic
form is named with it, and so is one that torch does not list although its usual kernel adds by atomics.
"""

import re
from typing import Final

import torch
from torch import Tensor

REFUSED: Final[dict[str, tuple[str, ...]]] = {
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),
    "torch.nn.MaxUnpool2d": ("max_unpool2d",),
    "torch.nn.MaxUnpool3d": ("max_unpool3d",),
    "torch.nn.functional.interpolate": (
        *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
        "upsample_trilinear3d_backward",
    ),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward",),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward",),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward",),
    "torch.nn.NLLLoss": ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_dense_backward",),
    "torch.Tensor.put_": ("put", "put_"),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount",),
    "torch.median": ("median", "nanmedian", "kthvalue"),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.cumsum": ("cumsum of floats", "cumsum_ of floats"),
    "torch.Tensor.scatter_reduce": ("scatter_reduce", "scatter_reduce_"),
    "torch.Tensor.resize_": (),  # of quantised tensors
}
"""What torch refuses in this mode on CUDA, by its name in torch's list: the operators. The loss in particular must not
be torch's own, and `scatter_reduce` is refused for one of its ways and left out for all."""

OTHER_FORM: Final[dict[str, tuple[str, ...]]] = {
    "torch.nn.Conv1d": (),
    "torch.nn.Conv2d": (),
    "torch.nn.Conv3d": (),
    "torch.nn.ConvTranspose1d": (),
    "torch.nn.ConvTranspose2d": (),
    "torch.nn.ConvTranspose3d": (),
    "torch.nn.ReplicationPad1d": (),
    "torch.nn.ReplicationPad2d": (),
    "torch.nn.ReplicationPad3d": (),
    "torch.bmm": (),  # sparse by dense
    "torch.Tensor.__getitem__": (),
    "torch.Tensor.index_put": ("index_put", "index_put_", "_index_put_impl_"),
    "torch.Tensor.put_": (),  # on the CPU
    "torch.Tensor.scatter_add_": ("scatter_add", "scatter_add_"),
    "torch.gather": ("gather_backward",),
    "torch.index_add": ("index_add", "index_add_"),
    "torch.index_select": ("index_select_backward",),
    "torch.repeat_interleave": (),
    "torch.Tensor.index_copy": ("index_copy", "index_copy_"),
    "torch.Tensor.scatter": ("scatter of a tensor", "scatter_ of a tensor"),
    "torch.Tensor.scatter_reduce": (),
    "torch.nn.MaxPool3d": (),
}
"""Of what torch has a second form that repeats, by its name in torch's list: the operators."""

UNLISTED: Final = {
    "_scaled_dot_product_flash_attention_backward": "asks torch for the deterministic kernel",
    "_scaled_dot_product_efficient_attention_backward": "asks torch for the deterministic kernel",
    "_flash_attention_backward": "asks torch for the deterministic kernel",
    "_efficient_attention_backward": "asks torch for the deterministic kernel",
    "torch_attn::_varlen_attn_backward": "asks torch for the deterministic kernel",
    "flex_attention_backward": "each program adds up the gradient of its own block, without atomics",
    "genesis::fa4_backward": "asks FlashAttention for the deterministic kernel",
    "embedding_dense_backward": "sorts the tokens, and adds those of a row in their order",
}
"""Operators that torch does not list although they add up what many threads have, and why they repeat."""

_REFUSED_NAMES: Final = {name for names in REFUSED.values() for name in names}
_OTHER_FORM_NAMES: Final = {name for names in OTHER_FORM.values() for name in names}
_LISTED = re.compile(r"^ *\* :(?:class|func):`([^`]+)`", re.MULTILINE)


def read_torchs_list() -> tuple[set[str], set[str]]:
    """Returns the names in torch's documentation: those that have a second form, and those that are refused."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    first, _, second = text.partition("nondeterministic operations will throw")
    return set(_LISTED.findall(first)), set(_LISTED.findall(second))


def name_operator(func: torch._ops.OpOverload, arguments: tuple[object, ...]) -> str:
    """Returns an operator's name, with what torch's list distinguishes."""
    name = func._schema.name.removeprefix("aten::")
    first = arguments[0] if arguments else None
    if name in ("cumsum", "cumsum_") and isinstance(first, Tensor) and first.dtype.is_floating_point:
        return f"{name} of floats"
    if name in ("scatter", "scatter_") and "src" in func._overloadname:
        return f"{name} of a tensor"
    return name


def is_refused(name: str) -> bool:
    """Returns whether torch refuses an operator on CUDA in this mode."""
    return name in _REFUSED_NAMES


def describe(name: str) -> str:
    """Returns an operator with why it repeats, if its usual kernel does not."""
    if name in _OTHER_FORM_NAMES:
        return f"{name}: torch's deterministic form"
    return f"{name}: {UNLISTED[name]}" if name in UNLISTED else name
