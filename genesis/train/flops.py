"""The floating-point operations of a window: of the weights for each token, of attention within each document."""

from functools import cached_property

import numpy as np
import torch

from genesis.data.window import AccumulationWindow
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.describe import count_flops_per_token
from genesis.model.language_model import LanguageModel


class WindowFlops:
    """Counts what a model's arithmetic costs; products within the masked half of attention count, as usual for MFU.

    Args:
        decoder: The model.
        adapter: The trained adapters; None if the whole model is trained.
    """

    def __init__(self, decoder: DecoderConfig, adapter: AdapterConfig | None = None) -> None:
        self._decoder, self._adapter = decoder, adapter
        self._context_flops: dict[int, int] = {}

    @cached_property
    def _model(self) -> LanguageModel:
        with torch.device("meta"):
            return build_model(self._decoder)

    @cached_property
    def _flops_per_token(self) -> float:
        return count_flops_per_token(self._decoder, 1, self._adapter) - self._count_context(1)

    def count(self, window: AccumulationWindow) -> float:
        """Returns the operations of forward and backward on this rank, padding included. It reads no tensor."""
        num_tokens = sum(micro_batch.input_ids.numel() for micro_batch in window.micro_batches)
        lengths, counts = self._count_lengths(window)
        products = sum(
            count * length * self._count_context(length) for length, count in zip(lengths, counts, strict=True)
        )
        return self._flops_per_token * num_tokens + products

    def _count_context(self, length: int) -> int:
        """Returns the operations of attention's products for each token of a document of this length."""
        if length not in self._context_flops:
            self._context_flops[length] = self._model.context_flops_per_token(length)
        return self._context_flops[length]

    def _count_lengths(self, window: AccumulationWindow) -> tuple[list[int], list[int]]:
        """Returns the different lengths of documents, and how many documents have each; rows if lengths are unknown."""
        if window.document_lengths is None:
            shapes = [micro_batch.input_ids.shape for micro_batch in window.micro_batches]
            return [width for _, width in shapes], [rows for rows, _ in shapes]
        lengths, counts = np.unique(window.document_lengths, return_counts=True)
        return lengths.tolist(), counts.tolist()
