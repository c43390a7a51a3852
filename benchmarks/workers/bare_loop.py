"""A plain PyTorch training loop with our model, loss, optimizer and gradient clipping, and nothing else."""

import sys
from functools import partial

import torch

from benchmarks.workers.protocol import Gate, workload_from_json
from benchmarks.workers.windows import build_windows
from genesis.base.device import CPU
from genesis.model.decoder import Decoder
from genesis.model.loss import sum_cross_entropy
from genesis.model.recipe import build_decoder_config
from genesis.optim import AdamW, build_optimizer
from genesis.strategies.wrap import apply_wrappers

_MAX_GRADIENT_NORM = 1.0


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = workload_from_json(arguments[0])
    loss = torch.zeros(())
    gate = Gate(workload, ["torch"], lambda: float(loss))
    device = torch.device(workload.device)
    windows = build_windows(workload)
    if workload.device != CPU:
        windows = [window.pin_memory() for window in windows]

    decoder = Decoder(build_decoder_config(workload.decoder, "the workload")).to(device)
    decoder.init_weights(seed=0)
    apply_wrappers(decoder, has_compiled_blocks=workload.is_compiled)
    optimizer = build_optimizer(decoder, AdamW(**workload.optimizer))
    autocast = torch.autocast(workload.device, torch.bfloat16, enabled=workload.precision == "bf16-mixed")

    for step in gate.passes():
        window = windows[step % len(windows)].to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=device)
        for micro_batch in window.micro_batches:
            head = partial(sum_cross_entropy, labels=micro_batch.labels)
            with autocast:
                loss_sum = decoder(micro_batch.input_ids, document_ids=micro_batch.document_ids, head=head)
            part = loss_sum / window.num_valid_tokens
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), _MAX_GRADIENT_NORM)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1:])
