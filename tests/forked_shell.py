"""The commands `genesis` and `python SCRIPT` for scripts of the shell, forked from a process with the imports done.

A script that a test runs finds them on its `PATH`: small programs that pass their arguments, directory, environment,
stdout and stderr to the process of the tests, which forks the real command (`tests.commands`). The program passes
signals on, ends as the command ends, and a command whose program is killed is killed. `python` with other arguments
than those of a script is the real one.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tests.commands import ForkedCommand

MAX_REQUEST_BYTES = 1 << 20
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

if {name!r} == "python" and not "".join(sys.argv[1:2]).endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect({address!r})
request = dict(words=[{name!r}, *sys.argv[1:]], cwd=os.getcwd(), environment=dict(os.environ))
socket.send_fds(channel, [json.dumps(request).encode()], [1, 2])
pid = int(channel.recv(64))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
channel.settimeout(0.5)  # Python runs no handler of a signal that comes just before the wait, until the wait ends
while True:
    try:
        status = int(channel.recv(64))
        break
    except TimeoutError:
        pass
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class ForkedShell:
    """Serves programs in a directory, until its context is left.

    Args:
        directory: For the programs and their socket, whose path must be short.
        names: Of the programs: modules, or `python`.
    """

    def __init__(self, directory: Path, *names: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = str(directory / "s")
        self._listening.bind(address)
        self._listening.listen()
        for name in names:
            program = directory / name
            text = PROGRAM.format(python=sys.executable, address=address, name=name)
            program.write_text(text, encoding="utf-8")
            program.chmod(0o755)
        self._accepting = threading.Thread(target=self._accept)

    def __enter__(self) -> "ForkedShell":
        self._accepting.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._listening.accept()
            except OSError:  # the end, see `__exit__`
                return
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
            request: dict[str, Any] = json.loads(message)
            out, err = descriptors
            place: dict[str, Any] = {"cwd": Path(request["cwd"]), "env": request["environment"]}
            words = request["words"]
            command = ForkedCommand(*(words[1:] if words[0] == "python" else words), **place, stdout=out, stderr=err)
            for descriptor in descriptors:
                os.close(descriptor)
            threading.Thread(target=_serve, args=(channel, command)).start()


def _serve(channel: socket.socket, command: ForkedCommand) -> None:
    """Reports the process id and the end of a command to its program."""
    lock = threading.Lock()

    def end_with_program() -> None:
        channel.recv(1)  # nothing comes: the program has ended
        with lock:
            if command.returncode is None:
                os.kill(command.pid, signal.SIGKILL)

    watching = threading.Thread(target=end_with_program)
    with contextlib.suppress(BrokenPipeError):
        channel.send(str(command.pid).encode())
    watching.start()
    status = command.wait()
    with lock, contextlib.suppress(BrokenPipeError):
        channel.send(str(status).encode())
    watching.join()
    channel.close()
