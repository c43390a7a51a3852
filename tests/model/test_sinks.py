"""Attention sinks: every kernel gives the softmax with a further logit, and those without it are refused by name."""

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model.attend.kernel import Place
from genesis.model.attend.metadata import document_mask
from genesis.model.attend.table import attend, choose_kernel, resolve_kernel
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.mixer import ForwardTokens
from tests.model.test_flex import eager, make_ids

__all__ = ["eager"]
WIDTH, SINKS = 16, torch.tensor([-2.0, 0.5, 3.0, 8.0], dtype=torch.float64)


def draw(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2, 4)
    ]


def attend_slowly(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """Attention with a column of sinks beside the scores, which is dropped behind the softmax."""
    key, value = (part.repeat_interleave(2, dim=2) for part in (key, value))
    scores = torch.einsum("bshe,blhe->bhsl", query, key) / WIDTH**0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhsl,blhe->bshe", weights, value)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["mask", "flash", "flex"])
@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize("packing", [None, [[40, 1, 99], [70, 70]]])
def test_a_kernel_gives_the_softmax_with_a_further_logit_and_its_gradients(
    name: str, window: int | None, packing: list[list[int]] | None
) -> None:
    query, key, value, upstream = draw(2, 140)
    sinks = SINKS.clone().requires_grad_()
    ids = None if packing is None else make_ids(packing)
    config = AttentionConfig(4, 2, head_dim=WIDTH, sliding_window=window, has_sinks=True)
    metadata = build_attention_metadata(config, ForwardTokens(query.detach().flatten(2), ids, kernel=name))
    known = torch.zeros(2, 140, dtype=torch.int32) if ids is None else ids
    trained = (query, key, value, sinks)
    found, wanted = attend(*trained[:3], metadata, sinks), attend_slowly(*trained, document_mask(known, window))
    gradients = (torch.autograd.grad(out, trained, upstream) for out in (found, wanted))
    for one, other in zip((found, *next(gradients)), (wanted, *next(gradients)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fa4", "flash"])
def test_a_kernel_without_sinks_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis.model.attend.fa4.find_version", lambda: "4.0")
    place = Place("cuda", (9, 0), torch.bfloat16, 64)
    assert resolve_kernel(name, place) == name
    message = f"model.attention is {name}, but it has no attention sinks; give --model.attention flex, or auto"
    with pytest.raises(UserError, match=message):
        resolve_kernel(name, place._replace(has_sinks=True))
    assert choose_kernel(place._replace(has_sinks=True)).name == "flex"
