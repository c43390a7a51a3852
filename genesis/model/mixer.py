"""The part of a block in which tokens read earlier tokens, which a configuration chooses.

A mixer is a file: a frozen dataclass derived from `SequenceMixerConfig`, and a module derived from `SequenceMixer`. The
configuration decides what the rest of the program asks of it: what its forward knows about documents, what it keeps of
earlier tokens in a cache, which kernels it needs. The module answers for its parameters, like every part.

B  sequences of a micro-batch     S  tokens of a sequence     D  model width
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from genesis.model.attend.metadata import CachedTokens
from genesis.model.attend.table import TORCH_KERNEL
from genesis.model.cut import MatrixShares
from genesis.model.exchange import HeadExchange
from genesis.model.kv_cache import CacheTensor
from genesis.model.part import Part


class ForwardTokens(NamedTuple):
    """The tokens of a forward, from which a mixer makes its metadata: once for all of its layers."""

    x: Float[Tensor, "B S D"]
    """The input of the first block, whose device, dtype and sizes are used."""
    document_ids: Int32[Tensor, "B S"] | None = None
    """Which document of its row each token belongs to; None for one document per row."""
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """Where documents begin in the flattened batch, and its end. If it is None, a mixer that reads it has to compute it
    from `document_ids`, for which the host waits for the device."""
    cached: CachedTokens | None = None
    """The lengths of the rows in a cache, which holds one document per row; None without a cache."""
    kernel: str = TORCH_KERNEL
    """The kernel of attention without a cache, by its name in `genesis.model.attend.table`."""


class AttentionHeads(NamedTuple):
    """The heads of a mixer that attends by the kernels of `genesis.model.attend`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_sinks: bool = False


# bfloat16 has 8 bits of mantissa, and two kernels add in different orders.
TOLERANCE: Final = 2e-2
GRADIENT_TOLERANCE: Final = 4e-2


class KernelProof(NamedTuple):
    """A proof that kernels give the results of a slower way on an accelerator, before they are used."""

    name: str
    fast: str
    """The kernels, as manifests and messages name them."""
    slow: str
    """What replaces them if the proof fails."""
    prove: Callable[[torch.device], None]
    """Raises any exception if they fail."""
    take_slow: Callable[[torch.device], None]
    is_long: bool = False
    """Whether it takes much longer than a start should, so that one that has held is remembered on the machine."""


def compare(
    name: str, found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE, *, subject: str = "attention"
) -> None:
    """Checks that the results of a kernel are those of a slower way.

    Raises:
        RuntimeError: They differ.
    """
    found, wanted = found.detach().float(), wanted.detach().float()
    difference = float((found - wanted).abs().max())
    if not difference <= tolerance * max(1.0, float(wanted.abs().max())):  # NaN also counts as a difference
        raise RuntimeError(f"{subject} {name} differs from the slower way by {difference:.3g}")


class SequenceMixer(Part):
    """The part of a block in which each token reads tokens before it in its document.

    Attributes:
        exchange: How it gets whole rows if the input has some tokens of each row, while the metadata is that of whole
            rows; None if the input has whole rows. Never set unless `SequenceMixerConfig.count_shared_heads` allows it.
    """

    exchange: HeadExchange | None = None

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B S D"], metadata: Any, cache: tuple[Tensor, ...] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Returns the update of the residual stream.

        Args:
            x: The input of the part.
            metadata: What `SequenceMixerConfig.build_metadata` has returned for this layer.
            cache: The tensors that `SequenceMixerConfig.cache_tensors` lists, which the part reads and writes in place;
                None without a cache.
        """

    def share_matrices(self, ranks: MatrixShares) -> None:
        """Cuts the freshly built part among ranks, each of which gets whole rows and adds to the sum of all outputs.

        Called only if `SequenceMixerConfig.find_uncut` has found nothing.

        Args:
            ranks: The ranks that share the part.
        """
        raise NotImplementedError("its configuration says that it can be cut")


class SequenceMixerConfig(ABC):
    """The choice of a sequence mixer: each is a frozen dataclass of plain values that is derived from this class.

    A recipe chooses mixers by `model.decoder.mixers: [{class_path: ..., init_args: {...}}]`.

    Attributes:
        name: The name of the part in its block, and therefore in checkpoints.
    """

    name: ClassVar[str] = "mixer"

    @property
    def reads_length(self) -> bool:
        """Whether what a cache holds of a text's beginning depends on the length of the whole text."""
        return False

    def check(self, dim: int, num_layers: int) -> None:  # noqa: B027 - most mixers have nothing to check
        """Checks that the part can be built for a decoder of this width and number of layers.

        Raises:
            UserError: It cannot.
        """

    @abstractmethod
    def build(self, dim: int, layer: int) -> SequenceMixer:
        """Builds the part.

        Args:
            dim: Model width.
            layer: The block's number, from 0, for parts that are not the same in every block.
        """

    @abstractmethod
    def build_metadata(self, tokens: ForwardTokens, layers: Sequence[int]) -> Sequence[Any]:
        """Returns what the part of each of these layers knows about the tokens of a forward.

        The metadata is a tuple of tensors and plain values, so that compiled blocks can take it. A field `offsets`
        may have another size in each forward.

        Args:
            tokens: The tokens.
            layers: The layers that have this mixer. Layers that know the same get the same object.
        """

    @abstractmethod
    def cache_tensors(self, dim: int) -> tuple[CacheTensor, ...]:
        """Returns what a layer keeps of earlier tokens, of a model of this width."""

    def attention_heads(self, dim: int) -> AttentionHeads | None:
        """Returns the heads for which a kernel of attention is chosen; None if the part uses none of these kernels."""
        return None

    def count_shared_heads(self) -> int | None:
        """Returns the number of heads that ranks of context parallelism can divide by `SequenceMixer.exchange`.

        None if the part has no use for an exchange of heads: such ranks are then refused.
        """
        return None

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns what of the part `num_ranks` ranks cannot share, for a message; None if they can share it.

        A part that can be shared has this method, and `SequenceMixer.share_matrices`.

        Args:
            num_ranks: `tensor_parallel`, at least 2.
        """
        return f"a {type(self).__name__}, which has no `find_uncut`"

    def list_proofs(self) -> tuple[KernelProof, ...]:
        """Returns the proofs of kernels of its own, which an accelerator has to pass before the part uses them."""
        return ()
