"""Builds accumulation windows from the workload's random tokens."""

import torch

from benchmarks.workers.protocol import NUM_DISTINCT_WINDOWS, Workload, random_rows
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch

_DOCUMENTS_PER_ROW = 4


def build_windows(workload: Workload) -> list[AccumulationWindow]:
    """Returns the distinct windows, in the order of their use."""
    rows = random_rows(workload)
    input_ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    document_ids = torch.zeros_like(input_ids, dtype=torch.int32)
    if workload.documents == "packed":
        generator = torch.Generator().manual_seed(1)
        is_end = torch.rand(labels.shape, generator=generator) < _DOCUMENTS_PER_ROW / workload.seq_len
        labels[is_end] = IGNORE_INDEX
        document_ids[:, 1:] = is_end[:, :-1].cumsum(1)
    size = workload.micro_batch_size
    micro_batches = [
        MicroBatch(input_ids[start : start + size], labels[start : start + size], document_ids[start : start + size])
        for start in range(0, len(rows), size)
    ]
    windows = []
    for index in range(NUM_DISTINCT_WINDOWS):
        of_window = tuple(micro_batches[index * workload.num_micro_batches :][: workload.num_micro_batches])
        num_valid = sum(int((m.labels != IGNORE_INDEX).sum()) for m in of_window)
        windows.append(
            AccumulationWindow(of_window, num_valid, 4 * num_valid, (index + 1) * workload.sequences_per_window)
        )
    return windows
