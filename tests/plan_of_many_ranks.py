"""Times the plan of a save at 1,024 ranks, whose parts come from shapes alone.

    python -m tests.plan_of_many_ranks [DATA_RANKS TENSOR_RANKS]

The model is genesis-1b with AdamW, cut as tensor parallelism and FSDP2 cut it together: a linear layer over the tensor
ranks by its outputs (queries, keys, values, gate, up) or its inputs (attention's output, down), the embedding by rows,
and what each tensor rank holds over the data ranks by dim 0. Norms are cut over the data ranks alone.
"""

import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from genesis.model.decoder import Decoder
from genesis.model.recipe import read_decoder_config
from genesis_callbacks.base.local_shards import TensorShard
from genesis_callbacks.checkpoint.plan import plan_save

_ROOT = Path(__file__).parents[1]
_BY_INPUTS = ("attention.output.weight", "feed_forward.down.weight")
_SLOTS = ("exp_avg", "exp_avg_sq")


def cut(offset: int, size: int, num_pieces: int, index: int) -> tuple[int, int]:
    """Returns the offset and size of one piece, as `torch.chunk` cuts."""
    length = math.ceil(size / num_pieces)
    start = min(index * length, size)
    return offset + start, min(length, size - start)


def find_block(
    name: str, shape: tuple[int, ...], degrees: tuple[int, int], place: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (offsets, sizes) of what the rank at `place` (data rank, tensor rank) holds."""
    offsets, sizes = [0] * len(shape), list(shape)
    if len(shape) > 1:
        dim = 1 if name.endswith(_BY_INPUTS) else 0
        offsets[dim], sizes[dim] = cut(offsets[dim], sizes[dim], degrees[1], place[1])
    offsets[0], sizes[0] = cut(offsets[0], sizes[0], degrees[0], place[0])
    return tuple(offsets), tuple(sizes)


def list_parts(
    shapes: dict[str, tuple[int, ...]], degrees: tuple[int, int], place: tuple[int, int]
) -> Iterator[TensorShard]:
    """Yields the parts of the model and of its optimizer that one rank holds."""
    dtype = torch.float32
    for name, shape in shapes.items():
        offsets, sizes = find_block(name, shape, degrees, place)
        if math.prod(sizes):
            yield TensorShard(f"model.decoder.{name}", "parameter", shape, dtype, offsets, sizes)
            for slot in _SLOTS:
                yield TensorShard(f"optimizer.0.decoder.{name}.{slot}", "optimizer", shape, dtype, offsets, sizes)
        yield TensorShard(f"optimizer.0.decoder.{name}.step", "optimizer", (), dtype, (), ())


def main() -> None:
    """Plans once and prints what it took."""
    data_ranks, tensor_ranks = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (256, 4)
    config = read_decoder_config(_ROOT / "configs/model/genesis-1b.yaml")
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}
    places = [(data_rank, tensor_rank) for data_rank in range(data_ranks) for tensor_rank in range(tensor_ranks)]
    reports = [list(list_parts(shapes, (data_ranks, tensor_ranks), place)) for place in places]
    begin, begin_processor = time.perf_counter(), time.process_time()
    plan = plan_save(reports)
    seconds, processor_seconds = time.perf_counter() - begin, time.process_time() - begin_processor
    num_parts = sum(map(len, plan.written))
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{len(places)} ranks, {sum(map(len, reports))} reported parts, {num_parts} written")
    print(f"plan_save: {seconds:.1f} s, {processor_seconds:.1f} s of the processor; peak memory {memory_mb:.0f} MB")


if __name__ == "__main__":
    main()
