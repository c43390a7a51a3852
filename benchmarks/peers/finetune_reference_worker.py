"""A plain loop over the rows of the benchmark `finetune` with transformers and PEFT: the losses that ours must have.

Each conversation of a row runs by itself, so that neither masks nor positions can be wrong. The logits are whole.
"""

import sys
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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


def backward_answers(model: Any, rows: list[Row]) -> float:
    """Returns the loss of KTO of a step, in nats per answer, whose gradients it has added; the base is the reference.

    z is the mean over the mismatched answers, which are the answers of the same pairs.
    """
    with torch.no_grad():
        before = [-sum_losses(model, row) for row in rows]
        with model.disable_adapter():
            reference = [-sum_losses(model, row) for row in rows]
    z = torch.stack([one - given for one, given in zip(before, reference, strict=True)]).mean().clamp(min=0)
    total = 0.0
    for number, (row, given) in enumerate(zip(rows, reference, strict=True)):
        ratio = -sum_losses(model, row) - given
        loss = (1 - torch.sigmoid(BETA * (z - ratio if number % 2 else ratio - z))) / len(rows)
        loss.backward()
        total += float(loss)
    return total


def backward_scores(model: Any, rows: list[Row]) -> float:
    """Returns the loss of a reward model of a step, in nats per pair, whose gradients it has added."""
    total = 0.0
    for start in range(0, len(rows), 2):
        chosen, rejected = (
            model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, 0]
            for row in rows[start : start + 2]
        )
        loss = -logsigmoid(chosen - rejected) / (len(rows) // 2)
        loss.backward()
        total += float(loss)
    return total


BACKWARD = {"dpo": backward_pairs, "kto": backward_answers, "reward": backward_scores}


def train(workload: FinetuneWorkload) -> None:
    """Trains as many steps as there are rows, or until the parent sends `quit`."""
    gate = Gate(workload, ["torch", "transformers", "peft"])
    auto = AutoModelForSequenceClassification if workload.kind == "reward" else AutoModelForCausalLM
    model = auto.from_pretrained(workload.model, dtype=torch.float32)
    model.config.pad_token_id = None  # a score is that of the last token, also where it is the pad token
    # transformers gives the input embedding of the pad token no gradient; in SmolLM2 that token ends the turns.
    model.get_input_embeddings().padding_idx = None
    if workload.adapter is not None:
        model = PeftModel.from_pretrained(model, workload.adapter, is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    backward = BACKWARD.get(workload.kind, backward_tokens)
    options = workload.optimizer
    optimizer = torch.optim.AdamW(trained, **{**options, "betas": tuple(options["betas"])})
    for _, rows in zip(gate.passes(), read_batches(workload), strict=False):
        optimizer.zero_grad(set_to_none=True)
        append_loss(workload, backward(model, rows))
        torch.nn.utils.clip_grad_norm_(trained, workload.max_grad_norm)
        optimizer.step()


if __name__ == "__main__":
    train(finetune_from_json(sys.argv[1]))
