"""Faults of linear layers. A test that holds with a fault planted does not depend on what the fault destroys."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from genesis.model import delta
from genesis.model.delta import GatedDelta
from genesis.model.kv_cache import KVCache


def _forget_states(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = delta._apply_rule

    def forget(inputs: Any, metadata: Any, state: torch.Tensor | None) -> torch.Tensor:
        return apply(inputs, metadata, None if state is None else state.zero_())

    monkeypatch.setattr(delta, "_apply_rule", forget)


def _forget_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = GatedDelta._convolve

    def forget(layer: GatedDelta, x: torch.Tensor, taps: torch.Tensor, metadata: Any, cache: Any) -> torch.Tensor:
        if cache is not None:
            cache[1].zero_()
        return convolve(layer, x, taps, metadata, cache)

    monkeypatch.setattr(GatedDelta, "_convolve", forget)


def _read_no_earlier_token(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = delta._apply_rule

    def read_alone(inputs: Any, metadata: Any, state: torch.Tensor | None) -> torch.Tensor:
        positions = torch.zeros(inputs.value.shape[:2], dtype=torch.int64)
        return apply(inputs, metadata._replace(positions=positions), None if state is None else state.zero_())

    monkeypatch.setattr(delta, "_apply_rule", read_alone)


def _leave_states_of_the_text_before(monkeypatch: pytest.MonkeyPatch) -> None:
    free = KVCache.free_row

    def leave(cache: KVCache, row: int, **options: Any) -> None:
        states = [stack.data for stack in cache.stacks if stack.kind.is_state]
        held = [state[:, row].clone() for state in states]
        free(cache, row, **options)
        for state, kept in zip(states, held, strict=True):
            state[:, row] = kept

    monkeypatch.setattr(KVCache, "free_row", leave)


def _count_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GatedDelta.forward
    monkeypatch.setattr(
        GatedDelta,
        "forward",
        lambda layer, x, metadata, cache=None: forward(layer, x, metadata._replace(is_padding=None), cache),
    )


def _carry_states_across_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = delta._apply_rule
    monkeypatch.setattr(
        delta,
        "_apply_rule",
        lambda inputs, metadata, state: apply(inputs, metadata._replace(positions=None, offsets=None), state),
    )


def _convolve_across_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = GatedDelta._convolve
    monkeypatch.setattr(
        GatedDelta,
        "_convolve",
        lambda layer, x, taps, metadata, cache: convolve(layer, x, taps, metadata._replace(positions=None), cache),
    )


CACHE_FAULTS: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "states are forgotten": _forget_states,
    "inputs of the convolution are forgotten": _forget_inputs,
}
ROW_FAULTS: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a row begins with the state of the text before": _leave_states_of_the_text_before,
    "padding changes states": _count_padding,
}
FORWARD_FAULTS: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a token reads no earlier one": _read_no_earlier_token,
}
DOCUMENT_FAULTS: Final[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "states cross documents": _carry_states_across_documents,
    "the convolution crosses documents": _convolve_across_documents,
}
