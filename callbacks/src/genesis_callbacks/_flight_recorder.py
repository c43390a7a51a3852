"""The last collective of this process, by torch's flight recorder.

torch records collectives if `TORCH_FR_BUFFER_SIZE` (before torch 2.13: `TORCH_NCCL_TRACE_BUFFER_SIZE`) is above 0. For
NCCL an entry has a state; gloo's entries only say that the collective was called.
"""

import importlib
import json
import threading
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from .base.json_text import load_json

_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_LIMIT_SECONDS: Final = 2.0


def read_flight_record() -> bytes:
    """Returns the recorded collectives as JSON; nothing without a recorder, or if torch does not answer in time."""
    dump = _find_dump()
    if dump is None:
        return b""
    answers: list[bytes] = []

    def ask() -> None:
        try:
            answers.append(dump(True, False))
        except (RuntimeError, TypeError) as error:  # no backend that records, or another signature
            answers.append(json.dumps({"error": str(error)}).encode())

    # In a thread, because NCCL's recorder takes locks that a hanging collective may hold.
    thread = threading.Thread(target=ask, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_LIMIT_SECONDS)
    return answers[0] if answers else b""


def describe_last(record: bytes) -> str:
    """Returns the last collective of a record with the sizes of its tensors and its state; empty without one. Pure.

    Example:
        >>> describe_last(b'{"entries": [{"profiling_name": "gloo:all_reduce", "input_sizes": [[4, 3]]}]}')
        'gloo:all_reduce [[4, 3]]'
    """
    try:
        entries: list[dict[str, Any]] = load_json(record)["entries"] if record else []
        last = max(entries, key=lambda entry: int(entry.get("record_id", 0)), default=None)
    except (ValueError, TypeError, LookupError, AttributeError):
        return ""
    if last is None:
        return ""
    name, sizes = last.get("profiling_name", "unknown"), last.get("input_sizes", "unknown sizes")
    state = "" if str(name).startswith("gloo:") else f" ({last.get('state', 'state unknown')})"
    types = " ".join(map(str, last.get("input_dtypes", ())))
    return " ".join(f"{name} {sizes} {types}".split()) + state


def _find_dump() -> Callable[[bool, bool], bytes] | None:
    if not dist.is_available():
        return None
    module = importlib.import_module("torch._C._distributed_c10d")  # private: torch has no public name for the dump
    return next((getattr(module, name) for name in _DUMPS if hasattr(module, name)), None)
