"""The decoder: equal to transformers' Llama, blind across documents, the same from every start."""

import hashlib
import math
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import rms_norm
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.base.errors import UserError
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.shape import write_shape
from genesis.model import initial
from genesis.model.attend import flash
from genesis.model.attend.metadata import AttentionMetadata, document_mask, document_offsets, document_positions
from genesis.model.attend.table import attend
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.initial import INIT_STD
from genesis.model.loss import sum_cross_entropy
from genesis_callbacks.testing import run_ranks

TINY = DecoderConfig(
    vocab_size=97, dim=48, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=64, max_seq_len=128, norm_eps=1e-6
)
PACKED = torch.tensor([[0] * 40 + [1] * 1 + [2] * 55, [0] * 96, [0] * 7 + [1] * 89], dtype=torch.int32)
"""Three rows: several documents (one of a single token), one, two."""


def build(config=TINY, seed=0):
    decoder = Decoder(config)
    decoder.init_weights(seed)
    return decoder


def random_ids(shape, config=TINY, seed=0):
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def documents_of(document_ids):
    """Returns (row, start, end) of each document."""
    for row, ids in enumerate(document_ids.tolist()):
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or ids[end] != ids[start]:
                yield row, start, end
                start = end


@pytest.fixture(params=["document by document", "mask"])
def packed_path(request, monkeypatch):
    """Sends packed rows through one of the two ways in which a CPU attends by document."""
    monkeypatch.setattr(flash, "MIN_MEAN_DOCUMENT_TOKENS", 1 if request.param != "mask" else 10_000)


@pytest.mark.parametrize("changes", [{}, {"has_tied_embeddings": False}, {"num_kv_heads": 6}, {"rope_theta": 1e4}])
def test_logits_equal_those_of_transformers_llama(changes):
    config = DecoderConfig(**{**vars(TINY), **changes})
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**write_shape(LLAMA, config))).eval()
    ours = Decoder(config)
    ours.load_state_dict(LLAMA.to_ours(llama.state_dict(), config))
    ids = random_ids((2, 128))
    with torch.no_grad():
        assert (ours(ids) - llama(input_ids=ids).logits).abs().max() < 1e-5


def test_packed_documents_equal_the_same_documents_run_apart(packed_path):
    decoder = build()
    ids = random_ids(PACKED.shape)
    packed = decoder(ids, document_ids=PACKED)
    for row, start, end in documents_of(PACKED):
        alone = decoder(ids[row : row + 1, start:end])
        assert (packed[row, start:end] - alone[0]).abs().max() < 1e-5


def test_gradients_of_packed_documents_equal_the_sum_of_theirs_apart(packed_path):
    decoder = build()
    ids = random_ids(PACKED.shape)
    labels = ids.roll(-1, dims=1)
    decoder(ids, document_ids=PACKED, head=partial(sum_cross_entropy, labels=labels)).backward()
    packed = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    for row, start, end in documents_of(PACKED):
        alone = labels[row : row + 1, start:end]
        decoder(ids[row : row + 1, start:end], head=partial(sum_cross_entropy, labels=alone)).backward()
    for ours, parameter in zip(packed, decoder.parameters(), strict=True):
        assert (ours - parameter.grad).norm() < 1e-5 * parameter.grad.norm()


def test_no_document_sees_another_nor_its_own_future(packed_path):
    decoder = build()
    ids = random_ids(PACKED.shape)
    before = decoder(ids, document_ids=PACKED)
    for row, start, end in documents_of(PACKED):
        middle = (start + end) // 2
        changed = ids.clone()
        changed[row, middle] = (changed[row, middle] + 1) % TINY.vocab_size
        after = decoder(changed, document_ids=PACKED)
        may_differ = torch.zeros(PACKED.shape, dtype=torch.bool)
        may_differ[row, middle:end] = True
        assert torch.equal(after[~may_differ], before[~may_differ])
        assert (after[may_differ] != before[may_differ]).any(dim=-1).all()


def test_one_document_a_row_is_the_same_with_and_without_ids():
    decoder, ids = build(), random_ids((2, 50))
    assert torch.equal(decoder(ids), decoder(ids, document_ids=torch.zeros(2, 50, dtype=torch.int32)))


