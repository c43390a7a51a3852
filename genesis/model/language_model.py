"""What training asks of a language model, whoever defines its layers.

`genesis.model.decoder.Decoder` is put together from parts of Genesis. A `BodyConfig` in the place of these parts
builds a model whose layers another library defines (`genesis.model.foreign`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.nn.functional import linear

from genesis.model.attend.table import TORCH_KERNEL
from genesis.model.part import ParameterGroup, Part, Statistics

T = TypeVar("T")


def project(hidden: Float[Tensor, "B S D"], output_weight: Float[Tensor, "V D"]) -> Float[Tensor, "B S V"]:
    """The default head: returns the logits."""
    return linear(hidden, output_weight)


class LanguageModel(nn.Module, ABC):
    """A causal language model of packed documents. It may be built on the meta device.

    Attributes:
        groups: The blocks that are recomputed together, by their numbers: by default all.
        attention_kernel: The kernel of attention without a cache, by its name in `genesis.model.attend.table`.
        blocks_elsewhere: The blocks that other ranks hold, by their numbers, without values.
        copies: The names of parameters of which another rank holds the same, so that it is not counted twice.
        softcap: The bound c of logits, which are then `c * tanh(hidden @ output_weight.T / c)`; None without a bound.
        router_names: The last names of linear layers that choose experts, which get no adapters.
        max_seq_len: The longest context in tokens.
    """

    softcap: float | None = None
    router_names: Sequence[str] = ("router",)

    def __init__(self, num_blocks: int, max_seq_len: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.blocks_elsewhere: dict[int, Any] = {}
        self.copies: frozenset[str] = frozenset()
        self.groups: Sequence[range] = [range(num_blocks)]
        self.attention_kernel = TORCH_KERNEL

    # ---- the modules

    @property
    @abstractmethod
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The weight that turns hidden states into logits."""

    @property
    @abstractmethod
    def blocks_name(self) -> str:
        """The canonical name of the module whose children are the blocks, under their numbers."""

    @property
    def numbered_blocks(self) -> dict[int, Any]:
        """The blocks that are there, by their numbers, which are also their names."""
        return {int(name): block for name, block in self.get_submodule(self.blocks_name).named_children()}

    @property
    def idle_modules(self) -> list[nn.Module]:
        """The largest modules whose parameters a forward never reads."""
        return []

    @property
    def parts(self) -> dict[str, Part]:
        """Every part by its canonical name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Part)}

    def list_float32(self) -> set[str]:
        """Returns the names of the parameters that are float32 in a model of any dtype, such as those of routers."""
        return {
            f"{name}.{parameter}"
            for name, module in self.named_modules()
            if getattr(module, "keeps_float32", False)
            for parameter, _ in module.named_parameters()
        }

    @abstractmethod
    def draws_random_numbers(self, block: nn.Module) -> bool:
        """Returns whether the forward of a block uses random numbers, as dropout does."""

    # ---- values

    @abstractmethod
    def init_weights(self, seed: int) -> None:
        """Fills every parameter, with the same values for the same seed on any device, sharding and rank.

        Raises:
            UserError: The model can only start from a checkpoint.
        """

    def fill_buffers(self) -> None:  # most models have none
        """Computes the buffers that no checkpoint holds, after they were allocated. Does not communicate."""

    @abstractmethod
    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the optimizer's group of each parameter by its canonical name."""

    # ---- a forward

    @abstractmethod
    def forward(
        self,
        input_ids: Int64[Tensor, "B S"],
        *,
        document_ids: Int32[Tensor, "B S"] | None = None,
        document_offsets: Int32[Tensor, " num_documents+1"] | None = None,
        head: Callable[[Tensor, Tensor], T] = project,  # type: ignore[assignment]  # a default cannot bind T
        has_statistics: bool = False,
        counted: Bool[Tensor, "B S"] | None = None,
    ) -> T | tuple[T, dict[str, Statistics]]:
        """Returns the result of `head` for the final hidden states and the output weight: by default the logits.

        Args:
            input_ids: Tokens.
            document_ids: Which document of its row each token belongs to; None for one document per row.
            document_offsets: Where these documents begin in the flattened batch, and its end; None to compute them.
            head: Called as `head(hidden, output_weight)` inside the forward, where a sharded weight is whole.
            has_statistics: Whether to return the parts' statistics as well, by the parts' canonical names.
            counted: The tokens that the statistics contain; None for all tokens.
        """

    def prove(self, seq_len: int) -> None:  # our own code is proved by its tests
        """Checks on rows of `seq_len` tokens that the model computes what training needs. All ranks call it together.

        Raises:
            UserError: It does not.
        """

    # ---- costs

    @property
    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of a token's forward and backward, without products of tokens with tokens."""

    @abstractmethod
    def context_flops_per_token(self, context: int) -> int:
        """Returns the additional FLOPs of a token for its products with the tokens of a context of this length."""

    @property
    @abstractmethod
    def num_inactive_parameters(self) -> int:
        """The number of parameters of experts that do not see a token."""

    @abstractmethod
    def name_part(self, parameter: str) -> str:
        """Returns the part of the model to which a parameter belongs, such as `attention`, for a table of sizes."""


class BodyShape(NamedTuple):
    """The fields of `DecoderConfig` that describe any model."""

    dim: int
    num_layers: int
    vocab_size: int
    max_seq_len: int
    has_tied_embeddings: bool


@dataclass(frozen=True)
class BodyConfig(ABC):
    """A whole model that another library defines, in the place of a decoder's parts."""

    @abstractmethod
    def build(self, shape: BodyShape) -> LanguageModel:
        """Returns the model, without values.

        Raises:
            UserError: The library is missing, has no such model, or the model has another shape or cannot be trained.
        """
