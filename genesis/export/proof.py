"""Asks a fresh process for the proof, so that what it loads costs this one nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from genesis.errors import RunEndedError
from genesis.huggingface.directory import PROOF_NAME

Layout = Literal["huggingface", "safetensors"]
TokenizerOrigin = Literal["run", "unproved", "none"]
"""Whether the tokenizer's hash is that of the checkpoint's manifest, or nothing shows it, or there is no tokenizer."""
TokenizerForm = Literal["huggingface", "own", "none"]
"""Which of a tokenizer's files an export has: those that transformers opens beside its own, its own alone, or none."""
PROVE_MODULE = "genesis.export.prove"
UNPROVED_TOKENIZER: Final = "nothing shows that the model was trained with this tokenizer"


def run_proof(
    directory: Path,
    checkpoints: Sequence[Path],
    tokenizer: Path | None,
    layout: Layout,
    *,
    is_import: bool = False,
) -> dict[str, Any]:
    """Returns what the proof found, all of it good, from a fresh process.

    Args:
        directory: What was exported, or is imported.
        checkpoints: Of the engine; several stand for their average.
        tokenizer: A directory that holds it; None where none is taken over.
        layout: `huggingface`, or `safetensors` for our own names: then only weights are compared.
        is_import: Whether the directory is of others, whose tokenizers may change some characters, and take what
            spells a control symbol for the symbol: the former are left out, the latter asked to be read as text.

    Raises:
        RunEndedError: Something differs; the line says what.
    """
    request = {
        "directory": str(directory),
        "checkpoints": [str(path) for path in checkpoints],
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "layout": layout,
        "is_import": is_import,
    }
    done = run_prove(json.dumps(request))
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise RunEndedError(f"the proof did not come to its end, so that nothing is kept: {reason}")
    result: dict[str, Any] = json.loads(lines[-1])
    if "problem" in result:
        raise RunEndedError(f"the proof failed, so that nothing is kept: {result['problem']}")
    return result


def run_prove(request: str) -> subprocess.CompletedProcess[str]:
    """Runs `genesis.export.prove` on a request in a process of its own and returns its status and output."""
    return subprocess.run(
        [sys.executable, "-P", "-m", PROVE_MODULE, request],
        capture_output=True,
        text=True,
        env=prove_environment(),
        check=False,
    )


def prove_environment() -> dict[str, str]:
    """Returns this process's environment with transformers offline and quiet."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def write_proof(directory: Path, proof: dict[str, Any]) -> None:
    """Writes what was found beside what it is about."""
    (directory / PROOF_NAME).write_text(json.dumps(proof, indent=2) + "\n", encoding="utf-8")
