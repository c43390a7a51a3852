"""Prints what a program can see of how it was started, as JSON; then ends as its first argument says."""

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

SIGNALS = ("SIGINT", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGHUP", "SIGUSR1")


def _read_words(name: str) -> list[str]:
    return Path("/proc/self", name).read_text().rstrip("\0").split("\0")


def describe() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "main": (main.__name__, main.__spec__ and main.__spec__.name, getattr(main, "__file__", None)),
        "cwd": os.getcwd(),  # noqa: PTH109
        "path": sys.path[0],
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "shown words": _read_words("cmdline")[1:],
        "shown environment": sorted(word for word in _read_words("environ") if not word.startswith("LC_CTYPE=")),
        "stdin": (os.isatty(0), sys.stdin.read()),
        "descriptors": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()),
        "signals": {name: str(signal.getsignal(getattr(signal, name))) for name in SIGNALS},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "umask": os.umask(0),
        "process": multiprocessing.current_process().name,
        "parent": str(multiprocessing.parent_process()),
        "threads": threading.active_count(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "warnings": warnings.showwarning is warnings._showwarning_orig,
        "root logger": str(logging.getLogger().handlers),
        "stream": str(sys.stderr.fileno()),
    }


if __name__ == "__main__":
    print(json.dumps(describe(), sort_keys=True))
    match sys.argv[1]:
        case "error":
            raise RuntimeError("asked for")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case status:
            sys.exit(int(status))
