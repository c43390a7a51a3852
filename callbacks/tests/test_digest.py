"""The digest: what it sees, and that it adds up over any sharding."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from genesis_callbacks.checkpoint.digest import digest_chunk, digest_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64, torch.complex64)


def slow_digest(tensor: torch.Tensor) -> int:
    """The definition, one word at a time."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    word_bytes = min(4, tensor.dtype.itemsize)
    words = [int.from_bytes(raw[at : at + word_bytes], "little") for at in range(0, len(raw), word_bytes)]
    return sum(word * (2 * index + 1) for index, word in enumerate(words)) % (1 << 64)


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    itemsize = torch.empty((), dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    return torch.randint(256, (*shape[:-1], shape[-1] * itemsize), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_it_says(dtype):
    tensor = random_tensor((7, 5), dtype)
    assert digest_tensor(tensor) == slow_digest(tensor)
    assert digest_tensor(tensor[2]) == slow_digest(tensor[2].clone())


def test_it_is_what_it_says_beyond_one_block():
    tensor = random_tensor((3, 40_000), torch.float32)
    raw = tensor.numpy().view(np.uint32).ravel().astype(np.uint64)
    expected = int((raw * (np.arange(len(raw), dtype=np.uint64) * np.uint64(2) + np.uint64(1))).sum(dtype=np.uint64))
    assert digest_tensor(tensor) == expected
    assert (
        sum(digest_chunk(tensor[:, half : half + 20_000], (3, 40_000), (0, half)) for half in (0, 20_000)) % (1 << 64)
        == expected
    )


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_chunks_add_up_to_the_tensor(shape, dtype, data):
    tensor = random_tensor(shape, dtype)
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    total = 0
    for corner in range(2 ** len(shape)):
        chunk, offsets = tensor, []
        for dim, cut in enumerate(cuts):
            start, end = (cut, shape[dim]) if corner >> dim & 1 else (0, cut)
            chunk = chunk.narrow(dim, start, end - start)
            offsets.append(start)
        total += digest_chunk(chunk, shape, offsets)
    assert total % (1 << 64) == digest_tensor(tensor)


@settings(max_examples=60)
@given(first=st.integers(0, 63), second=st.integers(0, 63), dtype=st.sampled_from((torch.float32, torch.float64)))
def test_a_swap_of_any_two_different_elements_shows(first, second, dtype):
    tensor = random_tensor((64,), dtype, seed=3)
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    is_same = torch.equal(tensor.view(torch.uint8), swapped.view(torch.uint8))
    assert (digest_tensor(tensor) == digest_tensor(swapped)) == is_same


def test_a_flipped_bit_shows_and_a_scalar_has_one():
    tensor = torch.zeros(100)
    assert digest_tensor(tensor) == 0
    tensor.view(torch.int32)[70] ^= 1 << 30
    assert digest_tensor(tensor) == (1 << 30) * 141
    assert digest_tensor(torch.tensor(1.0)) == 0x3F800000
    assert digest_tensor(torch.empty(0, 3)) == 0
