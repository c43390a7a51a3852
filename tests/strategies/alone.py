"""A program that trains, validates and goes on on one device, and says what it saw: ports, process group, losses."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist

from genesis_callbacks import AsyncProcessCheckpoint, TokenCounters
from tests.train.support import build_module, build_strategy, build_trainer, loader

NUM_STEPS = 4
LISTENS = "0A"


def listening_ports() -> list[int]:
    """Returns the TCP ports that this process listens on, as the kernel has them."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *others = line.split()
            if state == LISTENS and f"socket:[{others[5]}]" in own:
                ports.append(int(address.rpartition(":")[2], 16))
    return ports


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.ports: list[int] = []
        self.has_group = False
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.ports += listening_ports()
        self.has_group |= dist.is_initialized()
        self.losses.append(float(outputs["loss_sum"]) / batch.num_valid_tokens)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.ports += listening_ports()
        self.has_group |= dist.is_initialized()


def run(strategy: str, run_dir: str, max_steps: int, ckpt_path: str | None) -> dict[str, object]:
    watch = Watch()
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir)
    trainer = build_trainer(build_strategy(strategy), 1, max_steps, [TokenCounters(), watch, checkpoint])
    module = build_module()
    trainer.fit(module, loader(NUM_STEPS, 0, 1), loader(2, 0, 1), ckpt_path=ckpt_path)
    trainer.validate(module, loader(2, 0, 1))
    return {
        "ports": watch.ports,
        "has_group": watch.has_group,
        "losses": watch.losses,
        "step": trainer.global_step,
        "validation": float(trainer.callback_metrics["validation/loss"]),
    }


if __name__ == "__main__":
    name, directory = sys.argv[1:]
    runs = [run(name, directory, NUM_STEPS // 2, None), run(name, directory, NUM_STEPS, "latest")]
    Path(directory, "seen.json").write_text(json.dumps(runs))
