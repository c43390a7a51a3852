"""`genesis supervise` as one of several nodes, in a forked process whose launcher is forked from the same process.

Its last argument is the descriptor of the socket to that process (`tests.forkserver`).
"""

import functools
import socket
import sys
from typing import Any

from genesis.cli.main import main
from genesis.operations.supervise import launcher_client
from tests import commands
from tests.operations.supervise.supervised import fork_launcher


def run() -> int:
    """Runs the command of the arguments, and returns its exit status."""
    requests = socket.socket(fileno=int(sys.argv.pop()))
    server: Any = functools.cache(lambda modules: requests)
    commands._requests = server
    launcher_client.start_launcher = fork_launcher
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
