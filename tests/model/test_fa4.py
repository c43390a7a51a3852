"""The calls of FlashAttention-4, against an imitation whose signatures are those of the package.

`golden/fa4-signatures.json` has the arguments of the package's functions, taken from its source. Values on a GPU are
those of `tests/cuda`.
"""

import ast
import json
from collections.abc import Iterator
from functools import partial
from importlib.metadata import files
from inspect import Parameter, Signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.model.attend import fa4
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import KERNELS, attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.decoder import Decoder
from genesis.model.loss import sum_cross_entropy
from genesis.strategies.wrap import apply_wrappers
from tests.golden.files import GOLDEN
from tests.model.test_flex import EXACT, PACKINGS, SHAPE, make_ids

RECORDED: dict[str, Any] = json.loads((GOLDEN / "fa4-signatures.json").read_text(encoding="utf-8"))


def build_signature(name: str) -> Signature:
    """Returns the recorded signature of a function of the package."""
    required = RECORDED[f"{name} without defaults"]
    return Signature(
        Parameter(argument, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if index < required else None)
        for index, argument in enumerate(RECORDED[name])
    )


class Package:
    """Stands for `flash_attn.cute.interface`: attends document by document, slowly."""

    def __init__(self) -> None:
        self.are_repeatable: list[bool] = []

    def _flash_attn_fwd(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, None, None, None]:
        given = SimpleNamespace(**build_signature("_flash_attn_fwd").bind(*arguments, **options).arguments)
        assert given.return_lse
        outs, sums = [], []
        for _, _, key, value, scores in self._list_documents(given):
            outs.append(torch.einsum("hqk,khe->qhe", scores.softmax(dim=2), value).to(key.dtype))
            sums.append(scores.logsumexp(dim=2))
        return torch.cat(outs).to(given.q.dtype), torch.cat(sums, dim=1), None, None, None

    def _flash_attn_bwd(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiates by hand: within an operator autograd is off."""
        given = SimpleNamespace(**build_signature("_flash_attn_bwd").bind(*arguments, **options).arguments)
        self.are_repeatable.append(given.deterministic)
        assert given.dout.is_contiguous()
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for here, query, key, value, scores in self._list_documents(given):
            grad, out = given.dout[here].float(), given.out[here].float()
            weights = (scores - given.lse[:, here, None]).exp()
            products = torch.einsum("qhe,khe->hqk", grad, value) - (grad * out).sum(dim=2).t()[:, :, None]
            of_scores = weights * products * given.softmax_scale
            found[0].append(torch.einsum("hqk,khe->qhe", of_scores, key))
            for parts, of_key in (
                (found[1], torch.einsum("hqk,qhe->khe", of_scores, query)),
                (found[2], torch.einsum("hqk,qhe->khe", weights, grad)),
            ):
                parts.append(of_key.unflatten(1, (given.k.shape[1], -1)).sum(dim=2))
        query, key, value = (torch.cat(parts).to(given.q.dtype) for parts in found)
        return query, key, value

    @staticmethod
    def _list_documents(given: Any) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
        """Yields each document's place, its queries, the keys and values of all heads, and its masked scores."""
        assert given.q.dtype == given.k.dtype == given.v.dtype
        assert given.causal
        assert torch.equal(given.cu_seqlens_q, given.cu_seqlens_k)
        assert given.cu_seqlens_q.dtype == torch.int32
        groups = given.q.shape[1] // given.k.shape[1]
        for start, end in pairwise(given.cu_seqlens_q.tolist()):
            assert end - start <= given.max_seqlen_q == given.max_seqlen_k
            query = given.q[start:end].float()
            key, value = (part[start:end].float().repeat_interleave(groups, dim=1) for part in (given.k, given.v))
            place = torch.arange(end - start)
            distance = place[:, None] - place
            left = end if given.window_size_left is None else given.window_size_left
            scores = torch.einsum("qhe,khe->hqk", query, key) * given.softmax_scale
            yield (
                slice(start, end),
                query,
                key,
                value,
                scores.masked_fill((distance < 0) | (distance > left), -torch.inf),
            )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    monkeypatch.setattr(fa4, "import_module", {"flash_attn.cute.interface": package}.__getitem__)
    return package


def run(name: str, config: AttentionConfig, ids: Tensor | None, num_rows: int, length: int) -> list[Tensor]:
    """Returns attention of random heads, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(num_rows, length, heads, 16, generator=generator).requires_grad_()
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
    )
    metadata = build_attention_metadata(config, query.detach().flatten(2), ids, kernel=name)
    assert metadata.kernel == name
    out = attend(query, key, value, metadata)
    # As that of a transposed view, which the package would not take.
    return [out, *torch.autograd.grad(out, (query, key, value), upstream.mT.contiguous().mT)]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("packing", {**PACKINGS, **EXACT}.values(), ids={**PACKINGS, **EXACT})
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_values_and_gradients_are_those_under_a_mask(
    packing: list[list[int]], window: int | None, num_kv_heads: int
) -> None:
    ids = make_ids(packing)
    config = AttentionConfig(4, num_kv_heads, head_dim=16, sliding_window=window)
    found, wanted = (run(name, config, ids, ids.shape[0], ids.shape[1]) for name in ("fa4", "mask"))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("package")
def test_whole_rows_are_documents() -> None:
    config = AttentionConfig(2, 1, head_dim=16)
    for one, other in zip(run("fa4", config, None, 2, 50), run("mask", config, None, 2, 50), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_backward_is_repeatable_where_torch_is_asked_to_be(package: Package, is_deterministic: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        run("fa4", AttentionConfig(2, 1, head_dim=16), None, 2, 50)
    finally:
        torch.use_deterministic_algorithms(before)
    assert package.are_repeatable == [is_deterministic]


@pytest.mark.usefixtures("package")
def test_the_operators_are_what_torch_takes_them_for() -> None:
    heads = [torch.randn(30, number, 16, requires_grad=True) for number in (2, 1, 1)]
    offsets = torch.tensor([0, 3, 20, 30], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.genesis.fa4.default,
        (*heads, offsets, 20, None),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def train(name: str, **wrappers: Any) -> list[Tensor]:
    """Returns the loss and all gradients of a decoder with a window in one layer, under autocast."""
    decoder = Decoder(SHAPE)
    decoder.attention_kernel = name
    decoder.init_weights(0)
    apply_wrappers(decoder, **wrappers)
    ids = torch.arange(400).view(2, 200) * 7 % SHAPE.vocab_size
    head = partial(sum_cross_entropy, labels=ids.roll(-1, dims=1))
    with torch.autocast("cpu", torch.bfloat16):  # norms of queries and keys then give float32
        loss: Any = decoder(ids, document_ids=make_ids([[3, 120, 77], [200]]), head=head)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in decoder.parameters() if parameter.grad is not None)]


def check_trains(**wrappers: Any) -> None:
    found, wanted = train("fa4", **wrappers), train("mask")
    assert len(found) == len(wanted) > 2
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 3e-2 * other.norm()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of norms under autocast
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_a_decoder_with_windows_in_some_layers_trains_as_under_a_mask(checkpointing: str) -> None:
    check_trains(activation_checkpointing=checkpointing)


# Of torch, once in a process, about norms of queries on a CPU under autocast; on CUDA `RMSNorm` casts before.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own look at what it compiles
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_compiled_blocks_call_it_within_their_graph(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    check_trains(activation_checkpointing=checkpointing, has_compiled_blocks=True)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "obstacle"),
    [
        ((9, 0), torch.bfloat16, 64, None),
        ((9, 0), torch.float16, 256, None),
        ((9, 0), torch.bfloat16, 192, None),
        ((10, 0), torch.bfloat16, 128, None),
        ((10, 3), torch.bfloat16, 256, None),
        ((10, 0), torch.bfloat16, 192, "it has no kernel for heads of width 192 on this GPU"),
        ((9, 0), torch.bfloat16, 320, "it has no kernel for heads of width 320 on this GPU"),
        ((9, 0), torch.bfloat16, 60, "it has no kernel for heads of width 60 on this GPU"),
        ((9, 0), torch.float32, 64, "it needs bfloat16 or float16"),
        ((12, 0), torch.bfloat16, 64, "its kernel for a GPU of compute capability 12 is not repeatable"),
        ((8, 9), torch.bfloat16, 64, "it needs a GPU of compute capability 9.0 or newer, and this one has 8.9"),
    ],
)
def test_it_runs_where_the_package_has_a_repeatable_backward(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    obstacle: str | None,
) -> None:
    monkeypatch.setattr(fa4, "find_version", lambda: "4")
    assert KERNELS["fa4"].find_obstacle(Place("cuda", capability, dtype, head_dim)) == obstacle


def test_without_its_package_the_obstacle_has_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "find_version", lambda: None)
    found = KERNELS["fa4"].find_obstacle(Place("cuda", (9, 0), torch.bfloat16, 64))
    assert found == "flash-attn-4 is not installed (pip install 'genesis-lm[cuda]')"


@pytest.mark.skipif(fa4.find_version() is None, reason="flash-attn-4 is not installed")
def test_the_recorded_signatures_are_those_of_the_installed_package() -> None:
    (path,) = (file.locate() for file in files(fa4.PACKAGE) or () if str(file) == "flash_attn/cute/interface.py")
    functions = {
        node.name: [argument.arg for argument in node.args.args + node.args.kwonlyargs]
        for node in ast.parse(open(path, encoding="utf-8").read()).body  # noqa: PTH123, SIM115  # any path-like
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        assert functions[name] == RECORDED[name]
