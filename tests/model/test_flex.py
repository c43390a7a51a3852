"""FlexAttention: its blocks equal torch's own of the plain rule, and its attention equals that under a mask.

It has no backward on CPU by a check of its own. Without that check its eager form trains there.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from genesis.model.attend import flex
from genesis.model.attend.metadata import Rows
from genesis.model.attend.table import attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.compilation import compile_each_shape
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.loss import sum_cross_entropy
from genesis.model.mixer import ForwardTokens
from genesis.strategies.wrap import apply_wrappers

PACKINGS: dict[str, list[list[int]]] = {
    "one document": [[300], [300]],
    "a block each": [[128, 128, 44], [128, 128, 44]],
    "one token first": [[1, 299], [1, 127, 1, 171]],
    "one token last": [[299, 1], [127, 1, 128, 43, 1]],
    "documents of one token": [[1] * 300, [1] * 150 + [150]],
    "short documents": [[7] * 42 + [6], [5] * 60],
    "ends beside those of blocks": [[127, 129, 44], [129, 127, 44]],
    "a document over all blocks": [[3, 290, 7], [100, 200]],
    "rows of different kinds": [[300], [1] * 10 + [20, 250, 20]],
}
EXACT = {
    "whole blocks": [[256], [100, 156]],
    "one block": [[128], [1, 127]],
    "a part of a block": [[40], [17, 23]],
    "a token in the last block": [[257], [255, 2]],
}
WINDOWS = [None, 1, 2, 100, 128, 129, 299]


def make_ids(packing: list[list[int]]) -> Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in packing]
    return torch.stack(rows).to(torch.int32)


def to_pairs(number: Tensor, indices: Tensor) -> Tensor:
    """Returns which pairs of blocks a list has, the slow obvious way."""
    pairs = torch.zeros(indices.shape, dtype=torch.bool)
    for place in product(*map(range, number.shape)):
        pairs[(*place, indices[place][: number[place]].long())] = True
    return pairs


@pytest.mark.parametrize("packing", {**PACKINGS, **EXACT}.values(), ids={**PACKINGS, **EXACT})
@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_those_that_torch_finds_by_evaluating_every_pair_of_tokens(
    packing: list[list[int]], window: int | None
) -> None:
    ids = make_ids(packing)
    num_rows, length = ids.shape

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (ids[row, query] == ids[row, key])
        return seen if window is None else seen & (query - key < window)

    wanted = torchs.create_block_mask(rule, num_rows, None, length, length, device="cpu")
    x = torch.empty(num_rows, length, 1)
    found = flex.build_blocks(flex.find_first_seen(Rows(x, 16, ids, None, window)))
    for name, number, indices, other_number, other_indices in (
        ("partial", found.num_partial, found.partial, wanted.kv_num_blocks, wanted.kv_indices),
        ("full", found.num_full, found.full, wanted.full_kv_num_blocks, wanted.full_kv_indices),
        ("queries", found.num_partial_queries, found.partial_queries, wanted.q_num_blocks, wanted.q_indices),
        ("full queries", found.num_full_queries, found.full_queries, wanted.full_q_num_blocks, wanted.full_q_indices),
    ):
        assert other_number is not None
        assert other_indices is not None
        assert number.dtype == indices.dtype == torch.int32
        assert number.is_contiguous(), name
        assert indices.is_contiguous(), f"{name}: the kernel reads a list as neighbours in memory"
        assert torch.equal(to_pairs(number, indices), to_pairs(other_number, other_indices)), name


def test_rows_without_documents_are_causal() -> None:
    rows = Rows(torch.empty(2, 300, 1), 16)
    ids = torch.zeros(2, 300, dtype=torch.int32)
    for found, wanted in zip(
        flex.build_blocks(flex.find_first_seen(rows)),
        flex.build_blocks(flex.find_first_seen(rows._replace(document_ids=ids))),
        strict=True,
    ):
        assert torch.equal(found, wanted)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes FlexAttention train on the CPU, without inductor, which has no backward for it there."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compile_kernel", lambda: flex.attend_blocks)


def run(name: str, config: AttentionConfig, ids: Tensor | None, shape: tuple[int, int]) -> list[Tensor]:
    """Returns attention of random heads, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    width = config.head_dim
    assert width is not None
    query, key, value, upstream = (
        torch.randn(*shape, heads, width, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
    )
    metadata = build_attention_metadata(config, ForwardTokens(query.detach().flatten(2), ids, kernel=name))
    assert metadata.kernel == name or (name == "flash" and metadata.kernel == "mask")
    out = attend(query, key, value, metadata)
    return [out, *torch.autograd.grad(out, (query, key, value), upstream)]


def check_equal(config: AttentionConfig, ids: Tensor | None, shape: tuple[int, int]) -> None:
    found = run("flex", config, ids, shape)
    for other in ("mask", "flash"):
        for one, wanted in zip(found, run(other, config, ids, shape), strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("packing", {**PACKINGS, **EXACT}.values(), ids={**PACKINGS, **EXACT})
@pytest.mark.parametrize("window", [None, 1, 100])
def test_values_and_gradients_are_those_under_a_mask_and_by_documents(
    packing: list[list[int]], window: int | None
) -> None:
    ids = make_ids(packing)
    config = AttentionConfig(4, 2, head_dim=16, sliding_window=window)
    check_equal(config, ids, (ids.shape[0], ids.shape[1]))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [16, 24, 80, 256])
def test_groups_and_widths_of_heads_change_nothing(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    ids = make_ids([[3, 70, 67], [140]])
    check_equal(AttentionConfig(num_heads, num_kv_heads, head_dim=head_dim), ids, (2, 140))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("window", [None, 30])
def test_whole_rows_are_those_of_torch(window: int | None) -> None:
    check_equal(AttentionConfig(2, 1, head_dim=16, sliding_window=window), None, (2, 200))


SHAPE = DecoderConfig(
    dim=32,
    num_layers=2,
    attention=AttentionConfig(2, 1, sliding_window=50, window_layers=(0,), qk_norm="head"),
    ffn_dim=32,
    max_seq_len=200,
    vocab_size=61,
)


def train(kernel: str, **wrappers: Any) -> tuple[Decoder, list[Tensor]]:
    """Returns a decoder after a backward under wrappers, and the loss and all gradients."""
    decoder = Decoder(SHAPE)
    decoder.attention_kernel = kernel
    decoder.init_weights(0)
    apply_wrappers(decoder, **wrappers)
    ids = torch.arange(400).view(2, 200) * 7 % SHAPE.vocab_size
    head = partial(sum_cross_entropy, labels=ids.roll(-1, dims=1))
    loss: Any = decoder(ids, document_ids=make_ids([[3, 120, 77], [200]]), head=head)
    loss.backward()
    return decoder, [
        loss.detach(),
        *(parameter.grad for parameter in decoder.parameters() if parameter.grad is not None),
    ]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_a_decoder_with_windows_in_some_layers_trains_as_under_a_mask(checkpointing: str) -> None:
    found, wanted = train("flex", activation_checkpointing=checkpointing)[1], train("mask")[1]
    assert len(found) == len(wanted) > 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own look at what it compiles
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_compiled_blocks_have_the_kernel_in_their_one_graph(
    checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    original = torch.compile
    monkeypatch.setattr(torch, "compile", partial(original, backend=backend))
    found = train("flex", activation_checkpointing=checkpointing, has_compiled_blocks=True)[1]
    monkeypatch.setattr(torch, "compile", original)
    for one, other in zip(found, train("mask")[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert graphs
    for graph in graphs:
        kernels = [node for node in graph.graph.nodes if "flex_attention" in str(node.target)]
        assert len(kernels) == 1
    assert len(graphs) == 1, "both kinds of layers have one form"


def test_layers_with_and_without_windows_have_two_lists_of_blocks() -> None:
    config = SHAPE.parts.attention
    assert config is not None
    tokens = ForwardTokens(torch.zeros(2, 200, 32), make_ids([[3, 197], [200]]), kernel="flex")
    first, second = config.build_metadata(tokens, range(2))
    assert first.blocks is not None
    assert second.blocks is not None
    assert not torch.equal(first.blocks.first_seen, second.blocks.first_seen)
    assert first.cos is second.cos


def test_eager_blocks_get_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def watch(function: Any, **options: Any) -> Any:
        compiled.append((function, options))
        return lambda query, key, value, blocks, sinks: query

    monkeypatch.setattr(torch, "compile", watch)
    flex.compile_kernel.cache_clear()
    heads = [torch.zeros(1, 20, 2, 16)] * 3
    metadata = build_attention_metadata(AttentionConfig(2, 2), ForwardTokens(torch.zeros(1, 20, 32), kernel="flex"))
    attend(heads[0], heads[1], heads[2], metadata)
    flex.compile_kernel.cache_clear()
    # `fullgraph`: a graph that breaks would run eagerly, and hold the scores of all pairs of tokens.
    assert compiled == [(flex.attend_blocks, {"fullgraph": True, "dynamic": False})]


def test_nothing_is_compiled_again_for_other_documents_and_once_for_each_other_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    run_compiled = compile_each_shape(flex.attend_blocks, fullgraph=True)
    config = AttentionConfig(2, 1, head_dim=16)
    counts = []
    for packing in (
        [[300], [300]],
        [[1, 299], [200, 100]],
        [[9] * 30 + [30], [300]],
        [[400]],
        [[260], [130, 130], [260]],
    ):
        ids = make_ids(packing)
        metadata = build_attention_metadata(config, ForwardTokens(torch.zeros(*ids.shape, 32), ids, kernel="flex"))
        heads = [torch.zeros(*ids.shape, number, 16) for number in (2, 1, 1)]
        run_compiled(*heads, metadata.blocks)
        counts.append(len(graphs))
    assert counts == [1, 1, 1, 2, 3]
