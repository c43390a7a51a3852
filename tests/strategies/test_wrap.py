"""The wrappers of a decoder, as far as they show without training; `tests/train/test_step.py` has what they compute."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from genesis.model.attend import flash
from genesis.model.decoder import Decoder
from genesis.strategies import wrap
from genesis.strategies.wrap import apply_wrappers
from genesis_callbacks.testing import run_ranks
from tests.fakecuda.compiler import find_compiler
from tests.model.mixture_part import MixtureConfig
from tests.train.support import TINY


@pytest.mark.parametrize(
    ("changes", "is_preserved"),
    [
        ({}, False),
        ({"dropout": 0.1}, True),
        ({"ffn_dim": None, "feed_forward": MixtureConfig(2, 8)}, True),
    ],
    ids=["nothing_random", "dropout", "a_part_that_may_be"],
)
def test_checkpointing_keeps_the_generators_states_where_something_is_random(changes, is_preserved) -> None:
    with torch.device("meta"):
        decoder = Decoder(replace(TINY, **changes))
    apply_wrappers(decoder, activation_checkpointing="block")
    assert [block.forward.keywords["preserve_rng_state"] for block in decoder.blocks] == [is_preserved] * 2


def attend_in_one_graph(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Stands in for a GPU's kernel, which gets the offsets as one tensor; on a CPU they are read outside of graphs."""
    lengths = offsets.diff()
    documents = torch.repeat_interleave(
        torch.arange(len(lengths)), lengths, output_size=query.shape[0] * query.shape[1]
    )
    return query * (1 + documents.view(query.shape[:2])[..., None, None])


def count_graphs(backend: str, is_marked: bool, checkpointing: Literal["none", "block"]) -> list[int]:
    """Returns how many graphs torch had compiled after each packing, with ever more documents."""
    flash._attend_each_document = attend_in_one_graph
    if not is_marked:
        wrap.maybe_mark_dynamic = lambda tensor, dimension: None
    compiled = torch.compile
    torch.compile = lambda function, **options: compiled(function, backend=backend, **options)
    decoder = Decoder(replace(TINY, max_seq_len=192, num_layers=3))
    apply_wrappers(decoder, checkpointing, has_compiled_blocks=True)
    ids = torch.zeros((1, 192), dtype=torch.long)
    found = []
    for num_documents in (2, 3, 5, 4, 6):
        document_ids = (torch.arange(192) * num_documents // 192).int()[None]
        decoder(ids, document_ids=document_ids).sum().backward()
        found.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [
        ("eager", "none"),
        pytest.param("inductor", "none", marks=pytest.mark.slow),
        pytest.param("inductor", "block", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_are_compiled_once_for_any_number_of_documents(
    backend: str, checkpointing: Literal["none", "block"]
) -> None:
    if backend == "inductor":
        find_compiler()
    (marked,) = run_ranks(count_graphs, 1, backend, True, checkpointing)
    assert set(marked) == {marked[0]}
    assert marked[0] >= 1
    if backend == "eager":
        (unmarked,) = run_ranks(count_graphs, 1, backend, False, checkpointing)
        assert unmarked[1] > unmarked[0]
