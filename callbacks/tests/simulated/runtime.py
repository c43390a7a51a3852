"""The simulated accelerator of `device.cpp`: compiled by g++, loaded, and registered as a device of torch.

It imports torch alone, because torch itself loads it as a backend where `backend` is on Python's path.
"""

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "simulated"
COMPILER = os.environ.get("CXX", "g++")


def build_library() -> Path:
    """Returns the compiled device; it is compiled once for each version of its source and of torch."""
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"genesis-simulated-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    library = directory / f"{key}.so"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home = Path(torch.__file__).parent
            made = library.with_suffix(".part")
            command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
            command += [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
            subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch"], check=True, timeout=240)
            made.rename(library)
    return library


class Runtime:
    """Pins memory, as `torch.cuda.cudart()` does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        return self._library.simulated_pin(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        return self._library.simulated_unpin(ctypes.c_void_p(address))


def load(first_us: int = 0, other_us: int = 0) -> ctypes.CDLL:
    """Makes the device this process's accelerator and returns its controls.

    Args:
        first_us: How late each act of the first stream is, on which training runs.
        other_us: How late those of all other streams are.
    """
    library = ctypes.CDLL(str(build_library()))
    for name in ("allocated_bytes", "num_waits", "pinned_bytes"):
        getattr(library, f"simulated_{name}").restype = ctypes.c_int64
    for name in ("limit_memory", "limit_pins"):
        getattr(library, f"simulated_{name}").argtypes = [ctypes.c_int64]
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        module = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            is_initialized=lambda: True,
            _is_in_bad_fork=lambda: False,
            manual_seed_all=lambda seed: None,
            get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
            get_device_name=lambda device: "a simulated device",
            cudart=lambda: Runtime(library),
        )
        torch._register_device_module(NAME, module)
    library.simulated_set_delays(first_us, other_us)
    return library
