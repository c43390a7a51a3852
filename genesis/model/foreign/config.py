"""The configuration of a model of transformers. It imports transformers only when the model is built."""

import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal

from genesis.base.errors import UserError
from genesis.model.language_model import BodyConfig, BodyShape, LanguageModel

PREFIX: Final = "model."
"""What stands before transformers' own names of tensors."""


@dataclass(frozen=True)
class TransformersConfig(BodyConfig):
    """A causal language model whose layers transformers defines, by the classes of the installed version alone.

    Args:
        config: The content of the model's `config.json`, whole.
        documents: How documents in a row are kept apart: `packed` by the mask of attention, or `rows` by one padded row
            for each document in the forward, which is right for every causal model and computes the padding, too.
        router_loss: Factor of the auxiliary loss with which transformers balances a mixture's experts; 0 for none. It
            is a mean over the tokens of a micro-batch.
        experts: How transformers multiplies stacks of experts, such as `eager` or `grouped_mm`; None for its default.

    Raises:
        UserError: A value is invalid.
    """

    config: dict[str, Any]
    documents: Literal["packed", "rows"] = "packed"
    router_loss: float = 0.0
    experts: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, dict) or not isinstance(self.config.get("model_type"), str):
            raise UserError("body.config has no model_type: give the content of the model's config.json")
        if self.documents not in ("packed", "rows"):
            raise UserError(f"body.documents is {self.documents!r}: it must be 'packed' or 'rows'")
        if not self.router_loss >= 0.0:
            raise UserError(f"body.router_loss is {self.router_loss}: it must be at least 0")

    def __hash__(self) -> int:
        return hash((json.dumps(self.config, sort_keys=True, default=str), self.documents))

    @property
    def auto_class(self) -> str:
        """The name of transformers' class that opens the model."""
        decoder = import_module("genesis.model.foreign.decoder")
        return str(decoder.choose_auto(decoder.read_config(self.config)).__name__)

    def build(self, shape: BodyShape) -> LanguageModel:
        """Returns the model, without values.

        Raises:
            UserError: transformers is not installed, or the model cannot be trained.
        """
        if find_spec("transformers") is None:
            raise UserError(
                "the model is one of transformers, which is not installed: pip install 'genesis-lm[export]'"
            )
        model: LanguageModel = import_module("genesis.model.foreign.decoder").TransformersDecoder(self, shape)
        return model