def slow_attention(query, key, value, document_ids):
    """One query at a time."""
    out = torch.zeros_like(query)
    group = query.shape[2] // key.shape[2]
    for row, start, end in documents_of(document_ids):
        for place in range(start, end):
            for head in range(query.shape[2]):
                seen = slice(start, place + 1)
                scores = key[row, seen, head // group] @ query[row, place, head] / math.sqrt(query.shape[3])
                out[row, place, head] = scores.softmax(0) @ value[row, seen, head // group]
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_every_way_to_attend_agrees_with_the_slow_one(num_kv_heads):
    torch.manual_seed(0)
    query = torch.randn(*PACKED.shape, 4, 8)
    key, value = torch.randn(2, *PACKED.shape, num_kv_heads, 8)
    wanted = slow_attention(query, key, value, PACKED)
    none = torch.empty(0)
    by_document = attend(query, key, value, AttentionMetadata(none, none, "flash", offsets=document_offsets(PACKED)))
    masked = attend(query, key, value, AttentionMetadata(none, none, mask=document_mask(PACKED)))
    plain = attend(query[1:2], key[1:2], value[1:2], AttentionMetadata(none, none))  # the row of one document
    assert (by_document - wanted).abs().max() < 1e-5
    assert (masked - wanted).abs().max() < 1e-5
    assert (plain - wanted[1:2]).abs().max() < 1e-5


def test_the_cuda_kernel_takes_what_it_is_given():
    """Shapes and arguments only, on the meta device: this says nothing about values."""
    query, key, value = (
        torch.empty(*PACKED.shape, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    )
    none = torch.empty(0, device="meta")
    out = attend(query, key, value, AttentionMetadata(none, none, "flash", offsets=document_offsets(PACKED).to("meta")))
    assert out.shape == query.shape
    out.sum().backward()
    assert key.grad.shape == key.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn has a CUDA kernel only")
def test_packed_documents_on_cuda_equal_the_masked_ones_on_cpu():
    decoder, ids = build(DecoderConfig(**{**vars(TINY), "dim": 96})), random_ids(PACKED.shape)
    wanted = decoder(ids, document_ids=PACKED)
    ours = decoder.to("cuda", torch.bfloat16)(ids.cuda(), document_ids=PACKED.cuda())
    assert (ours.float().cpu() - wanted).abs().max() < 3e-2


def test_positions_and_offsets_restart_at_each_document():
    ids = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 2]], dtype=torch.int32)
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 0]]
    assert document_offsets(ids).tolist() == [0, 3, 4, 6, 7, 11, 12]


@pytest.mark.parametrize("is_autocast", [False, True])
def test_rmsnorm_on_cpu_equals_torch_in_float64(is_autocast):
    torch.manual_seed(0)
    norm = TINY.parts.norm.build(TINY.dim)
    with torch.no_grad():
        norm.weight.normal_()
    x, grad = torch.randn(4, 9, TINY.dim, requires_grad=True), torch.randn(4, 9, TINY.dim)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        out = norm(x)
        out.backward(grad)
    x64, weight64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out64 = rms_norm(x64, (TINY.dim,), weight64, TINY.norm_eps)
    out64.backward(grad.double())
    for ours, wanted in ((out, out64), (x.grad, x64.grad), (norm.weight.grad, weight64.grad)):
        assert ours.dtype == torch.float32
        assert (ours - wanted).norm() < 1e-6 * wanted.norm()


def test_autocast_runs_and_stays_close():
    decoder, ids = build(), random_ids(PACKED.shape)
    wanted = decoder(ids, document_ids=PACKED)
    with torch.autocast("cpu", torch.bfloat16):
        ours = decoder(ids, document_ids=PACKED)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - wanted).abs().max() < 3e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_blocks_give_the_same_and_do_not_compile_anew_for_each_packing():
    torch.compiler.reset()
    decoder, ids = build(), random_ids(PACKED.shape)
    wanted = decoder(ids, document_ids=PACKED)
    graphs = []

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block = decoder.blocks[0]
    block.forward = torch.compile(block.forward, backend=count_graphs)
    assert (decoder(ids, document_ids=PACKED) - wanted).abs().max() < 1e-6
    other = PACKED.flip(0)
    other[0, 50:] += 1
    decoder(ids, document_ids=other)
    num_graphs = len(graphs)
    for length in (29, 48, 60):
        packing = torch.arange(96).div(length, rounding_mode="floor").int().expand(3, 96)
        decoder(ids, document_ids=packing)
    assert len(graphs) == num_graphs


def test_dropout_acts_in_training_alone():
    decoder = build(DecoderConfig(**{**vars(TINY), "dropout": 0.5}))
    ids = random_ids((1, 10))
    assert not torch.equal(decoder(ids), decoder(ids))
    decoder.eval()
    assert torch.equal(decoder(ids), decoder(ids))
    assert torch.equal(decoder(ids), build().eval()(ids))


def test_a_decoder_from_the_meta_device_is_the_same():
    with torch.device("meta"):
        decoder = Decoder(TINY)
    decoder.to_empty(device="cpu")
    decoder.init_weights(seed=3)
    wanted = build(seed=3)
    assert all(map(torch.equal, decoder.parameters(), wanted.parameters()))
    assert torch.equal(decoder(random_ids((1, 20))), wanted(random_ids((1, 20))))
    assert not list(decoder.buffers())


