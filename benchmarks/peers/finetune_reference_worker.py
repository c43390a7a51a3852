"""A plain loop over the rows of the benchmark `finetune` with transformers and PEFT: the losses that ours must have.

Each conversation of a row runs by itself, so that neither masks nor positions can be wrong. The logits are whole.
"""

import sys
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM

from benchmarks.workers.finetune_protocol import (
    BETA,
    IGNORE_INDEX,
    FinetuneWorkload,
    Row,
    append_loss,
    finetune_from_json,
    read_batches,
)
from benchmarks.workers.protocol import Gate


def sum_losses(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Returns the sum of the losses of a row's learned tokens."""
    total = torch.zeros(())
    start = 0
    for length in row.seq_lengths:
        ids, labels = (torch.tensor([values[start : start + length]]) for values in (row.input_ids, row.labels))
        logits = model(input_ids=ids, use_cache=False).logits
        total = total + cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=IGNORE_INDEX, reduction="sum")
        start += length
    return total


def count_learned(row: Row) -> int:
    """Returns the number of learned tokens; the first of a conversation follows no other."""
    starts = {sum(row.seq_lengths[:index]) for index in range(len(row.seq_lengths))}
    return sum(label != IGNORE_INDEX and index not in starts for index, label in enumerate(row.labels))


def backward_tokens(model: Any, rows: list[Row]) -> float:
    """Returns the loss of a step, in nats per learned token, whose gradients it has added."""
    total = 0.0
    num_learned = sum(count_learned(row) for row in rows)
    for row in rows:
        loss = sum_losses(model, row) / num_learned
        loss.backward()
        total += float(loss)
    return total


def backward_pairs(model: Any, rows: list[Row]) -> float:
    """Returns the loss of DPO of a step, in nats per pair, whose gradients it has added; the base is the reference."""
    total = 0.0
    num_pairs = len(rows) // 2
    for start in range(0, len(rows), 2):
        pair = rows[start : start + 2]
        with torch.no_grad(), model.disable_adapter():
            reference = [-sum_losses(model, row) for row in pair]
        chosen, rejected = (-sum_losses(model, row) - given for row, given in zip(pair, reference, strict=True))
        loss = -logsigmoid(BETA * (chosen - rejected)) / num_pairs
        loss.backward()
        total += float(loss)
    return total


def train(workload: FinetuneWorkload) -> None:
    """Trains as many steps as there are rows, or until the parent sends `quit`."""
    gate = Gate(workload, ["torch", "transformers", "peft"])
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    # transformers gives the input embedding of the pad token no gradient; in SmolLM2 that token ends the turns.
    model.get_input_embeddings().padding_idx = None
    if workload.adapter is not None:
        model = PeftModel.from_pretrained(model, workload.adapter, is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    backward = backward_pairs if workload.kind == "dpo" else backward_tokens
    options = workload.optimizer
    optimizer = torch.optim.AdamW(trained, **{**options, "betas": tuple(options["betas"])})
    for _, rows in zip(gate.passes(), read_batches(workload), strict=False):
        optimizer.zero_grad(set_to_none=True)
        append_loss(workload, backward(model, rows))
        torch.nn.utils.clip_grad_norm_(trained, workload.max_grad_norm)
        optimizer.step()


if __name__ == "__main__":
    train(finetune_from_json(sys.argv[1]))
