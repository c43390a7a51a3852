"""How much of a model is compared by default follows from its size alone."""

import pytest

from genesis.export.proof_size import ProofSize, plan_proof
from genesis.export.tokenizer import _spread


@pytest.mark.parametrize(
    ("num_parameters", "long_tokens", "size"),
    [
        (135_000_000, 0, ProofSize(8, 128, True, 64, 16_384, 4_096)),
        (500_000_000, 0, ProofSize(8, 128, True, 60, 16_384, 4_096)),
        (1_700_000_000, 0, ProofSize(3, 128, True, 17, 16_384, 4_096)),
        (8_000_000_000, 8_320, ProofSize(1, 93, False, 4, 16_384, 4_096)),
        (70_000_000_000, 0, ProofSize(1, 16, True, 4, 16_384, 4_096)),
        (10_000_000, 4_224, ProofSize(8, 128, True, 64, 16_384, 4_096)),
        (36_000, 8_320, ProofSize(8, 128, True, 64, 16_384, 4_096)),
        (36_000, 1_000_128, ProofSize(8, 128, False, 64, 16_384, 4_096)),
        (36_000, 10**12, ProofSize(8, 128, False, 64, 16_384, 4_096)),
    ],
)
def test_the_proof_of_a_larger_model_compares_fewer_tokens(
    num_parameters: int, long_tokens: int, size: ProofSize
) -> None:
    assert plan_proof(num_parameters, long_tokens, is_whole=False) == size


def test_a_whole_proof_leaves_nothing_out() -> None:
    assert plan_proof(70_000_000_000, 8_320, is_whole=True) == ProofSize(8, 128, True, 64, None, None)


def test_a_context_that_no_memory_holds_is_left_out_of_a_whole_proof_as_well() -> None:
    assert plan_proof(36_000, 2_000_128, is_whole=True) == ProofSize(8, 128, False, 64, None, None)


def test_texts_that_are_left_out_are_spread_over_the_vocabulary() -> None:
    texts = [str(number) for number in range(10)]
    assert list(_spread(texts, 4)) == ["0", "2", "5", "7"]
    assert list(_spread(texts, 10)) == list(_spread(texts, None)) == texts
