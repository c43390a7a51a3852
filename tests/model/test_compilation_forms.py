"""Compiled functions have a form for each shape, whatever shapes came before, and enough forms for a run."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.model.attend import flex
from genesis.model.attend.flex import attend_blocks, build_blocks
from genesis.model.compilation import compile_each_shape
from genesis.train.fixed_rows import has_fixed_rows


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Returns the list of the shapes of each form that torch.compile makes from now on, which runs without inductor."""
    found: list[tuple[object, ...]] = []
    torch.compiler.reset()
    compile_function: Any = torch.compile

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(tuple(one.shape for one in inputs if isinstance(one, Tensor)))
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_function(function, backend=keep, **options)
    )
    return found


def test_the_form_for_a_shape_does_not_follow_from_the_shapes_before(graphs: list[tuple[object, ...]]) -> None:
    for order in ((8, 8), (1, 4, 8), (4, 1, 8, 3)):
        torch.compiler.reset()
        graphs.clear()
        run = compile_each_shape(lambda x: x * 2)
        for rows in order:
            run(torch.ones(rows, 5))
        assert graphs == [((rows, 5),) for rows in dict.fromkeys(order)]
        assert all(isinstance(size, int) for (shape,) in graphs for size in shape)


def test_a_run_may_have_more_shapes_than_torch_has_forms_for_by_default(graphs: list[tuple[object, ...]]) -> None:
    run = compile_each_shape(lambda x: x * 2, fullgraph=True)
    for rows in range(2, 34):
        run(torch.ones(rows, 5))
    assert len(graphs) == 32


def test_the_kernel_has_one_form_whichever_projections_have_adapters(
    graphs: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "compile_kernel", lambda: compiled)
    monkeypatch.setattr(flex, "attend_blocks", lambda query, key, value, blocks, sinks: query + key + value)
    compiled = compile_each_shape(flex.attend_blocks, fullgraph=True)
    blocks = build_blocks(torch.zeros(1, 128, dtype=torch.int32))
    metadata: Any = SimpleNamespace(blocks=blocks)
    for has_gradient in ((True, True, True), (True, False, False), (False, False, True)):
        heads = [torch.ones(1, 128, 1, 16, requires_grad=one) for one in has_gradient]
        flex.FlexKernel().attend(*heads, metadata).sum().backward()
        assert [one.grad is not None for one in heads] == list(has_gradient)
    assert len(graphs) == 1
    assert attend_blocks is not flex.attend_blocks


@pytest.mark.parametrize(
    ("kind", "kernel", "is_compiled", "wanted"),
    [
        ("cpu", "flash", False, False),
        ("cpu", "flash", True, True),
        ("cuda", "flex", False, True),
        ("cuda", "flash", False, False),
        ("cuda", "auto", False, True),
    ],
)
def test_rows_have_one_length_where_each_other_length_would_be_compiled(
    kind: str, kernel: str, is_compiled: bool, wanted: bool
) -> None:
    strategy = SimpleNamespace(root_device=torch.device(kind), compile_blocks=is_compiled)
    trainer: Any = SimpleNamespace(strategy=strategy, lightning_module=SimpleNamespace(attention=kernel))
    assert has_fixed_rows(trainer) == wanted
