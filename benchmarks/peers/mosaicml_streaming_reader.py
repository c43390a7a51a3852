"""mosaicml-streaming's reader of the benchmark `data`: MDS shards of sequences, shuffled, through its dataset."""

import sys
import types
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.workers.data_protocol import ReadTask, make_ready, serve, task_from_json

# Its data sets of pictures want a torchvision, which the registry has for CUDA builds of torch alone.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

from streaming import MDSWriter, StreamingDataset  # noqa: E402


def write(task: ReadTask) -> None:
    """Writes each sequence, with the label of its last token, as one sample."""
    tokens = np.memmap(task.tokens_path, np.uint16, mode="r")
    block = task.seq_len + 1
    rows = np.asarray(tokens[: len(tokens) // block * block]).reshape(-1, block)
    with MDSWriter(out=task.directory, columns={"tokens": f"ndarray:uint16:{block}"}) as writer:
        for row in rows:
            writer.write({"tokens": row})


def read(task: ReadTask) -> Iterator[int]:
    """Yields the tokens of one batch after another, without end."""
    dataset = StreamingDataset(local=task.directory, shuffle=True, batch_size=task.micro_batch_size)

    def collate(samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    loader = DataLoader(dataset, batch_size=task.micro_batch_size, num_workers=0, collate_fn=collate, drop_last=True)
    while True:
        for rows in loader:
            inputs, _, _ = make_ready(rows, task.eos_id)
            yield inputs.numel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = task_from_json(sys.argv[1])
    write(task)
    serve(read(task), ("mosaicml-streaming", "torch", "numpy"))
