"""Importing a module of ours changes nothing that belongs to the process."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import genesis
import genesis_callbacks

PACKAGES = {
    "genesis": Path(genesis.__file__).parent,
    "genesis_callbacks": Path(genesis_callbacks.__file__).parent,
}
PROGRAM = """
import atexit, faulthandler, gc, importlib, json, locale, logging, multiprocessing, os, signal, socket, sys, threading
import warnings
from contextlib import suppress

modules, third_parties = json.load(sys.stdin)
for name in third_parties:
    with suppress(ImportError):
        importlib.import_module(name)

import torch
import tqdm

NEW_LOGGER = (0, "[]", "[]", True, False)

def look():
    loggers = {name: log for name, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    signals = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]
    return {
        **{f"os.environ[{key}]": value for key, value in os.environ.items()},
        **{f"signal {number.name}": repr(signal.getsignal(number)) for number in signals},
        **{
            f"log {name}": (log.level, repr(log.handlers), repr(log.filters), log.propagate, log.disabled)
            for name, log in {**loggers, "root": logging.root}.items()
        },
        "hooks": repr((sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)),
        "streams": repr((sys.stdin, sys.stdout, sys.stderr)),
        "tracing": (sys.gettrace(), sys.getprofile(), faulthandler.is_enabled()),
        "paths": repr((sys.path, sys.meta_path, sys.path_hooks)),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()),
        "warnings": repr((warnings.filters, warnings.showwarning, warnings.formatwarning)),
        "place": (os.getcwd(), locale.setlocale(locale.LC_ALL), socket.getdefaulttimeout()),
        "processes": (multiprocessing.get_start_method(allow_none=True), threading.active_count()),
        "exits": atexit._ncallbacks(),
        "tqdm": repr((vars(tqdm.tqdm)["__init__"], tqdm.tqdm.monitor_interval)),
        "torch": repr((
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.initial_seed(),
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark,
            torch.multiprocessing.get_sharing_strategy(), torch.get_rng_state().sum(),
        )),
    }

changes = {}
before = look()
for name in modules:
    importlib.import_module(name)
    after = look()
    for key in before.keys() | after.keys():
        # A logger that is new and has nothing set changes nothing.
        old = before.get(key, NEW_LOGGER if key.startswith("log ") else None)
        if after.get(key) != old:
            changes.setdefault(name, []).append(f"{key}: {old} -> {after.get(key)}")
    before = after
print(json.dumps(changes))
"""


def list_modules() -> list[str]:
    """Returns the names of all our modules, but for those that are programs alone."""
    names = []
    for package, root in PACKAGES.items():
        for path in sorted(root.rglob("*.py")):
            parts = (package, *path.relative_to(root).with_suffix("").parts)
            if parts[-1] != "__main__":
                names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def list_third_parties() -> list[str]:
    """Returns what our modules import from elsewhere, as they name it."""
    found = set()
    for path in (path for root in PACKAGES.values() for path in root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return sorted(name for name in found if name.partition(".")[0] not in PACKAGES and name != "__future__")


@pytest.mark.slow
@pytest.mark.early
@pytest.mark.process
def test_importing_a_module_changes_no_state_of_the_process() -> None:
    request = json.dumps([list_modules(), list_third_parties()])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=request, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
