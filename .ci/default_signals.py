"""A pytest plugin that gives the tests, and the programs that they start, the signal handling of a shell's command.

A script that starts a command with `&` or `nohup` leaves SIGINT, SIGQUIT or SIGHUP ignored, and every program that the
command starts inherits that. Tests that send these signals would then see no effect.
"""

import signal

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Restores the default handling. The workers of pytest-xdist start after this and inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
