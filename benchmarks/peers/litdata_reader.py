"""litdata's reader of the benchmark `data`: its chunks of tokens, shuffled, through its own loader."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.writer import BinaryWriter

from benchmarks.workers.data_protocol import ReadTask, make_ready, serve, task_from_json

_TOKENS_PER_WRITE = 1_000_000


def write(task: ReadTask) -> None:
    """Writes the tokens as litdata's `optimize` does for a `TokensLoader`."""
    tokens = np.memmap(task.tokens_path, np.uint16, mode="r")
    block = task.seq_len + 1
    writer = BinaryWriter(
        task.directory, chunk_size=block * max(1, 64_000_000 // 2 // block), item_loader=TokensLoader()
    )
    usable = len(tokens) // block * block
    step = _TOKENS_PER_WRITE // block * block or block
    for index, start in enumerate(range(0, usable, step)):
        part = torch.from_numpy(tokens[start : min(start + step, usable)].astype(np.uint16))
        writer.add_item(index, part)
    writer.done()
    writer.merge()


def read(task: ReadTask) -> Iterator[int]:
    """Yields the tokens of one batch after another, without end."""
    dataset = StreamingDataset(
        task.directory, item_loader=TokensLoader(block_size=task.seq_len + 1), shuffle=True, drop_last=True
    )
    loader = StreamingDataLoader(dataset, batch_size=task.micro_batch_size, num_workers=0)
    while True:
        for batch in loader:
            inputs, _, _ = make_ready(batch.long(), task.eos_id)
            yield inputs.numel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = task_from_json(sys.argv[1])
    Path(task.directory).mkdir(parents=True, exist_ok=True)
    write(task)
    serve(read(task), ("litdata", "torch", "numpy"))
