"""`python -m benchmarks NAME ...`: finds a benchmark, runs it, and reports a user's mistake in one line."""

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from genesis.base.arguments import respell
from genesis.base.errors import RunEndedError, UserError
from genesis.evaluate.environment import make_quiet

BENCHMARKS: Final = {
    "step": "the training step beside bare loops, other trainers and the machine's peak",
    "experts": "a mixture of experts beside a dense model and Mixtral",
    "axes": "tensor, context and pipeline parallelism on two ranks beside one process and the plan",
    "finetune": "fine-tuning beside TRL: speed, memory, losses",
    "checkpoint": "training steps around a save, ours and torch's",
    "telemetry": "what each telemetry callback costs a training step",
    "data": "tokens per second of the data alone: prepared, streamed and being prepared",
    "evaluate": "evaluation beside lm-eval's hf backend",
    "recovery": "the time from a killed rank to the next step",
    "versions": "this version's speed beside another checkout's",
    "session": "all that a borrowed GPU should answer, in minutes",
}
_MISUSE: Final = 2
_INTERRUPTED: Final = 130


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark and returns the exit status: its own, 2 for a user's mistake, or 130 for an interruption."""
    name, *words = argv or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {name:<10}  {summary}" for name, summary in BENCHMARKS.items()]
        print("usage: python -m benchmarks NAME [options]\n", *lines, sep="\n")
        return 0
    try:
        if name not in BENCHMARKS:
            raise UserError(f"no such benchmark: {name!r}; there are {', '.join(BENCHMARKS)}")
        if name == "evaluate":
            make_quiet()  # lm-eval reads the environment when it is imported
        status: int = importlib.import_module(f"benchmarks.{name}").main(respell(words))
    except (UserError, RunEndedError) as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return _MISUSE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
