"""The proof of the gated delta rule's kernels on an accelerator: they give what the computation in chunks gives."""

from typing import Final

import torch
from torch import Tensor

from genesis.model.attend.metadata import document_offsets
from genesis.model.delta_kernel import PACKAGE, distrust_kernel, find_version, run_kernel
from genesis.model.delta_rule import DeltaInputs, chunked
from genesis.model.mixer import KernelProof, compare

_NAME: Final = "linear_attention"
"""The name of the proof in manifests."""
_NUM_TOKENS, _NUM_VALUE_HEADS, _NUM_KEY_HEADS, _WIDTH = 64, 4, 2, 32
_DOCUMENT_LENGTHS = (1, 20, 7, 36)


def list_delta_proofs() -> tuple[KernelProof, ...]:
    """Returns the proof of the kernels, if their package is installed.

    It is long, because Triton tries many forms of each kernel meanwhile.
    """
    found = find_version()
    if found is None:
        return ()
    return (KernelProof(_NAME, f"{PACKAGE} {found}", "chunks", prove_rule, distrust_kernel, is_long=True),)


def prove_rule(device: torch.device) -> None:
    """Compares the kernels of linear layers with the computation in chunks: for documents, a text, and one new token.

    Raises:
        RuntimeError: The results differ, or a kernel fails.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, _NUM_TOKENS, *shape, generator=generator)

    heads, width = _NUM_KEY_HEADS, _WIDTH
    query, key, value = draw(heads, width), draw(heads, width), draw(_NUM_VALUE_HEADS, width)
    decay = -draw(_NUM_VALUE_HEADS).abs()
    inputs = DeltaInputs(query, key, value, decay, draw(_NUM_VALUE_HEADS).sigmoid())
    inputs = DeltaInputs(*(part.to(device, torch.bfloat16) for part in inputs))
    one = DeltaInputs(*(part[:, :1] for part in inputs))
    lengths = torch.tensor(_DOCUMENT_LENGTHS * 2)
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths).view(2, -1).to(device, torch.int32)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    state = torch.zeros(2, _NUM_VALUE_HEADS, width, width, device=device)
    with torch.no_grad():
        found, wanted = run_kernel(inputs, document_offsets(document_ids))[0], chunked(inputs, is_start)[0]
        compare("in linear layers", found, wanted)
        after, state = run_kernel(inputs, None, state)[1], chunked(inputs)[1]
        assert after is not None
        compare("in linear layers", after, state)
        compare("of a new token in linear layers", run_kernel(one, None, state)[0], chunked(one, None, state)[0])
