"""`genesis checkpoint to-lightning`: writes one portable `.ckpt` file for stock Lightning.

Exit status: 0 success, 1 a problem was found, 2 invalid arguments. The command only reads the run, also during
training.
"""

import argparse
import json
from pathlib import Path

from genesis.base.arguments import Parser
from genesis.cli.checkpoint.shared import CHECKPOINT_HELP
from genesis.generate.checkpoint_reference import find_checkpoint
from genesis_callbacks.checkpoint import CorruptCheckpointError, export_lightning_checkpoint

_DESCRIPTION = """Writes one .ckpt file from a checkpoint, for use without this package: Model.load_from_checkpoint,
Trainer.fit(ckpt_path=...) and torch.load(weights_only=True) read the file. It contains the whole training state except
the random generators. The checkpoint is verified first. Exit status 1 if it is damaged.
Example: genesis checkpoint to-lightning runs/demo/run demo.ckpt"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint to-lightning` and returns its exit status."""
    parser = Parser(
        prog="genesis checkpoint to-lightning",
        description=_DESCRIPTION,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)
    parser.add_argument("output", type=Path, help="the file to write; it must not exist")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        checkpoint = find_checkpoint(arguments.checkpoint, level="deep")
        path = export_lightning_checkpoint(checkpoint, arguments.output)
    except CorruptCheckpointError as error:
        print(f"BAD: {error}")
        return 1
    num_bytes = path.stat().st_size
    print(json.dumps({"path": str(path), "num_bytes": num_bytes}) if arguments.json else f"{path}: {num_bytes:,} bytes")
    return 0