LARGE = DecoderConfig(vocab_size=389, dim=48, num_layers=1, num_heads=6, num_kv_heads=2, ffn_dim=200, max_seq_len=8)
"""Several blocks of rows in a parameter, in numbers that no number of ranks divides."""


def sharded_weights(mesh_shape):
    """Returns all weights, put together from the ranks' shards, and the number of blocks that this rank drew."""
    draw, drawn = initial.draw_block, []
    initial.draw_block = lambda *arguments: drawn.append(arguments) or draw(*arguments)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    with torch.device("meta"):
        decoder = Decoder(LARGE)
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    decoder.to_empty(device="cpu")
    decoder.init_weights(seed=5)
    weights = {name: parameter.full_tensor().detach() for name, parameter in decoder.named_parameters()}
    return weights, len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh_shape",
    [
        pytest.param((2,), id="two"),
        pytest.param((3,), id="three-uneven"),
        pytest.param((2, 2), id="hybrid"),
    ],
)
def test_sharded_weights_begin_with_the_values_of_one_process(mesh_shape):
    wanted = build(LARGE, seed=5).state_dict()
    num_blocks = sum(-(-len(weight) // initial.BLOCK_ROWS) for weight in wanted.values() if weight.dim() > 1)
    for weights, num_drawn in run_ranks(sharded_weights, math.prod(mesh_shape), mesh_shape):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        assert 0 < num_drawn < num_blocks


def draw_slowly(shape, std, key):
    """Row blocks in their order, each by its own generator, put together."""
    blocks, start = [], 0
    while start < shape[0]:
        seed = int.from_bytes(hashlib.sha256(f"{key} {len(blocks)}".encode()).digest()[:8], "little") // 2
        generator = torch.Generator().manual_seed(seed)
        blocks.append(torch.normal(0.0, std, (min(64, shape[0] - start), *shape[1:]), generator=generator))
        start += 64
    return torch.cat(blocks)


@pytest.mark.parametrize("shape", [(389, 48), (64, 7), (1, 3), (130,), (70, 3, 5)])
def test_weights_are_drawn_in_blocks_of_rows_by_name_and_number(shape):
    weight = torch.empty(shape)
    initial.fill_normal(weight, 0.5, "7 blocks.0.some.weight")
    assert torch.equal(weight, draw_slowly(shape, 0.5, "7 blocks.0.some.weight"))


def test_drawn_weights_are_normal_and_blocks_are_unrelated():
    weight = torch.empty(20 * initial.BLOCK_ROWS, 512)
    initial.fill_normal(weight, 0.02, "0 embedding.weight")
    values = weight.double() / 0.02
    num = values.numel()
    assert abs(values.mean()) < 5 / num**0.5
    assert abs((values**2).mean() - 1.0) < 5 * (2 / num) ** 0.5
    assert abs((values**3).mean()) < 5 * (15 / num) ** 0.5
    assert abs((values**4).mean() - 3.0) < 5 * (96 / num) ** 0.5
    assert values.abs().max() > 4.0  # not truncated
    blocks = values.reshape(20, -1)
    correlation = blocks @ blocks.T / blocks.shape[1] - torch.eye(20)
    assert correlation.abs().max() < 0.05


def test_weights_begin_with_their_deviation_and_no_two_alike():
    config = DecoderConfig(**{**vars(TINY), "dim": 192, "ffn_dim": 256, "has_tied_embeddings": False})
    weights = build(config, seed=1).state_dict()
    residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
    for name, weight in weights.items():
        if "norm" in name:
            assert (weight == 1.0).all()
        else:
            writes = name.endswith(("attention.output.weight", "down.weight"))
            assert weight.std().item() == pytest.approx(residual_std if writes else INIT_STD, rel=0.05)
    firsts = [weight[0, 0].item() for name, weight in weights.items() if "norm" not in name]
    assert len(set(firsts)) == len(firsts)
    other = build(config, seed=2).state_dict()
    assert not torch.equal(weights["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 50}, "dim 50 does not give 6 heads an even width: make it a multiple of 12"),
        ({"num_kv_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig(**{**vars(TINY), **changes})


def test_hidden_states_at_some_places_are_those_of_all():
    config = DecoderConfig(vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16)
    decoder = Decoder(config).eval()
    decoder.init_weights(0)
    input_ids = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([0, 8, 11, 26])
    some = decoder(input_ids, logits_to_keep=kept)
    assert some.shape == (4, 61)
    torch.testing.assert_close(some, decoder(input_ids).flatten(0, 1)[kept])
