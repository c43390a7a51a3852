"""Runs the proof in a new process, so that its imports and models do not use this process's memory."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

from genesis.base.available_memory import available_memory
from genesis.base.errors import RunEndedError, UserError, blaming
from genesis.base.processes import start_program
from genesis.base.progress import SentStages, stage
from genesis.huggingface.directory import PROOF_NAME

Layout = Literal["huggingface", "safetensors", "gguf"]
TokenizerOrigin = Literal["run", "unproved", "none"]
"""Whether the tokenizer's hash equals the manifest's, cannot be confirmed, or there is no tokenizer."""
TokenizerForm = Literal["huggingface", "own", "none"]
"""The tokenizer's files in an export: its own and those for transformers, only its own, or none."""
PROVE_MODULE = "genesis.export.prove"
PROVE_ADAPTER_MODULE = "genesis.export.prove_adapter"
PROVE_GGUF_MODULE = "genesis.export.prove_gguf"
PROVE_LLAMA_CPP_MODULE = "genesis.export.prove_llama_cpp"
_REMEDY: Final = "leave the logits out of the proof by --proof weights, or correct the directory's files"
UNPROVED_TOKENIZER: Final = "no hash confirms that the model was trained with this tokenizer"


def run_proof(
    directory: Path,
    checkpoints: Sequence[Path],
    tokenizer: Path | None,
    layout: Layout,
    *,
    is_import: bool = False,
    compares_models: bool = True,
    is_whole: bool = False,
    is_merged: bool = False,
) -> dict[str, Any]:
    """Runs the proof in a new process and returns its results; a failed comparison raises.

    Args:
        directory: The exported directory, or the directory to import.
        checkpoints: The checkpoints; several mean their average.
        tokenizer: The tokenizer's directory; None without a tokenizer.
        layout: `huggingface`, or `safetensors` for our own names, of which only weights are compared.
        is_import: Whether another project made the directory. Its tokenizer may change some characters, which are then
            skipped, and may encode the names of control symbols as these symbols, which is then turned off.
        compares_models: Whether logits and generated text are compared, which loads the model as float32.
        is_whole: Whether all texts and sequences are compared, however long that takes; otherwise as many as fit the
            size of the model (`genesis.export.proof_size`).
        is_merged: Whether the checkpoint's adapters were merged into the weights of their base.

    Raises:
        RunEndedError: A comparison failed; the message names it.
    """
    request = {
        "directory": str(directory),
        "checkpoints": [str(path) for path in checkpoints],
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "layout": layout,
        "is_import": is_import,
        "compares_models": compares_models,
        "is_whole": is_whole,
        "is_merged": is_merged,
    }
    return run_proof_of(request, PROVE_MODULE)


def check_proof_memory(num_bytes: int) -> None:
    """Checks that the machine has enough memory to compare logits, before the system would kill the process.

    Args:
        num_bytes: The bytes of the weights, as float32, that the proof holds at once.

    Raises:
        UserError: The machine has too little free memory.
    """
    available = available_memory()
    if available is not None and available < num_bytes:
        raise UserError(
            f"the proof of the logits takes {num_bytes / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are "
            "available: leave the logits out of the proof by --proof weights"
        )


def run_proof_of(request: dict[str, Any], module: str) -> dict[str, Any]:
    """Runs a proving module on a request in a new process and returns its results; a failed comparison raises.

    Raises:
        RunEndedError: A comparison failed; the message names it.
    """
    done = run_prove(json.dumps(request), module)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        reason = (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]
        raise RunEndedError(f"the proof did not finish, and the result was removed: {reason}; {_REMEDY}")
    result: dict[str, Any] = json.loads(lines[-1])
    if "problem" in result:
        raise RunEndedError(f"the proof failed, and the result was removed: {result['problem']}")
    return result


def answer_request(argv: Sequence[str], prove: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Runs a proof in its process for the request, JSON in the first argument; prints the results as a line of JSON.

    Whatever the libraries raise about the directory is a problem of the directory, in one line.
    """
    request = json.loads(argv[0])
    try:
        with blaming(request["directory"], _REMEDY):
            result = prove(request)
    except (UserError, OSError) as error:
        result = {"problem": str(error)}
    print(json.dumps(result))
    return 0


def run_prove(request: str, module: str = PROVE_MODULE) -> subprocess.CompletedProcess[str]:
    """Runs a proving module on a request in a process of its own and returns its status and output.

    The stages that the process sends are shown as this one's.
    """
    command = [sys.executable, "-P", "-m", module, request]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        ExitStack() as start,
    ):
        start.enter_context(stage("starting the proof"))
        process = start_program(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=prove_environment())
        lines = []
        try:
            assert process.stdout is not None
            with process.stdout, SentStages() as sent:
                for line in process.stdout:
                    start.close()  # the process now sends stages of its own
                    if not sent.take(line):
                        lines.append(line)
            process.wait()
        finally:
            process.kill()  # an interruption of this process does not always reach the other one
            process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, "".join(lines), errors.read())


def prove_environment() -> dict[str, str]:
    """Returns this process's environment with transformers offline and quiet."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def write_proof(directory: Path, proof: dict[str, Any]) -> None:
    """Writes the proof into the directory that it is about."""
    (directory / PROOF_NAME).write_text(json.dumps(proof, indent=2) + "\n", encoding="utf-8")
